package decide

import (
	"fmt"
	"math"
	"testing"
	"time"

	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/policy"
)

func reads(n uint64) api.BlockIOFigures { return api.BlockIOFigures{ReadIOPS: n} }

func TestParts(t *testing.T) {
	type by = map[container.ID]float64
	for _, x := range []struct {
		left   float64
		claims by
		want   by
	}{
		{1, nil, by{}},
		{1, by{1: 0.25, 2: 0.5}, by{1: 0.25, 2: 0.5}},
		{0.5, by{1: 0.5, 2: 0.75}, by{1: 0.25, 2: 0.25}},
		{1, by{1: 0.25, 2: 2, 3: 0.5}, by{1: 0.25, 2: 0.375, 3: 0.375}},
		{0, by{1: 1}, by{1: 0}},
		{-1, by{1: 1, 2: 1}, by{1: 0, 2: 0}},
	} {
		testkit.Same(t, fmt.Sprintf("%v among %v", x.left, x.claims), x.want, parts(x.left, x.claims))
	}
}

// A cap never lies below the reservation, in the reservation's unit.
func TestScaled(t *testing.T) {
	did := api.BlockIOFigures{ReadIOPS: 1000, WriteIOPS: 100, ReadBytes: 1 << 30, WriteBytes: 1 << 20}
	for _, x := range []struct {
		reserved api.BlockIOFigures
		by       float64
		want     api.BlockIOFigures
	}{
		{api.BlockIOFigures{}, 0.5, api.BlockIOFigures{ReadIOPS: 500, WriteIOPS: 50}},
		{api.BlockIOFigures{}, 0, api.BlockIOFigures{ReadIOPS: MinCap, WriteIOPS: MinCap}},
		{api.BlockIOFigures{ReadIOPS: 400, WriteIOPS: 200}, 0.5, api.BlockIOFigures{ReadIOPS: 500, WriteIOPS: 200}},
		{api.BlockIOFigures{ReadIOPS: 400, ReadBytes: 1 << 40}, 0, api.BlockIOFigures{ReadIOPS: 400, WriteIOPS: MinCap}},
		{api.BlockIOFigures{ReadBytes: 1 << 20}, 0.5, api.BlockIOFigures{ReadBytes: 1 << 29, WriteIOPS: 50}},
		{api.BlockIOFigures{WriteBytes: 1 << 21}, 0.5, api.BlockIOFigures{ReadIOPS: 500, WriteBytes: 1 << 21}},
	} {
		testkit.Same(t, fmt.Sprintf("%+v by %v", x.reserved, x.by), x.want, scaled(did, x.reserved, x.by))
	}
}

// simulated is a disk on which containers want more than it can do. Without caps, each gets the same
// part of what it wants.
type simulated struct {
	control Control
	at      int
	want    map[container.ID]api.BlockIOFigures
	cost    map[container.ID]float64 // cost of a request on the disk, as a multiple of the model's; 0: 1
	keeps   map[container.ID]bool    // policy does not let it yield
	lossy   float64                  // what a cap costs beyond its own value
	does    map[container.ID]api.BlockIOFigures
	missed  int // reservations in the latest second
}

func (s *simulated) capacity() Capacity {
	return Capacity{BlockIOFigures: api.BlockIOFigures{ReadIOPS: 10_000, WriteIOPS: 10_000}, Headroom: 0.05}
}

