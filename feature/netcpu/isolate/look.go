package isolate

import (
	"errors"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/kernel/cgroup"
	"github.com/fairlead-project/fairlead/kernel/journal"
	"github.com/fairlead-project/fairlead/kernel/netdev"
	"github.com/fairlead-project/fairlead/kernel/sched"
)

// What is looked at here is what plan.go needs to know. Nothing is changed.

// device is a device that is, or can be, polled on its own.
type device struct {
	ns    *netdev.NS
	index int
	name  string
	rps   []receiveQueue
	end   *hostEnd // of a container's veth; nil for an uplink
}

// receiveQueue is the CPU mask of one queue's RPS: as it is, and as somebody else has
// set it.
type receiveQueue struct{ mask, given string }

// hostEnd is the host end of a veth.
type hostEnd struct {
	ns          *netdev.NS // to be closed
	index       int
	switchedOff bool   // TSO, by us,
	before      string // and what it was before
}

// lookAt looks at a device.
func (is *Isolator) lookAt(ns *netdev.NS, index int, name string) (device, error) {
	d := device{ns: ns, index: index, name: name}
	link, err := ns.Link(index)
	if err != nil {
		return d, err
	}
	for q := range link.RxQueues {
		knob := ns.RPS(index, q)
		mask, err := knob.Read()
		if q > 0 && errors.Is(err, journal.ErrGone) {
			break // a veth is made with a queue for each CPU and uses one; sysfs shows only those in use
		}
		if err != nil {
			return d, err
		}
		given := mask
		if e, ok := is.cfg.Journal.Entry(knob.Ref()); ok && e.Ours(mask) {
			given = e.Before
		}
		d.rps = append(d.rps, receiveQueue{mask, given})
	}
	return d, nil
}

// lookAtVeth looks at a device of a container with both its ends. Its host end is to
// be closed.
func (is *Isolator) lookAtVeth(ns *netdev.NS, dev container.Interface) (device, error) {
	d, err := is.lookAt(ns, dev.Index, dev.Name)
	if err != nil {
		return d, err
	}
	d.end, err = is.lookAtEnd(dev.Host)
	return d, err
}

// lookAtEnd looks at the host end of a veth. It is to be closed.
func (is *Isolator) lookAtEnd(end container.HostEnd) (*hostEnd, error) {
	ns, err := is.cfg.Find.Open(end.NSPath, end.NetNS)
	if err != nil {
		return nil, err
	}
	e, turned := is.turned(ns.Offload(end.Index, netdev.TSO))
	return &hostEnd{ns: ns, index: end.Index, switchedOff: turned, before: e.Before}, nil
}

func (e *hostEnd) close() error { return e.ns.Close() }

// weight is the CPU weight of a cgroup.
type weight struct {
	knob  journal.Knob
	takes cgroup.WeightRange
	now   string
	given string // by its owner
	mine  bool   // it was turned for this container
}

func (is *Isolator) lookAtWeight(dir string, id container.ID) (weight, error) {
	knob, takes := cgroup.WeightKnob(dir, is.v2())
	now, err := knob.Read()
	w := weight{knob: knob, takes: takes, now: now, given: now}
	if e, turned := is.turned(knob); turned {
		w.mine = e.Owner == is.by(id)
		if e.Ours(now) {
			w.given = e.Before // what is there is our own doing
		}
	}
	return w, err
}

// planFor is the plan for a thread and its place.
func (is *Isolator) planFor(t sched.Thread, at place) ([]journal.Setting, error) {
	proc := is.cfg.Roots.Proc
	slice, err := sched.Slice(proc, t).Read()
	if err != nil {
		return nil, err
	}
	nice, err := sched.Nice(proc, t).Read()
	if err != nil {
		return nil, err
	}
	if nice == sched.NoNice {
		at.nice = "" // it is not of the fair class
	}
	return append(placing(proc, is.cfg.Layout, t, at), pacing(proc, t, slice, at.nice)...), nil
}

// turned gives the note of a knob that this feature has turned.
func (is *Isolator) turned(k journal.Knob) (journal.Entry, bool) {
	e, ok := is.cfg.Journal.Entry(k.Ref())
	return e, ok && e.Owner.Feature == is.cfg.Feature
}
