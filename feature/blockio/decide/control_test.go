package decide

import (
	"maps"
	"strings"
	"testing"
	"time"

	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/policy"
)

const (
	victim  container.ID = 1
	burner  container.ID = 2
	hog     container.ID = 3
	other   container.ID = 4 // has a reservation
	keeper  container.ID = 5 // does not yield
	ms                   = time.Millisecond
	started              = 1_000_000
)

var disk = Disk{Major: 7, Minor: 0}

func second(n int) time.Time { return time.Unix(started+int64(n), 0) }

// window returns a window in which the victim has reserved 1000 reads per second.
func window(at int, change change) Window {
	d := Demand{
		Container: victim, Name: "db", Disk: disk, Reserved: api.BlockIOFigures{ReadIOPS: 1000},
		Achieved: api.BlockIOFigures{ReadIOPS: 1000, ReadBytes: 1000 * SmallRequest}, Waited: map[container.ID]time.Duration{},
	}
	ns := map[container.ID]Neighbour{
		victim: {Name: "db", Reserved: true, Yield: policy.YieldAuto},
		burner: {Name: "burner", Yield: policy.YieldAuto},
		hog:    {Name: "hog", Yield: policy.YieldAuto, IO: map[Disk]api.BlockIOFigures{}},
		other:  {Name: "other", Reserved: true, Yield: policy.YieldAuto, IO: map[Disk]api.BlockIOFigures{}},
		keeper: {Name: "keeper", IO: map[Disk]api.BlockIOFigures{}},
	}
	if change != nil {
		change(&d, ns)
	}
	return Window{
		Taken: second(at), Length: time.Second, Detailed: true, Complete: true, Demands: []Demand{d}, Neighbours: ns,
		Capacity: map[Disk]Capacity{disk: {BlockIOFigures: api.BlockIOFigures{ReadIOPS: 10_000, WriteIOPS: 10_000}}},
	}
}

func slow(d *Demand) {
	d.Achieved, d.Under = api.BlockIOFigures{ReadIOPS: 300, ReadBytes: 300 * SmallRequest}, 600*ms
}

// change is a difference from a window in which the victim's reservation is met.
type change = func(*Demand, map[container.ID]Neighbour)

// by is how long the victim waited, by culprit.
type by = map[container.ID]time.Duration

// robbed makes the victim miss its reservation while it waits for CPUs.
func robbed(waited by) change {
	return func(d *Demand, _ map[container.ID]Neighbour) { slow(d); maps.Copy(d.Waited, waited) }
}

// hogged makes it wait for its disk for so long, while another does that many reads a second at a disk.
func hogged(under time.Duration, who container.ID, at Disk, reads uint64) change {
	return func(d *Demand, ns map[container.ID]Neighbour) {
		slow(d)
		d.Under, ns[who].IO[at] = under, api.BlockIOFigures{ReadIOPS: reads, ReadBytes: reads * SmallRequest}
	}
}

// asking gives it that many reads per second, with requests in flight for some time.
func asking(reads uint64, under time.Duration, waited by) change {
	return func(d *Demand, _ map[container.ID]Neighbour) {
		d.Achieved, d.Under = api.BlockIOFigures{ReadIOPS: reads, ReadBytes: reads * SmallRequest}, under
		maps.Copy(d.Waited, waited)
	}
}

// and makes one change after another.
func and(all ...change) change {
	return func(d *Demand, ns map[container.ID]Neighbour) {
		for _, one := range all {
			one(d, ns)
		}
	}
}

// of changes the victim alone.
func of(alter func(*Demand)) change {
	return func(d *Demand, _ map[container.ID]Neighbour) { alter(d) }
}

