package auto

import (
	"strings"
	"testing"
	"time"

	"github.com/fairlead-project/fairlead/feature/netcpu/law"
)

// robs returns a window of a second in which packets cost network of a CPU, and took from of it
// from a neighbour.
func robs(from, network float64) evidence {
	cpu := func(share float64) time.Duration { return time.Duration(share * float64(time.Second)) }
	return evidence{length: time.Second, victims: []victim{{"db", cpu(from)}}, idle: cpu(network - from), network: cpu(network)}
}

func TestAuto(t *testing.T) {
	type windows struct {
		n    int
		e    evidence
		want bool // after each of them
	}
	for _, tt := range []struct {
		name  string
		steps []windows
	}{
		{"quiet", []windows{{100, robs(0, 0), false}}},
		{"much network on idle CPUs robs nobody", []windows{{100, robs(0, 0.9), false}}},
		{"a little theft", []windows{{100, robs(0.03, 0.5), false}}},
		{"a theft", []windows{{1, robs(0.031, 0.031), true}}},
		{"back after ten seconds", []windows{{1, robs(0.2, 0.2), true}, {9, robs(0, 0.01), true}, {1, robs(0, 0.01), false}, {20, robs(0, 0.01), false}}},
		{"not while it would go on", []windows{{1, robs(0.2, 0.2), true}, {300, robs(0, 0.2), true}}},
		{"nor between two bursts", []windows{
			{1, robs(0.2, 0.2), true}, {9, robs(0, 0), true}, {1, robs(0, 0.1), true}, {9, robs(0, 0), true}, {1, robs(0, 0), false},
		}},
		{"longer the second time, and the third", []windows{
			{1, robs(0.2, 0.2), true}, {9, robs(0, 0), true}, {1, robs(0, 0), false},
			{1, robs(0.2, 0.2), true}, {19, robs(0, 0), true}, {1, robs(0, 0), false},
			{1, robs(0.2, 0.2), true}, {39, robs(0, 0), true}, {1, robs(0, 0), false},
		}},
		{"short again after a minute", []windows{
			{1, robs(0.2, 0.2), true}, {9, robs(0, 0), true}, {61, robs(0, 0), false},
			{1, robs(0.2, 0.2), true}, {9, robs(0, 0), true}, {1, robs(0, 0), false},
		}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			var a rule
			for i, s := range tt.steps {
				for n := range s.n {
					was := a.role
					if changed := a.next(s.e, law.Steal); (a.role != bystander) != s.want || changed != (a.role != was) {
						t.Fatalf("step %d, window %d: changed %v, to %+v", i, n, changed, a)
					}
				}
			}
		})
	}
}

// A share that policy sets replaces the usual one for both ways, and is printed as it was set.
func TestAutoSteal(t *testing.T) {
	for _, c := range []struct {
		steal       float64
		robs, quiet evidence // the most that is allowed, the most that is calm
		why, back   string
	}{
		{0.001, robs(0.001, 0.5), robs(0, 0.0005), "more than 0.1 %", "at most 0.05 % of a CPU"},
		{0.125, robs(0.125, 0.5), robs(0, 0.0625), "more than 12.5 %", "at most 6.25 % of a CPU"},
		{1, robs(1, 1), robs(0, 0.5), "more than 100 %", "at most 50 % of a CPU"},
	} {
		var a rule
		if a.next(c.robs, c.steal) {
			t.Errorf("%v: isolated by just as much: %s", c.steal, a.reason)
		}
		more := c.robs
		more.victims = []victim{{"db", c.robs.robbed() + ms}}
		if !a.next(more, c.steal) || !strings.HasSuffix(a.reason, c.why) {
			t.Errorf("%v: %+v", c.steal, a)
		}
		for range 9 {
			a.next(c.quiet, c.steal)
		}
		louder := c.quiet
		louder.network += ms
		if a.next(louder, c.steal) {
			t.Errorf("%v: back though its packets cost %v", c.steal, louder.network)
		}
		for range 10 {
			a.next(c.quiet, c.steal)
		}
		if a.role != bystander || !strings.Contains(a.reason, c.back) {
			t.Errorf("%v: %+v", c.steal, a)
		}
	}
}

// A window that is too short shows a container that has taken its share of a second. It ends no role.
func TestEarlyWindow(t *testing.T) {
	for _, x := range []struct {
		took time.Duration
		was  role
		want role
	}{
		{30 * ms, bystander, bystander}, {31 * ms, bystander, receiver}, {31 * ms, robbed, receiver},
		{31 * ms, receiver, receiver}, {31 * ms, sender, sender}, {0, receiver, receiver},
	} {
		a := rule{role: x.was}
		e := robs(0.4, 0.4)
		e.length, e.victims = 200*ms, []victim{{"db", x.took}}
		if changed := a.next(e, law.Steal); a.role != x.want || changed != (x.want != x.was) {
			t.Errorf("%+v: changed %v, to %+v", x, changed, a)
		}
	}
}

func TestAutoReason(t *testing.T) {
	var a rule
	if a.next(evidence{}, law.Steal) || a != (rule{}) {
		t.Errorf("a window of no length: %+v", a)
	}
	e := evidence{length: time.Second, idle: 50 * ms, network: 300 * ms, victims: []victim{
		{"one", 10 * ms}, {"db", 100 * ms}, {"two", 20 * ms}, {"ksoftirqd", 30 * ms}, {"three", 5 * ms},
	}}
	want := "its packets took 16.5 % of a CPU from others (db 10.0 %, ksoftirqd 3.0 %, two 2.0 %, 2 more; not counted: idle CPUs 5.0 %, senders 0.0 %), more than 3 %"
	if !a.next(e, law.Steal) || a.reason != want {
		t.Errorf("%+v, want %q", a, want)
	}
	if a.next(e, law.Steal) || a.next(evidence{length: 100 * ms}, law.Steal) || a.reason != want {
		t.Errorf("the reason has become %+v", a)
	}
	for a.role != bystander {
		a.next(robs(0, 0.004), law.Steal)
	}
	if !strings.HasPrefix(a.reason, "for 10s its packets cost at most 1.5 % of a CPU a second, in the last 0.4 %") {
		t.Errorf("%q", a.reason)
	}
}