// second simulates one second with some reservations, and the caps decided at its beginning.
func (s *simulated) second(t *testing.T, reserved map[container.ID]api.BlockIOFigures) {
	t.Helper()
	actions := s.control.Actions()
	served := func(by float64) (does map[container.ID]api.BlockIOFigures, took float64) {
		does = make(map[container.ID]api.BlockIOFigures)
		for id, f := range s.want {
			part := by
			if c, capped := actions[id].Caps[disk]; capped { // the first bound that it reaches stops it
				for _, x := range [][2]uint64{{f.ReadIOPS, c.ReadIOPS}, {f.WriteIOPS, c.WriteIOPS}} {
					if x[0] > 0 {
						part = min(part, (1-s.lossy)*float64(x[1])/float64(x[0]))
					}
				}
			}
			f = api.BlockIOFigures{ReadIOPS: uint64(part * float64(f.ReadIOPS)), WriteIOPS: uint64(part * float64(f.WriteIOPS))}
			all, _, _ := s.capacity().Share(f)
			cost := s.cost[id]
			if cost == 0 {
				cost = 1
			}
			does[id], took = f, took+all*cost
		}
		return does, took
	}
	low, high := 0.0, 1.0
	for range 50 {
		if _, took := served((low + high) / 2); took <= 1 {
			low = (low + high) / 2
		} else {
			high = (low + high) / 2
		}
	}
	s.does, _ = served(low)
	w := Window{
		Taken: second(s.at), Length: time.Second, Complete: true, Neighbours: make(map[container.ID]Neighbour),
		Capacity: map[Disk]Capacity{disk: s.capacity()},
	}
	s.at++
	missed := make(map[container.ID]bool)
	for id, f := range s.does {
		n := Neighbour{Yield: policy.YieldAuto, IO: map[Disk]api.BlockIOFigures{disk: f}}
		if s.keeps[id] {
			n.Yield = policy.YieldOff
		}
		r, has := reserved[id]
		n.Reserved = has
		w.Neighbours[id] = n
		if !has {
			continue
		}
		d := Demand{Container: id, Disk: disk, Reserved: r, Achieved: f, Under: 3 * time.Second}
		if _, capped := actions[id].Caps[disk]; capped {
			d.Under = 0 // it waits before it makes requests
		}
		w.Demands = append(w.Demands, d)
		if float64(f.ReadIOPS+f.WriteIOPS) < enough*float64(r.ReadIOPS+r.WriteIOPS) {
			missed[id] = true
		}
	}
	s.missed = len(missed)
	s.control.Next(w)
	for id, a := range s.control.Actions() {
		r := reserved[id]
		if c, capped := a.Caps[disk]; capped && (c.ReadIOPS < r.ReadIOPS || c.WriteIOPS < r.WriteIOPS) {
			t.Errorf("second %d: %d is capped at %+v, and has reserved %+v", s.at, id, c, r)
		}
		if len(a.Caps) > 0 && (s.keeps[id] || missed[id]) {
			t.Errorf("second %d: %d is capped, though policy keeps it from that (%v) or it is missed (%v)", s.at, id, s.keeps[id], missed[id])
		}
	}
}

// The three containers of MIST's figure 8: each step of reservations is met after two seconds and then
// stays met, even if the cost model is wrong by a factor of two.
func TestFigure8(t *testing.T) {
	figures := func(reads, writes uint64) api.BlockIOFigures {
		return api.BlockIOFigures{ReadIOPS: reads, WriteIOPS: writes}
	}
	part := func(f api.BlockIOFigures, by float64) api.BlockIOFigures {
		return figures(uint64(by*float64(f.ReadIOPS)), uint64(by*float64(f.WriteIOPS)))
	}
	for what, cost := range map[string]map[container.ID]float64{
		"as modelled": {}, "the first is dear": {1: 1.5, 2: 0.75}, "the last is cheap": {1: 1.2, 3: 0.6}, "the second is dear": {2: 1.5, 3: 0.75},
	} {
		s := simulated{want: map[container.ID]api.BlockIOFigures{1: figures(1000, 9000), 2: figures(7500, 2500), 3: figures(5000, 5000)}, cost: cost}
		s.second(t, nil)
		alone := s.does
		for step, parts := range [][3]float64{{1.3, 0, 0}, {0.4, 1.3, 0}, {0, 0.5, 1.3}, {0.6, 0.6, 0.6}, {0, 0, 0}, {1.3, 0.5, 0}} {
			reserved := make(map[container.ID]api.BlockIOFigures)
			for i, by := range parts {
				if id := container.ID(i + 1); by > 0 {
					reserved[id] = part(alone[id], by)
				}
			}
			for second := range 9 { // then the first step up is tried
				s.second(t, reserved)
				if second >= 2 && s.missed > 0 {
					t.Errorf("%s, step %d: %d reservations are missed after %d s: %+v of %+v, %+v", what, step, s.missed, second, s.does, reserved, s.control.Actions())
				}
			}
			if sum := len(reserved); sum == 0 && len(s.control.Actions()) > 0 {
				t.Errorf("%s: nothing is reserved, and %+v", what, s.control.Actions())
			}
		}
	}
}

// A container that does not yield keeps what it takes. One that has returned below its reservation is
// not capped.
func TestWhoIsCapped(t *testing.T) {
	s := simulated{
		want:  map[container.ID]api.BlockIOFigures{1: reads(5000), 2: reads(5000), 3: reads(5000), 4: reads(500)},
		keeps: map[container.ID]bool{3: true},
	}
	reserved := map[container.ID]api.BlockIOFigures{1: reads(4000), 2: reads(1000), 4: reads(400)}
	for range 5 {
		s.second(t, reserved)
	}
	actions := s.control.Actions()
	if s.missed > 0 || len(actions) != 1 || len(actions[2].Caps) != 1 {
		t.Errorf("%d missed, %+v do %+v", s.missed, actions, s.does)
	}
	// It reserves more, and its cap follows in the same second.
	reserved[2] = reads(1500)
	s.second(t, reserved)
	if got := s.control.Actions()[2].Caps[disk]; got.ReadIOPS < 1500 {
		t.Errorf("capped at %+v, reserved 1500", got)
	}
	// A reservation that has ended gets no share.
	delete(reserved, 1)
	before := s.control.Actions()[2].Caps[disk]
	s.second(t, reserved)
	if got, capped := s.control.Actions()[2].Caps[disk]; capped && got.ReadIOPS <= before.ReadIOPS {
		t.Errorf("capped at %+v after %+v", got, before)
	}
}

