package isolate

import (
	"slices"
	"testing"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/kernel/cgroup"
	"github.com/fairlead-project/fairlead/kernel/journal"
	"github.com/fairlead-project/fairlead/kernel/netdev"
)

// For super-packets TSO goes back to what it was before the container was isolated, and no further. A
// device that is not the container's any more goes back as well, and the weight stays.
func TestSuperIsWhatItWas(t *testing.T) {
	testkit.OnKernels(t)
	at := place{group: testkit.Cgroup(t).CPU}
	is, ns, index, path := bare(t)
	inside, err := ns.Index("flta")
	must(t, err)
	dev := container.Interface{Name: "flta", Index: inside, Kind: "veth", Host: container.HostEnd{NetNS: ns.Inode(), NSPath: path, Index: index}}
	s := &isolation{payer: container.Container{ID: 1, Interfaces: []container.Interface{dev}}}
	knob, other := ns.Offload(index, netdev.TSO), ns.Offload(index, netdev.GRO)
	weight, _ := cgroup.WeightKnob(at.group, is.v2())
	must(t, is.turn([]journal.Setting{{Knob: weight, Value: "50"}, {Knob: other, Value: netdev.GRO.On()}}, is.owns(1)))
	for _, was := range []string{netdev.TSO.On(), "tx-tcp-segmentation", netdev.Off} {
		must(t, knob.Write(was))
		for _, step := range []struct {
			shape shape
			want  string
		}{{single, netdev.Off}, {super, was}, {super, was}, {single, netdev.Off}} {
			_, err := is.bringVeths(ns, s.payer, step.shape, at)
			must(t, err)
			testkit.Gives(t, "tso, before "+was, step.want)(knob.Read())
		}
		testkit.Gives(t, "weight", "50")(weight.Read())
		testkit.Gives(t, "gro of another device", netdev.Off)(other.Read())
		if off := slices.ContainsFunc(is.cfg.Journal.Entries(), is.switchedOff(s)); off != (was != netdev.Off) {
			t.Errorf("tso was %s: switched off by us %v", was, off)
		}
		must(t, is.restore(is.switchedOff(s)))
		testkit.Gives(t, "tso in the end", was)(knob.Read())
	}
}
