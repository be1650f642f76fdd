package drop

import (
	"slices"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/kernel/bpf"
)

// counter is a copy of fl_count for host ends in one namespace. A copy takes 10 ms to load.
type counter struct {
	*bpf.Copy
	netns uint64
	veths [1024]dropVeth // fl_veths
}

func (c *counter) at(d container.Device) *dropVeth { return &c.veths[d.Index%len(c.veths)] }

// counter returns a counter with room for a host end.
func (d *Dropper) counter(end container.Device) (*counter, error) {
	for _, c := range d.counters {
		if c.netns == end.NetNS && *c.at(end) == (dropVeth{}) {
			return c, nil
		}
	}
	p, err := d.object.Copy(dropProgFlCount, nil)
	if err != nil {
		return nil, err
	}
	c := &counter{Copy: p, netns: end.NetNS}
	d.counters = append(d.counters, c)
	return c, nil
}

// tell sets the veth of a host end in a counter; the zero veth means that the counter is detached there.
// It closes a counter that is attached nowhere.
func (d *Dropper) tell(c *counter, end container.Device, whose dropVeth) error {
	if *c.at(end) == whose {
		return nil
	}
	if *c.at(end) = whose; c.veths == [len(c.veths)]dropVeth{} {
		d.counters = slices.DeleteFunc(d.counters, func(o *counter) bool { return o == c })
		return c.Close()
	}
	return c.Set(bpf.Vars{dropVarFlHostNetns: uint32(c.netns), dropVarFlVeths: c.veths})
}