// Interference is declared only if a reservation is missed and contention with a container shows.
// Containers that have a reservation, or do not yield, are left alone. The remedy depends on the
// culprit and on the actions so far. None of that needs a known capacity.
func TestStanding(t *testing.T) {
	pressed := of(func(d *Demand) { d.Pressure = 630 * ms })
	const pressure = "63% of the time (cpu.pressure)"
	for _, c := range []struct {
		name    string
		change  change
		state   string
		culprit container.ID
		acts    container.ID // 0: none
		says    string       // part of the evidence, or of the remedy
	}{
		{"met", nil, StateMet, 0, 0, ""},
		{"met beside burners", of(func(d *Demand) { d.Waited[burner] = 900 * ms }), StateMet, 0, 0, ""},
		{"idle", asking(0, 0, nil), StateIdle, 0, 0, ""},
		{"short", robbed(nil), StateShort, 0, 0, "no more than the disk does"},
		{"asks for less", asking(300, 300*ms, nil), StateLess, 0, 0, ""},
		{"asks for little, and waits for it", asking(2, ms, by{burner: 72 * ms}), StateLess, 0, 0, ""},
		{"hardly comes to ask", asking(50, 10*ms, by{burner: 900 * ms}), StateContended, burner, burner, ""},
		{"burner", robbed(by{burner: 600 * ms}), StateContended, burner, burner, `"burner" (2) is held back for it`},
		{"burner, and the kernel's own count", and(robbed(by{burner: 600 * ms}), pressed), StateContended, burner, burner, pressure},
		{"a little waiting", robbed(by{burner: 49 * ms}), StateShort, 0, 0, ""},
		{"its own threads", robbed(by{victim: 900 * ms}), StateShort, 0, 0, "more CPUs"},
		{"its own threads, and a little of others", robbed(by{victim: 900 * ms, burner: 200 * ms}), StateShort, 0, 0, ""},
		{"its own threads, and others", robbed(by{victim: 900 * ms, burner: 300 * ms}), StateContended, burner, burner, ""},
		{"it stopped", and(robbed(by{burner: 600 * ms}), of(func(d *Demand) { d.Ended = 700 * ms })), StateMet, 0, 0, ""},
		{"its last request took long", and(robbed(by{burner: 600 * ms}), of(func(d *Demand) { d.Ended = 100 * ms })), StateContended, burner, burner, ""},
		{"it does nothing beside burners", asking(0, 0, by{burner: 600 * ms}), StateIdle, 0, 0, ""},
		{"its own quota", robbed(by{burner: 300 * ms, Quota: 600 * ms}), StateThrottled, 0, 0, "raise the CPU quota of its cgroup or of one above"},
		{"a quota above", and(robbed(by{Quota: 600 * ms}), of(func(d *Demand) { d.Quota = "/pod" })), StateThrottled, 0, 0, "raise the CPU quota of /pod"},
		{"its own quota, with many threads", robbed(by{burner: 2 * time.Second, Quota: 8 * time.Second}), StateThrottled, 0, 0, ""},
		{"its own real-time budget", robbed(by{burner: 300 * ms, Realtime: 900 * ms}), StateThrottled, 0, 0, "io.realtime"},
		{"both together", robbed(by{burner: 300 * ms, Quota: 200 * ms, Realtime: 200 * ms}), StateThrottled, 0, 0, ""},
		{"its own quota, a little", robbed(by{burner: 600 * ms, Quota: 500 * ms}), StateContended, burner, burner, ""},
		{"the hypervisor", robbed(by{burner: 60 * ms, Stolen: 200 * ms}), StateStolen, 0, 0, "hypervisor"},
		{"the hypervisor, and more by others", and(robbed(by{burner: 300 * ms, Stolen: 200 * ms}), pressed), StateContended, burner, burner, pressure},
		{"the hypervisor, a little", and(robbed(by{burner: 60 * ms, Stolen: 90 * ms}), pressed), StateContended, burner, burner, pressure},
		{"met beside the hypervisor", of(func(d *Demand) { d.Waited[Stolen] = 200 * ms }), StateMet, 0, 0, ""},
		{"too many to tell", robbed(by{Unseen: 600 * ms}), StateShort, 0, 0, ""},
		{"one with a reservation", robbed(by{other: 600 * ms}), StateContended, other, 0, "both have reserved"},
		{"one that does not yield", robbed(by{keeper: 600 * ms}), StateContended, keeper, 0, `let "keeper" (5) yield: io.yield=auto`},
		{"the host", robbed(by{System: 600 * ms}), StateContended, System, 0, "what the host does"},
		{"the host for somebody", robbed(by{System: 300 * ms, burner: 290 * ms, hog: 200 * ms}), StateContended, burner, burner, ""},
		{"the disk", hogged(900*ms, hog, disk, 5000), StateContended, hog, hog, ""},
		{"burners come first where the disk has room", and(hogged(900*ms, hog, disk, 4700), of(func(d *Demand) { d.Waited[burner] = 600 * ms })), StateContended, burner, burner, ""},
		{"the disk, but it waits for nothing", hogged(100*ms, hog, disk, 5000), StateLess, 0, 0, ""},
		{"another disk", hogged(900*ms, hog, Disk{Major: 7, Minor: 1}, 5000), StateShort, 0, 0, ""},
		{"the disk, by one with a reservation of another", hogged(900*ms, other, disk, 5000), StateContended, other, other, ""},
		{"fewer and larger requests", and(robbed(by{burner: 600 * ms}), of(func(d *Demand) { d.Achieved.ReadIOPS = 960 })), StateMet, 0, 0, ""},
	} {
		for what, window := range map[string]func(int, change) Window{"": window, ", unmeasured": unmeasured} {
			var control Control
			control.Next(window(0, c.change))
			s := control.standing[Place{victim, disk}]
			if s.State != c.state || s.Culprit != c.culprit {
				t.Errorf("%s%s: %s by %v (%s), want %s by %v", c.name, what, s.State, s.Culprit, s.Evidence, c.state, c.culprit)
			}
			actions := control.Actions()
			if _, acts := actions[c.acts]; acts != (c.acts != 0) || len(actions) > 0 && c.acts == 0 {
				t.Errorf("%s%s: actions %+v, want one on %v", c.name, what, actions, c.acts)
			}
			for _, e := range control.events { // not even for a moment
				if e.What == "action" && c.acts == 0 {
					t.Errorf("%s%s: %+v", c.name, what, e)
				}
			}
			if s.Missed() && !strings.Contains(s.Evidence, " of 1000 reads a second") || s.Missed() != (s.Mend != "") || !strings.Contains(s.Evidence+"; "+s.Mend, c.says) {
				t.Errorf("%s%s: evidence %q, what would mend it %q, want %q", c.name, what, s.Evidence, s.Mend, c.says)
			}
		}
	}
}

