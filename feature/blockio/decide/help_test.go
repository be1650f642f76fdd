package decide

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/policy"
)

// auto allows all help on a host that supports everything.
var auto = May{Help: policy.HelpAuto, Turns: true, Budget: MaxRealtime}

// beside is a window in which neighbours without policy take the container's CPUs; its reservation may
// be met all the same.
func beside(at int, may May, missed bool, used time.Duration) Window {
	w := window(at, func(d *Demand, _ map[container.ID]Neighbour) {
		if d.Waited[keeper], d.Used, d.May = 600*ms, used, may; missed {
			slow(d)
		}
	})
	w.CPUs = 2
	return w
}

// A container that misses its reservation for want of CPU gets help for its own tasks, a further step
// in each window in which the last one did not suffice: weight, then real time if its CPU use fits,
// otherwise turns. A container without policy is not touched.
func TestHelp(t *testing.T) {
	without := func(m May, change func(*May)) May { change(&m); return m }
	for _, c := range []struct {
		name  string
		may   May
		alone time.Duration // CPU use without disturbance
		steps []policy.Help // in windows in which it misses its reservation
		mend  string        // after those
	}{
		{"what it uses fits", auto, 400 * ms, []policy.Help{policy.HelpWeight, policy.HelpRealtime, policy.HelpTurns, policy.HelpTurns}, "all that may be done for it is not enough: it uses 400ms"},
		{"it does not", auto, 1500 * ms, []policy.Help{policy.HelpWeight, policy.HelpTurns, policy.HelpTurns}, "not enough: it uses 1.5s of CPU time a second on 2 CPUs and may be real-time for 500ms"},
		{"without turns", without(auto, func(m *May) { m.Turns = false }), 1500 * ms, []policy.Help{policy.HelpWeight, policy.HelpWeight}, "not enough"},
		{"without real time", without(auto, func(m *May) { m.Budget, m.None = 0, "io.realtime says" }), 400 * ms, []policy.Help{policy.HelpWeight, policy.HelpWeight}, "not enough: io.realtime says"},
		{"without a weight", without(auto, func(m *May) { m.Weight = "no controller" }), 400 * ms, []policy.Help{policy.HelpRealtime, policy.HelpTurns}, ""},
		{"with neither", May{Help: policy.HelpAuto, Weight: "no controller", None: "no real time"}, 400 * ms, []policy.Help{"", ""}, "nothing may be done for it: no real time"},
		{"policy forbids it", May{Help: policy.HelpOff}, 400 * ms, []policy.Help{"", ""}, "nothing may be done for it: policy does not let it (io.help=off)"},
		{"policy sets it", May{Help: policy.HelpWeight}, 400 * ms, []policy.Help{"", ""}, "io.help=auto lets more be done"},
	} {
		var control Control
		control.Next(beside(0, c.may, false, c.alone))
		for i, want := range c.steps {
			control.Next(beside(i+1, c.may, true, 200*ms))
			got := control.Actions()
			if got[victim].Help != want || len(got) > 1 || want == "" && len(got) > 0 {
				t.Errorf("%s, window %d: %+v, want %q", c.name, i, got, want)
			}
			if b := got[victim].Budget; want == policy.HelpRealtime && b != 500*ms || want == policy.HelpTurns && b != MaxRealtime || want == policy.HelpWeight && b != 0 && i == 0 {
				t.Errorf("%s, window %d: budget %s", c.name, i, b)
			}
		}
		if s := control.standing[Place{victim, disk}]; s.State != StateContended || !strings.Contains(s.Mend, c.mend) {
			t.Errorf("%s: %s, %q, want %q", c.name, s.State, s.Mend, c.mend)
		}
	}
}

// The CPU time of a reservation is projected from what its container used and got.
func TestTakes(t *testing.T) {
	reads := func(n uint64) api.BlockIOFigures { return api.BlockIOFigures{ReadIOPS: n} }
	c := Capacity{BlockIOFigures: reads(1000)}
	for _, x := range []struct {
		achieved uint64
		want     time.Duration
	}{{300, 1000 * ms}, {100, 2000 * ms}, {2000, 300 * ms}, {0, 300 * ms}} {
		testkit.Same(t, fmt.Sprint("with ", x.achieved), x.want, Takes(c, 300*ms, reads(x.achieved), reads(1000), 2))
	}
}

// Help ends ten seconds after other containers last used its CPUs, or when policy says so. If it is
// needed again soon, it lasts twice as long.
func TestHelpEnds(t *testing.T) {
	var control Control
	at := 0
	helped := func(missed, busy bool) bool {
		w := beside(at, auto, missed, 400*ms)
		if at++; !busy {
			clear(w.Demands[0].Waited)
		}
		control.Next(w)
		return control.Actions()[victim].Help != ""
	}
	helped(false, false)
	lasts := func() (n int) {
		t.Helper()
		if !helped(true, true) {
			t.Fatal("it is not helped")
		}
		for range 40 {
			if !helped(false, true) {
				t.Fatal("it ends while others want its CPUs")
			}
		}
		for helped(false, false) {
			n++
		}
		return n
	}
	for _, want := range []int{9, 19, 39} {
		testkit.Same(t, "it lasts for", want, lasts())
	}
	for range 20 {
		helped(false, false)
	}
	testkit.Same(t, "after a while it lasts for", 9, lasts())
	helped(true, true)
	w := beside(at, May{Help: policy.HelpOff}, true, 400*ms)
	if control.Next(w); len(control.Actions()) != 0 {
		t.Errorf("after policy has forbidden it: %+v", control.Actions())
	}
}

// The host's own threads are no reason for help and do not prolong it, because they may do the
// container's I/O.
func TestHelpForHost(t *testing.T) {
	var control Control
	host := func(at int) Action {
		w := beside(at, auto, true, 200*ms)
		w.Demands[0].Waited = map[container.ID]time.Duration{System: 600 * ms}
		control.Next(w)
		return control.Actions()[victim]
	}
	control.Next(beside(0, auto, false, 400*ms))
	testkit.Same(t, "against the host", policy.Help(""), host(1).Help)
	control.Next(beside(2, auto, true, 200*ms))
	for at := range 9 {
		if a := host(3 + at); a.Help != policy.HelpWeight {
			t.Fatalf("second %d: %+v", 3+at, a)
		}
	}
	testkit.Same(t, "it goes on for the host", policy.Help(""), host(12).Help)
}

// While yielding containers cause most of the waiting, they come first. Help follows if that does not
// suffice.
func TestHelpAfterYield(t *testing.T) {
	var control Control
	next := func(at int) map[container.ID]Action {
		control.Next(window(at, func(d *Demand, _ map[container.ID]Neighbour) {
			slow(d)
			d.Waited[burner], d.Waited[keeper], d.May = 500*ms, 100*ms, auto
		}))
		return control.Actions()
	}
	control.Next(window(0, nil))
	if got := next(1); got[burner].Yield != policy.YieldIdle || got[victim].Help != "" {
		t.Errorf("at first %+v", got)
	}
	for at := range 8 {
		next(2 + at)
	}
	if got := next(10); got[burner].Yield != policy.YieldQuota || got[victim].Help == "" {
		t.Errorf("once all yield %+v", got)
	}
}