// A container that a cap holds below its reservation is no longer capped.
func TestLossyCap(t *testing.T) {
	s := simulated{want: map[container.ID]api.BlockIOFigures{1: reads(6000), 2: reads(9000)}, lossy: 0.4}
	capped := false
	for range 5 {
		s.second(t, map[container.ID]api.BlockIOFigures{1: reads(6000), 2: reads(2500)})
		_, now := s.control.Actions()[2]
		capped = capped || now
	}
	if !capped {
		t.Error("it was never capped")
	}
}

// A container that takes no more than its reservation does not interfere.
func TestWithinReservation(t *testing.T) {
	for took, state := range map[uint64]string{5000: StateShort, 6900: StateShort, 7100: StateContended} {
		w := window(0, func(d *Demand, ns map[container.ID]Neighbour) {
			slow(d)
			d.Under = 900 * ms
		})
		w.Demands = append(w.Demands, Demand{
			Container: other, Disk: disk, Reserved: api.BlockIOFigures{ReadIOPS: 6000}, Achieved: api.BlockIOFigures{ReadIOPS: took},
		})
		var control Control
		control.Next(w)
		if s := control.standing[Place{victim, disk}]; s.State != state {
			t.Errorf("beside %d of 6000: %s (%s), want %s", took, s.State, s.Evidence, state)
		}
	}
}

// A disk that does less than its capacity is divided by what it does. A disk that does more is divided
// by its capacity, which is what was promised.
func TestOtherDisks(t *testing.T) {
	s := simulated{
		want: map[container.ID]api.BlockIOFigures{1: reads(9000), 2: reads(9000)},
		cost: map[container.ID]float64{1: 2, 2: 2},
	}
	for range 4 {
		s.second(t, map[container.ID]api.BlockIOFigures{1: reads(4000)})
	}
	if got := s.does[1].ReadIOPS; got < 3800 || math.Abs(float64(got+s.does[2].ReadIOPS)-5000) > 500 {
		t.Errorf("the slow one: they do %+v", s.does)
	}
	s = simulated{
		want: map[container.ID]api.BlockIOFigures{1: reads(10_000), 2: reads(90_000)},
		cost: map[container.ID]float64{1: 0.5, 2: 0.5},
	}
	s.second(t, map[container.ID]api.BlockIOFigures{1: reads(8000)})
	if got := s.control.Actions()[2].Caps[disk]; got.ReadIOPS != 1200 {
		t.Errorf("the fast one: capped at %+v", got)
	}
}

// The network interferes if nothing else does and a CPU that serves the disk works for it. If policy
// allows, it is kept apart, for longer each time.
func TestNetworkInTheWay(t *testing.T) {
	at := func(second int, works time.Duration, leave policy.Interrupts, change change) Window {
		w := window(second, func(d *Demand, ns map[container.ID]Neighbour) {
			slow(d)
			d.Interrupts = leave
			if change != nil {
				change(d, ns)
			}
		})
		w.Network = map[Disk]time.Duration{disk: works}
		return w
	}
	for _, c := range []struct {
		name  string
		w     Window
		state string
		apart bool
	}{
		{"auto", at(0, 100*ms, policy.InterruptsAuto, nil), StateContended, true},
		{"off", at(0, 200*ms, policy.InterruptsOff, nil), StateContended, false},
		{"a little", at(0, 99*ms, policy.InterruptsAuto, nil), StateShort, false},
		{"met", at(0, 200*ms, policy.InterruptsAuto, asking(1000, 0, nil)), StateMet, false},
		{"a burner", at(0, 200*ms, policy.InterruptsAuto, of(func(d *Demand) { d.Waited[burner] = 600 * ms })), StateContended, false},
	} {
		var control Control
		control.Next(c.w)
		if s := control.standing[Place{victim, disk}]; s.State != c.state || control.Actions()[victim].Apart != c.apart {
			t.Errorf("%s: %+v, %+v", c.name, s, control.Actions())
		}
	}
	var control Control
	control.Next(at(0, 200*ms, policy.InterruptsAuto, nil))
	for _, x := range []struct {
		second int
		apart  bool
	}{{29, true}, {30, false}} {
		control.Next(at(x.second, 0, policy.InterruptsAuto, nil))
		testkit.Same(t, fmt.Sprintf("after %d s: apart", x.second), x.apart, control.Actions()[victim].Apart)
	}
	control.Next(at(40, 200*ms, policy.InterruptsAuto, nil))
	control.Next(at(99, 0, policy.InterruptsAuto, nil))
	if !control.Actions()[victim].Apart {
		t.Error("needed again at once, it is not held for longer")
	}
	control.Next(at(99, 200*ms, policy.InterruptsOff, nil))
	if got := control.Actions(); len(got) != 0 {
		t.Errorf("policy says off: %+v", got)
	}
}