// The wait for CPUs while a reservation is met is the usual one, so a slower disk is no interference. A
// window in which the container begins does not count.
func TestUsual(t *testing.T) {
	reads := func(n uint64, waited time.Duration) change { return asking(n, 600*ms, by{burner: waited}) }
	more := and(reads(1000, 90*ms), of(func(d *Demand) { d.Reserved.ReadIOPS = 2000 }))
	var control Control
	for at, x := range []struct {
		change change
		state  string
	}{
		{reads(1000, 100*ms), StateMet},
		{reads(800, 80*ms), StateShort},
		{reads(800, 125*ms), StateShort}, // 45 ms more than usual
		{reads(800, 135*ms), StateContended},
		{reads(960, 260*ms), StateMet}, // it begins within the window
		{reads(800, 200*ms), StateContended},
		{reads(1000, 50*ms), StateMet},
		{reads(800, 100*ms), StateContended}, // half of that is usual now
		{more, StateContended},               // the usual wait has changed
		{reads(0, 0), StateIdle},
		{reads(500, 500*ms), StateMet}, // it has begun
		{reads(500, 500*ms), StateContended},
	} {
		control.Next(window(at, x.change))
		if s := control.standing[Place{victim, disk}]; s.State != x.state {
			t.Errorf("after %d s: %s (%s), want %s", at, s.State, s.Evidence, x.state)
		}
	}
}

