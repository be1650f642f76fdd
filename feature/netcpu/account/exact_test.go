package account

import (
	"testing"

	"github.com/cilium/ebpf"

	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/lab/sandbox"
)

// A full table of thefts is counted, and the accounts stay exact: so do the sums that each
// container took and lost.
func TestLost(t *testing.T) {
	testkit.InFull(t)
	l := newLab(t, exactMeter(t))
	wire, box, victim := l.bare("wire"), l.box("box"), l.box("victim")
	l.watch(victim)
	l.load(victim, 0, "burn")
	l.wire(sandbox.End{Box: wire, Name: "h0", Addr: prefix("10.66.0.1/24")},
		sandbox.End{Box: box, Name: "eth0", Addr: prefix("10.66.0.2/24")}, "1")
	one := make([]uint64, ebpf.MustPossibleCPU())
	for i := range l.m.maps.FlThefts.MaxEntries() {
		key := accountTheft{Victim: 0xffff, Kind: uint16(i), Culprit: uint16(i >> 4)}
		if err := l.m.maps.FlThefts.Put(key, one); err != nil {
			break // full
		}
	}
	// Only now: pairs from before have their places.
	l.watch(box, l.device(wire, "h0", true), l.device(box, "eth0", false))
	r := l.receive(box, 0, ":9000")
	l.send(wire, 1, packets, "udp-send", "10.66.0.2:9000")
	l.got(r, packets)
	l.expectAny(delta.sums, func(d delta) {
		d.received(box, UDP, packets, packets*sizeUDP4)
		took, robbed := d.of(box).Took, d.of(victim).Robbed
		if d.readingLost == 0 || took <= 0 || robbed <= 0 || d.stolen(victim, box) != 0 {
			d.t.Errorf("%d charges lost, the box took %v, the victim lost %v", d.readingLost, took, robbed)
		}
		d.nothing(victim)
	})
}
