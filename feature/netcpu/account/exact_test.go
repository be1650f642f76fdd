package account

import (
	"testing"
	"time"

	"github.com/cilium/ebpf"

	"github.com/fairlead-project/fairlead/sandbox"
)

// A host on which nothing happens charges nobody.
func TestIdle(t *testing.T) {
	f := newFabric(t)
	box := f.add("box", 2, f.host)
	time.Sleep(500 * time.Millisecond) // addresses settle
	f.measure(while, func(d delta) {
		if cpu := d.of(box).CPU(); cpu > while/100 {
			d.t.Errorf("%v for a container that does nothing", cpu)
		}
	})
}

// A table of thefts that is full is counted, and the accounts stay right: what
// one has taken and another has lost, too.
func TestLost(t *testing.T) {
	l := newLab(t)
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
	// Only now: what has met before has its place.
	l.watch(box, l.device(wire, "h0", true), l.device(box, "eth0", false))
	l.load(box, 0, "udp-recv", "--listen", ":9000")
	l.load(wire, 1, "udp-send", "--to", "10.66.0.2:9000", "--rate", "20000")
	l.measure(while, func(d delta) {
		if d.readingLost == 0 {
			d.t.Error("nothing was counted as lost")
		}
		d.readingLost, d.thefts = 0, nil
		d.only(box, 0.95)
		mostly(d.t, "what it took", d.of(box).Took, d.of(box).CPU()-d.of(box).Own, 0.9)
		mostly(d.t, "what the victim lost", d.of(victim).Robbed, d.of(box).Took, 0.25)
	})
}