// The smallest action comes first, then more. It ends when it is no longer needed, and lasts longer if
// it is needed again at once.
func TestLadder(t *testing.T) {
	var control Control
	robbed := robbed(by{burner: 600 * ms})
	expect := func(at int, change change, want policy.Yield) {
		t.Helper()
		control.Next(window(at, change))
		if got := control.Actions()[burner].Yield; got != want {
			t.Fatalf("after %d s: yield %q, want %q", at, got, want)
		}
	}
	expect(0, nil, "")
	expect(1, robbed, policy.YieldIdle)
	expect(2, robbed, policy.YieldIdle)
	expect(4, robbed, policy.YieldQuota)
	expect(5, nil, policy.YieldQuota)
	expect(33, nil, policy.YieldQuota)
	expect(34, nil, "") // 30 s after it was last needed
	expect(40, robbed, policy.YieldIdle)
	expect(41, nil, policy.YieldIdle)
	expect(99, nil, policy.YieldIdle)
	expect(100, nil, "") // twice as long
	// Policy withdraws its permission.
	expect(300, robbed, policy.YieldIdle)
	expect(301, func(d *Demand, ns map[container.ID]Neighbour) {
		robbed(d, ns)
		ns[burner] = Neighbour{Name: "burner", Yield: policy.YieldOff}
	}, "")
	// The container ends.
	expect(302, robbed, policy.YieldIdle)
	expect(303, func(_ *Demand, ns map[container.ID]Neighbour) { delete(ns, burner) }, "")
	// The culprit gets a reservation.
	expect(304, robbed, policy.YieldIdle)
	expect(305, func(d *Demand, ns map[container.ID]Neighbour) {
		robbed(d, ns)
		ns[burner] = Neighbour{Name: "burner", Yield: policy.YieldAuto, Reserved: true}
	}, "")
	var what []string
	for _, e := range control.events {
		what = append(what, e.What)
	}
	testkit.Same(t, "events", "interference action action over release interference", strings.Join(what[:6], " "))
}

// An earlier agent's action, however old, lasts as if it had just been needed, even before all
// containers are known.
func TestAdopted(t *testing.T) {
	var control Control
	control.Adopt(burner, policy.YieldIdle, "an earlier agent decided so", second(0).Add(-time.Hour), second(0))
	w := window(1, func(_ *Demand, ns map[container.ID]Neighbour) { delete(ns, burner) })
	w.Complete = false
	control.Next(w)
	testkit.Same(t, "before its runtime has told of it: yield", policy.YieldIdle, control.Actions()[burner].Yield)
	control.Next(window(2, nil))
	testkit.Same(t, "once it is known: yield", policy.YieldIdle, control.Actions()[burner].Yield)
	w.Taken, w.Complete = second(3), true
	control.Next(w)
	if got := control.Actions(); len(got) != 0 {
		t.Errorf("after its end: %+v", got)
	}
}

// crowded is a window in which the hog does that many reads per second, and the victim waits for the
// disk.
func crowded(rate uint64) change { return hogged(900*ms, hog, disk, rate) }

