package decide

import (
	"math"
	"strings"
	"testing"
	"time"

	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/container"
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

// window is one in which the victim has reserved 1000 reads.
func window(at int, change func(*Demand, map[container.ID]Neighbour)) Window {
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

// Interference is declared only when a reservation is missed and contention with a container
// is seen; and nothing is done to who has a reservation, or does not yield.
func TestStanding(t *testing.T) {
	for _, c := range []struct {
		name    string
		change  func(*Demand, map[container.ID]Neighbour)
		state   string
		culprit container.ID
		acts    container.ID // 0: none
	}{
		{"met", nil, StateMet, 0, 0},
		{"met beside burners", func(d *Demand, _ map[container.ID]Neighbour) { d.Waited[burner] = 900 * ms }, StateMet, 0, 0},
		{"idle", func(d *Demand, _ map[container.ID]Neighbour) { d.Achieved = api.BlockIOFigures{} }, StateIdle, 0, 0},
		{"short", func(d *Demand, _ map[container.ID]Neighbour) { slow(d) }, StateShort, 0, 0},
		{"asks for less", func(d *Demand, _ map[container.ID]Neighbour) { slow(d); d.Under = 300 * ms }, StateLess, 0, 0},
		{"asks for little, and waits for it", func(d *Demand, _ map[container.ID]Neighbour) {
			d.Achieved = api.BlockIOFigures{ReadIOPS: 2, ReadBytes: 2 * SmallRequest}
			d.Waited[burner], d.Under = 72*ms, ms
		}, StateLess, 0, 0},
		{"hardly comes to ask", func(d *Demand, _ map[container.ID]Neighbour) {
			d.Achieved = api.BlockIOFigures{ReadIOPS: 50, ReadBytes: 50 * SmallRequest}
			d.Waited[burner], d.Under = 900*ms, 10*ms
		}, StateContended, burner, burner},
		{"burner", func(d *Demand, _ map[container.ID]Neighbour) { slow(d); d.Waited[burner] = 600 * ms }, StateContended, burner, burner},
		{"a little waiting", func(d *Demand, _ map[container.ID]Neighbour) { slow(d); d.Waited[burner] = 49 * ms }, StateShort, 0, 0},
		{"its own threads", func(d *Demand, _ map[container.ID]Neighbour) { slow(d); d.Waited[victim] = 900 * ms }, StateShort, 0, 0},
		{"its own threads, and a little of others", func(d *Demand, _ map[container.ID]Neighbour) {
			slow(d)
			d.Waited[victim], d.Waited[burner] = 900*ms, 200*ms
		}, StateShort, 0, 0},
		{"its own threads, and others", func(d *Demand, _ map[container.ID]Neighbour) {
			slow(d)
			d.Waited[victim], d.Waited[burner] = 900*ms, 300*ms
		}, StateContended, burner, burner},
		{"it stopped", func(d *Demand, _ map[container.ID]Neighbour) {
			slow(d)
			d.Ended = 700 * ms
			d.Waited[burner] = 600 * ms
		}, StateMet, 0, 0},
		{"its last request took long", func(d *Demand, _ map[container.ID]Neighbour) {
			slow(d)
			d.Ended = 100 * ms
			d.Waited[burner] = 600 * ms
		}, StateContended, burner, burner},
		{"it does nothing beside burners", func(d *Demand, _ map[container.ID]Neighbour) {
			d.Achieved = api.BlockIOFigures{}
			d.Waited[burner] = 600 * ms
		}, StateIdle, 0, 0},
		{"its own quota", func(d *Demand, _ map[container.ID]Neighbour) {
			slow(d)
			d.Waited[burner] = 300 * ms
			d.Waited[Quota] = 600 * ms
		}, StateThrottled, 0, 0},
		{"its own quota, with many threads", func(d *Demand, _ map[container.ID]Neighbour) {
			slow(d)
			d.Waited[burner], d.Waited[Quota] = 2*time.Second, 8*time.Second
		}, StateThrottled, 0, 0},
		{"its own real-time budget", func(d *Demand, _ map[container.ID]Neighbour) {
			slow(d)
			d.Waited[burner], d.Waited[Realtime] = 300*ms, 900*ms
		}, StateThrottled, 0, 0},
		{"both together", func(d *Demand, _ map[container.ID]Neighbour) {
			slow(d)
			d.Waited[burner], d.Waited[Quota], d.Waited[Realtime] = 300*ms, 200*ms, 200*ms
		}, StateThrottled, 0, 0},
		{"its own quota, a little", func(d *Demand, _ map[container.ID]Neighbour) {
			slow(d)
			d.Waited[burner], d.Waited[Quota] = 600*ms, 500*ms
		}, StateContended, burner, burner},
		{"too many to tell", func(d *Demand, _ map[container.ID]Neighbour) { slow(d); d.Waited[Unseen] = 600 * ms }, StateShort, 0, 0},
		{"one with a reservation", func(d *Demand, _ map[container.ID]Neighbour) { slow(d); d.Waited[other] = 600 * ms }, StateContended, other, 0},
		{"one that does not yield", func(d *Demand, _ map[container.ID]Neighbour) { slow(d); d.Waited[keeper] = 600 * ms }, StateContended, keeper, 0},
		{"the host", func(d *Demand, _ map[container.ID]Neighbour) { slow(d); d.Waited[System] = 600 * ms }, StateContended, System, 0},
		{"the host for somebody", func(d *Demand, _ map[container.ID]Neighbour) {
			slow(d)
			d.Waited[System], d.Waited[burner] = 300*ms, 290*ms
			d.Waited[hog] = 200 * ms
		}, StateContended, burner, burner},
		{"the disk", func(d *Demand, ns map[container.ID]Neighbour) {
			slow(d)
			d.Under = 900 * ms
			ns[hog].IO[disk] = api.BlockIOFigures{ReadIOPS: 5000, ReadBytes: 5000 * SmallRequest}
		}, StateContended, hog, hog},
		{"the disk, but it waits for nothing", func(d *Demand, ns map[container.ID]Neighbour) {
			slow(d)
			d.Under = 100 * ms
			ns[hog].IO[disk] = api.BlockIOFigures{ReadIOPS: 5000}
		}, StateLess, 0, 0},
		{"another disk", func(d *Demand, ns map[container.ID]Neighbour) {
			slow(d)
			d.Under = 900 * ms
			ns[hog].IO[Disk{Major: 7, Minor: 1}] = api.BlockIOFigures{ReadIOPS: 5000}
		}, StateShort, 0, 0},
		{"the disk, by one with a reservation of another", func(d *Demand, ns map[container.ID]Neighbour) {
			slow(d)
			d.Under = 900 * ms
			ns[other].IO[disk] = api.BlockIOFigures{ReadIOPS: 5000}
		}, StateContended, other, other},
		{"fewer and larger requests", func(d *Demand, _ map[container.ID]Neighbour) {
			slow(d)
			d.Waited[burner] = 600 * ms
			d.Achieved.ReadIOPS = 960
		}, StateMet, 0, 0},
	} {
		var control Control
		control.Next(window(0, c.change))
		s := control.standing[Place{victim, disk}]
		if s.State != c.state || s.Culprit != c.culprit {
			t.Errorf("%s: %s by %v (%s), want %s by %v", c.name, s.State, s.Culprit, s.Evidence, c.state, c.culprit)
		}
		actions := control.Actions()
		if _, acts := actions[c.acts]; acts != (c.acts != 0) || len(actions) > 0 && c.acts == 0 {
			t.Errorf("%s: actions %+v, want one on %v", c.name, actions, c.acts)
		}
		for _, e := range control.events { // also not for a moment
			if e.What == "action" && c.acts == 0 {
				t.Errorf("%s: %+v", c.name, e)
			}
		}
		if s.Missed() && !strings.Contains(s.Evidence, " of 1000 reads a second") || s.Missed() != (s.Mend != "") {
			t.Errorf("%s: evidence %q, what would mend it %q", c.name, s.Evidence, s.Mend)
		}
	}
}

// What a container waits for CPUs while it is met, it usually waits: a disk that has become
// slower is no interference. A window in which it has begun says nothing.
func TestUsual(t *testing.T) {
	reads := func(n uint64, waited time.Duration) func(*Demand, map[container.ID]Neighbour) {
		return func(d *Demand, _ map[container.ID]Neighbour) {
			d.Achieved = api.BlockIOFigures{ReadIOPS: n, ReadBytes: n * SmallRequest}
			d.Waited[burner], d.Under = waited, 600*ms
		}
	}
	more := func(d *Demand, ns map[container.ID]Neighbour) {
		reads(1000, 90*ms)(d, ns)
		d.Reserved.ReadIOPS = 2000
	}
	var control Control
	for at, x := range []struct {
		change func(*Demand, map[container.ID]Neighbour)
		state  string
	}{
		{reads(1000, 100*ms), StateMet},
		{reads(800, 80*ms), StateShort},
		{reads(800, 125*ms), StateShort}, // 45 ms more than usually
		{reads(800, 135*ms), StateContended},
		{reads(960, 260*ms), StateMet}, // it begins within the window
		{reads(800, 200*ms), StateContended},
		{reads(1000, 50*ms), StateMet},
		{reads(800, 100*ms), StateContended}, // usually it is half of that now
		{more, StateContended},               // what was usual is so no more
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

// What the hypervisor takes of a container's time is no neighbour's fault, unless neighbours take
// more; what is met is met all the same. The kernel's own count of waiting is shown with the
// evidence.
func TestStolen(t *testing.T) {
	for _, c := range []struct {
		stolen, waited time.Duration
		change         func(*Demand)
		state          string
	}{
		{200 * ms, 60 * ms, func(*Demand) {}, StateStolen},
		{200 * ms, 300 * ms, func(*Demand) {}, StateContended},
		{90 * ms, 60 * ms, func(*Demand) {}, StateContended},
		{200 * ms, 60 * ms, func(d *Demand) { d.Achieved = d.Reserved }, StateMet},
	} {
		w := window(0, func(d *Demand, _ map[container.ID]Neighbour) {
			slow(d)
			d.Waited[burner], d.Waited[Stolen], d.Pressure = c.waited, c.stolen, 630*ms
			c.change(d)
		})
		var control Control
		control.Next(w)
		s := control.standing[Place{victim, disk}]
		if s.State != c.state || s.State == StateContended && !strings.Contains(s.Evidence, "63% of the time (cpu.pressure)") {
			t.Errorf("stolen %v, waited %v: %s (%s), want %s", c.stolen, c.waited, s.State, s.Evidence, c.state)
		}
		if acts := len(control.Actions()) > 0; acts != (c.state == StateContended) {
			t.Errorf("stolen %v, waited %v: actions %+v", c.stolen, c.waited, control.Actions())
		}
	}
}

// The least that helps is done, then more; it ends when it is not needed any more, and
// lasts longer when it is needed again at once.
func TestLadder(t *testing.T) {
	var control Control
	robbed := func(d *Demand, _ map[container.ID]Neighbour) { slow(d); d.Waited[burner] = 600 * ms }
	expect := func(at int, change func(*Demand, map[container.ID]Neighbour), want policy.Yield) {
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
	// Policy takes back its leave.
	expect(300, robbed, policy.YieldIdle)
	expect(301, func(d *Demand, ns map[container.ID]Neighbour) {
		robbed(d, ns)
		ns[burner] = Neighbour{Name: "burner", Yield: policy.YieldOff}
	}, "")
	// It ends.
	expect(302, robbed, policy.YieldIdle)
	expect(303, func(_ *Demand, ns map[container.ID]Neighbour) { delete(ns, burner) }, "")
	// It reserves something itself.
	expect(304, robbed, policy.YieldIdle)
	expect(305, func(d *Demand, ns map[container.ID]Neighbour) {
		robbed(d, ns)
		ns[burner] = Neighbour{Name: "burner", Yield: policy.YieldAuto, Reserved: true}
	}, "")
	var what []string
	for _, e := range control.events {
		what = append(what, e.What)
	}
	if got := strings.Join(what[:6], " "); got != "interference action action over release interference" {
		t.Errorf("events %s", got)
	}
}

// What an earlier agent did, however long ago, goes on for as long as if it had been needed
// last, and also while not all containers are known.
func TestAdopted(t *testing.T) {
	var control Control
	control.Adopt(burner, policy.YieldIdle, "an earlier agent decided so", second(0).Add(-time.Hour), second(0))
	w := window(1, func(_ *Demand, ns map[container.ID]Neighbour) { delete(ns, burner) })
	w.Complete = false
	control.Next(w)
	if got := control.Actions()[burner].Yield; got != policy.YieldIdle {
		t.Errorf("before its runtime has told of it: yield %q", got)
	}
	control.Next(window(2, nil))
	if got := control.Actions()[burner].Yield; got != policy.YieldIdle {
		t.Errorf("once it is known: yield %q", got)
	}
	w.Taken, w.Complete = second(3), true
	control.Next(w)
	if got := control.Actions(); len(got) != 0 {
		t.Errorf("after its end: %+v", got)
	}
}

// crowded is a window in which the hog does so many reads a second, and the victim waits
// for the disk.
func crowded(rate uint64) func(*Demand, map[container.ID]Neighbour) {
	return func(d *Demand, ns map[container.ID]Neighbour) {
		slow(d)
		d.Under = 900 * ms
		ns[hog].IO[disk] = api.BlockIOFigures{ReadIOPS: rate, ReadBytes: rate * SmallRequest}
	}
}

// A cap is what the capacity leaves, then half of that until the reservation is met, and is
// raised in steps while it is. A step too far is taken back, and the next one comes later.
func TestCaps(t *testing.T) {
	var control Control
	for _, x := range []struct {
		from, to int
		change   func(*Demand, map[container.ID]Neighbour)
		want     uint64 // reads per second at the end; 0: no cap
	}{
		{0, 0, crowded(8000), 7200}, // 0.83 of the disk less 1.1 times 0.1
		{1, 1, crowded(7200), 3600},
		{2, 2, crowded(3600), 1800},
		{3, 9, nil, 1800},
		{10, 17, nil, 2800}, // 7.5 s after it was last needed
		{18, 19, nil, 3800},
		{20, 20, crowded(3800), 2800}, // taken back
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

	// Policy takes back its leave, or nothing is reserved any more: all caps end at once.
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

// The order of least harm at a disk: the weight where the disk divides by it, then caps. And
// who is not to be helped by CPUs is helped at the disk.
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
		control.Next(window(at, func(d *Demand, ns map[container.ID]Neighbour) {
			crowded(8000)(d, ns)
			d.Waited[burner] = 600 * ms
		}))
		actions := control.Actions()
		if _, capped := actions[hog].Caps[disk]; capped != (at >= 6) || actions[burner].Yield == "" {
			t.Errorf("after %d s: %+v", at, actions)
		}
	}
	// Where there is no room for both by the disk's capacity, CPUs come second.
	control = Control{}
	for at := range 2 {
		control.Next(window(at, func(d *Demand, ns map[container.ID]Neighbour) {
			crowded(9000)(d, ns)
			d.Waited[burner] = 600 * ms
		}))
		actions := control.Actions()
		if _, capped := actions[hog].Caps[disk]; !capped || (actions[burner].Yield != "") != (at == 1) {
			t.Errorf("a full disk, after %d s: %+v", at, actions)
		}
	}
	// Nor by those on whom nothing may be done.
	control = Control{}
	control.Next(window(0, func(d *Demand, ns map[container.ID]Neighbour) {
		crowded(8000)(d, ns)
		d.Waited[System] = 600 * ms
	}))
	if _, capped := control.Actions()[hog].Caps[disk]; !capped {
		t.Errorf("beside a busy host: %+v", control.Actions())
	}
}

func TestWindowWithoutLength(t *testing.T) {
	var control Control
	w := window(0, func(d *Demand, _ map[container.ID]Neighbour) { slow(d); d.Waited[burner] = 600 * ms })
	w.Length = 0
	control.Next(w)
	if len(control.standing) != 0 || len(control.Actions()) != 0 {
		t.Errorf("%+v, %+v", control.standing, control.Actions())
	}
}

func TestShare(t *testing.T) {
	c := Capacity{BlockIOFigures: api.BlockIOFigures{ReadIOPS: 10_000, WriteIOPS: 5_000, ReadBytes: 400 << 20}}
	for _, x := range []struct {
		f    api.BlockIOFigures
		want float64
	}{
		{api.BlockIOFigures{}, 0},
		{api.BlockIOFigures{ReadIOPS: 1000}, 0.1},
		{api.BlockIOFigures{WriteIOPS: 1000}, 0.2},
		{api.BlockIOFigures{ReadIOPS: 1000, WriteIOPS: 1000}, 0.3},
		{api.BlockIOFigures{WriteIOPS: 1000, WriteBytes: 1 << 30}, 0.2}, // in bytes it is not known
		// 100 MiB/s in 800 requests of 128 KiB: a quarter for the bytes, and 800 bases of 1/10000
		// less 4 KiB's part.
		{api.BlockIOFigures{ReadBytes: 100 << 20}, 0.25 + 800*(1e-4-1.0/102400)},
		{api.BlockIOFigures{ReadBytes: 100 << 20, ReadIOPS: 800}, 0.25 + 800*(1e-4-1.0/102400)},
	} {
		if got, _, _ := c.Share(x.f); math.Abs(got-x.want) > 1e-12 {
			t.Errorf("%+v: share %v, want %v", x.f, got, x.want)
		}
	}
}

func TestAdmit(t *testing.T) {
	c := Capacity{BlockIOFigures: api.BlockIOFigures{ReadIOPS: 1000, WriteIOPS: 500}, Headroom: 0.1}
	holders := []Holder{{1, "a", api.BlockIOFigures{ReadIOPS: 100}}, {2, "b", api.BlockIOFigures{ReadIOPS: 300}}}
	for _, x := range []struct {
		c      Capacity
		others []Holder
		want   api.BlockIOFigures
		says   string // "": admitted
	}{
		{c, nil, api.BlockIOFigures{ReadIOPS: 900}, ""},
		{c, nil, api.BlockIOFigures{ReadIOPS: 901}, "/dev/x has 90.0% of its capacity left (900 read or 450 write operations per second), and 90.1% are asked for"},
		{c, holders, api.BlockIOFigures{ReadIOPS: 500}, ""},
		{c, holders, api.BlockIOFigures{ReadIOPS: 400, WriteIOPS: 50}, ""},
		{c, holders, api.BlockIOFigures{ReadIOPS: 400, WriteIOPS: 51}, `has 50.0% of its capacity left (500 read or 250 write operations per second), and 50.2% are asked for; "b" (2) holds 30.0%; "a" (1) holds 10.0%`},
		{Capacity{}, holders, api.BlockIOFigures{ReadIOPS: 1 << 20, WriteBytes: 1}, ""}, // nobody knows
		{c, nil, api.BlockIOFigures{ReadBytes: 4096}, "in bytes per second is not known"},
	} {
		err := Admit("/dev/x", x.c, x.others, x.want)
		if (err == nil) != (x.says == "") || err != nil && !strings.Contains(err.Error(), x.says) {
			t.Errorf("%+v beside %d: %v, want %q", x.want, len(x.others), err, x.says)
		}
	}
}