// A cap is at first what the capacity leaves. It is halved until the reservation is met, and then rises
// in steps. A step that goes too far is undone, and the next one comes later.
func TestCaps(t *testing.T) {
	var control Control
	for _, x := range []struct {
		from, to int
		change   change
		want     uint64 // reads per second at the end; 0: no cap
	}{
		{0, 0, crowded(8000), 7200}, // 0.83 of the disk less 1.1 times 0.1
		{1, 1, crowded(7200), 3600},
		{2, 2, crowded(3600), 1800},
		{3, 9, nil, 1800},
		{10, 17, nil, 2800}, // 7.5 s after it was last needed
		{18, 19, nil, 3800},
		{20, 20, crowded(3800), 2800}, // undone
		{21, 34, nil, 2800},           // 15 s
		{35, 49, nil, 3800},
		{50, 64, nil, 4800},
	} {
		for at := x.from; at <= x.to; at++ {
			control.Next(window(at, x.change))
		}
		if got := control.Actions()[hog].Caps[disk]; got.ReadIOPS != x.want {
			t.Fatalf("after %d s: capped at %+v, want %d reads", x.to, got, x.want)
		}
	}
	for at := 65; at < 125; at++ { // four steps more
		control.Next(window(at, nil))
	}
	if got := control.Actions(); len(got) != 0 {
		t.Errorf("long after: %+v", got)
	}
	if e := control.events[len(control.events)-1]; e.What != "release" || e.Culprit != api.ID(hog) {
		t.Errorf("the last event is %+v", e)
	}

	// When policy withdraws its permission, or nothing is reserved any more, all caps end at once.
	for what, change := range map[string]func(*Window){
		"leave": func(w *Window) {
			w.Neighbours[hog] = Neighbour{Name: "hog", IO: w.Neighbours[hog].IO}
		},
		"reservation": func(w *Window) { w.Demands = nil },
		"container":   func(w *Window) { delete(w.Neighbours, hog) },
	} {
		control = Control{}
		control.Next(window(0, crowded(8000)))
		w := window(1, crowded(8000))
		change(&w)
		control.Next(w)
		if got := control.Actions(); len(got) != 0 {
			t.Errorf("without the %s: %+v", what, got)
		}
		control.Next(window(2, crowded(8000)))
		if got := control.Actions()[hog].Caps[disk]; got.ReadIOPS == 0 {
			t.Errorf("after the %s was missing: not capped", what)
		}
	}
}

// On a disk, the weight comes first if the disk divides by weight, then caps. If CPUs cannot help a
// container, the disk can.
func TestOrderAtDisk(t *testing.T) {
	var control Control
	for at := range 6 {
		w := window(at, crowded(8000))
		w.Divides = map[Disk]string{disk: "BFQ"}
		control.Next(w)
		a := control.Actions()[hog]
		if _, capped := a.Caps[disk]; a.Weight != LastWeight || capped != (at >= 3) {
			t.Errorf("after %d s: %+v", at, a)
		}
	}
	control = Control{}
	for at := range 10 {
		control.Next(window(at, and(crowded(8000), of(func(d *Demand) { d.Waited[burner] = 600 * ms }))))
		actions := control.Actions()
		if _, capped := actions[hog].Caps[disk]; capped != (at >= 6) || actions[burner].Yield == "" {
			t.Errorf("after %d s: %+v", at, actions)
		}
	}
	// If the disk's capacity has no room for both, CPUs come second.
	control = Control{}
	for at := range 2 {
		control.Next(window(at, and(crowded(9000), of(func(d *Demand) { d.Waited[burner] = 600 * ms }))))
		actions := control.Actions()
		if _, capped := actions[hog].Caps[disk]; !capped || (actions[burner].Yield != "") != (at == 1) {
			t.Errorf("a full disk, after %d s: %+v", at, actions)
		}
	}
	// The host cannot yield CPUs, so the disk comes first.
	control = Control{}
	control.Next(window(0, and(crowded(8000), of(func(d *Demand) { d.Waited[System] = 600 * ms }))))
	if _, capped := control.Actions()[hog].Caps[disk]; !capped {
		t.Errorf("beside a busy host: %+v", control.Actions())
	}
}

func TestWindowWithoutLength(t *testing.T) {
	var control Control
	w := window(0, robbed(by{burner: 600 * ms}))
	w.Length = 0
	control.Next(w)
	if len(control.standing) != 0 || len(control.Actions()) != 0 {
		t.Errorf("%+v, %+v", control.standing, control.Actions())
	}
}

// A budget per second can be used up for so long that no wait for it ends within a window.
func TestHeldForLong(t *testing.T) {
	var control Control
	for at, held := range []time.Duration{900 * ms, 0, 1800 * ms, 0, 0, 0} {
		control.Next(window(at, robbed(by{Realtime: held, burner: 60 * ms})))
		s, want := control.standing[Place{victim, disk}], StateThrottled
		if at > 3 {
			want = StateContended
		}
		if s.State != want || !strings.Contains(s.Evidence, "real-time budget") && at <= 3 {
			t.Errorf("after %d s: %s (%s), want %s", at, s.State, s.Evidence, want)
		}
	}
}
