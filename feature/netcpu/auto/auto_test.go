package auto

import (
	"cmp"
	"fmt"
	"maps"
	"strings"
	"testing"
	"time"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/feature/netcpu/account"
	"github.com/fairlead-project/fairlead/policy"
)

const ms = time.Millisecond

// veths returns a container that can be isolated.
func veths(id container.ID) container.Container {
	return container.Container{ID: id, Name: "box-" + id.String(), Interfaces: []container.Interface{{Kind: "veth", Host: container.HostEnd{NetNS: 1}}}}
}

func targets(of ...container.Container) (list []policy.Target) {
	for _, c := range of {
		list = append(list, policy.Target{Container: c, Settings: policy.Settings{NetCPU: policy.NetCPUAuto}})
	}
	return list
}

func boxName(id container.ID) string { return "box-" + id.String() }

// readings makes readings that grow by the same amount each second.
type readings struct {
	now   account.Reading
	sends map[container.ID]time.Duration // cost of the packets that it sends
}

func (r *readings) next(more map[account.Pair]time.Duration) account.Reading {
	r.now.Taken = cmp.Or(r.now.Taken, time.Unix(1_800_000_000, 0)).Add(time.Second)
	cpu := make(map[container.ID]time.Duration)
	sums := make(map[account.Pair]time.Duration)
	maps.Copy(sums, r.now.Thefts)
	for k, ns := range more {
		sums[k] += ns
	}
	for k, ns := range sums {
		cpu[k.Culprit] += ns
	}
	r.now.Thefts, r.now.Accounts = sums, make(map[container.ID]account.Account)
	for id, ns := range cpu {
		var a account.Account
		a.Receive[account.UDP].CPU, a.Send[account.UDP].CPU = ns-r.sends[id], r.sends[id]
		a.Own = sums[from(account.Task, id, id)]
		r.now.Accounts[id] = a
	}
	return r.now
}

func from(kind account.PartyKind, victim, culprit container.ID) account.Pair {
	return account.Pair{Victim: account.Party{Kind: kind, Container: victim}, Culprit: culprit}
}

// Which time counts as taken from others, and which does not.
func TestChooserEvidence(t *testing.T) {
	for _, tt := range []struct {
		name   string
		second map[account.Pair]time.Duration
		robbed time.Duration
		who    string // names of all victims
	}{
		{"a container's task, and its own", map[account.Pair]time.Duration{from(account.Task, 2, 1): 100 * ms, from(account.Task, 1, 1): 500 * ms}, 100 * ms, "box-2"},
		{"another's NAPI thread, and its own", map[account.Pair]time.Duration{from(account.NAPI, 2, 1): 40 * ms, from(account.NAPI, 1, 1): 500 * ms}, 40 * ms, "box-2"},
		{"tasks of the host", map[account.Pair]time.Duration{from(account.Task, 0, 1): 70 * ms}, 70 * ms, "tasks of the host"},
		{"idle CPUs", map[account.Pair]time.Duration{from(account.Idle, 0, 1): 900 * ms}, 0, ""},
		{"somebody else's theft", map[account.Pair]time.Duration{from(account.Task, 2, 3): 900 * ms}, 0, ""},
		{"ksoftirqd where softirqs interrupt tasks", map[account.Pair]time.Duration{
			from(account.Ksoftirqd, 0, 1): 400 * ms, from(account.Task, 2, 1): 30 * ms, from(account.Idle, 0, 1): 10 * ms}, 330 * ms,
			"box-2, those who waited for ksoftirqd threads"},
		{"ksoftirqd where they come upon idle CPUs", map[account.Pair]time.Duration{
			from(account.Ksoftirqd, 0, 1): 400 * ms, from(account.Idle, 0, 1): 400 * ms}, 0, "those who waited for ksoftirqd threads"},
		{"a thread of an uplink, while others' softirqs interrupt tasks", map[account.Pair]time.Duration{
			from(account.NAPI, 0, 1): 200 * ms, from(account.Task, 2, 3): 5 * ms}, 200 * ms, "those who waited for napi threads"},
		{"a thread of an uplink, and nothing says who wants to run", map[account.Pair]time.Duration{from(account.NAPI, 0, 1): 200 * ms}, 200 * ms,
			"those who waited for napi threads"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			var r readings
			a := r.next(map[account.Pair]time.Duration{from(account.Task, 2, 1): time.Hour})
			e := between(a, r.next(tt.second)).evidence(1, boxName)
			var names []string
			for _, v := range e.victims {
				names = append(names, v.name)
			}
			if e.robbed() != tt.robbed || e.length != time.Second || strings.Join(names, ", ") != tt.who {
				t.Errorf("%+v, want %v of %s", e, tt.robbed, tt.who)
			}
		})
	}
}

// A robber is isolated in the second in which it robs, stays isolated while its packets cost
// anything, and goes back. A container that only robs idle CPUs is left alone.
func TestChooser(t *testing.T) {
	var r readings
	var autos Chooser
	of := targets(veths(1), veths(2))
	step := func(more map[account.Pair]time.Duration) []Choice {
		return autos.Next(r.next(more), of, true, boxName)
	}
	want := func(when string, got []Choice, one, two policy.NetCPU) {
		t.Helper()
		if len(got) != 2 || got[0].Container != 1 || got[1].Container != 2 || got[0].Mode != one || got[1].Mode != two {
			t.Fatalf("%s: %+v", when, got)
		}
	}
	quiet := map[account.Pair]time.Duration{}
	flood := map[account.Pair]time.Duration{from(account.Task, 2, 1): 200 * ms, from(account.Idle, 0, 2): 300 * ms}
	want("the first reading, whatever it holds", step(map[account.Pair]time.Duration{from(account.Task, 2, 1): time.Hour}), "observe", "observe")
	for range 5 {
		want("quiet", step(quiet), "observe", "observe")
	}
	got := step(flood)
	want("a flood", got, "isolate", "observe")
	if !got[0].Since.Equal(r.now.Taken) || !strings.HasPrefix(got[0].Reason, "its packets took 20.0 % of a CPU from others (box-2 20.0 %;") || !got[1].Since.IsZero() || got[1].Reason != "" {
		t.Errorf("%+v", got)
	}
	since := got[0].Since
	isolated := map[account.Pair]time.Duration{from(account.NAPI, 1, 1): 400 * ms}
	for range 20 {
		want("it goes on", step(isolated), "isolate", "observe")
	}
	for range 9 {
		want("calm", step(quiet), "isolate", "observe")
	}
	got = step(quiet)
	want("calm for long enough", got, "observe", "observe")
	if !got[0].Since.After(since) || !strings.HasPrefix(got[0].Reason, "for 10s its packets cost at most 1.5 %") {
		t.Errorf("%+v", got[0])
	}

	// A container that cannot be isolated is charged, and one that has gone is forgotten.
	want("again", step(flood), "isolate", "observe")
	of[0].Container.HostNetwork = true
	want("in the host's network", step(isolated), "charge", "observe")
	of[0].Container.HostNetwork, of[0].Container.Interfaces = false, []container.Interface{{Kind: "macvlan"}}
	want("with a macvlan", step(isolated), "charge", "observe")
	of = of[1:]
	if got := step(flood); len(got) != 1 || got[0].Container != 2 {
		t.Errorf("%+v", got)
	}
	of = targets(veths(1), veths(2))
	want("it is a new one", step(quiet), "observe", "observe")

	// Each container has the share of its policy, from the next reading on.
	much := 0.5
	of[0].Settings.NetCPUSteal = &much
	want("no more than it may", step(flood), "observe", "observe")
	of[0].Settings.NetCPUSteal = nil
	want("more than it may again", step(flood), "isolate", "observe")
}

// A container that robs by sending is charged as long as it does so, even if it was isolated as a
// receiver before. A server sends its answers in its own time, which robs no container.
func TestChooserSender(t *testing.T) {
	type second struct {
		sent, received, answers time.Duration
		want                    policy.NetCPU
	}
	for name, seconds := range map[string][]second{
		"sends more, and does not change its mind": {{10 * ms, 10 * ms, 0, policy.NetCPUObserve}, {101 * ms, 100 * ms, 0, policy.NetCPUCharge}, {0, 200 * ms, 0, policy.NetCPUCharge}},
		"receives more":             {{100 * ms, 101 * ms, 0, policy.NetCPUIsolate}},
		"is a flooded server":       {{0, 200 * ms, 300 * ms, policy.NetCPUIsolate}},
		"sends once it is isolated": {{0, 100 * ms, 0, policy.NetCPUIsolate}, {100 * ms, 10 * ms, 0, policy.NetCPUCharge}},
	} {
		r := readings{sends: map[container.ID]time.Duration{1: time.Hour}} // long ago
		var autos Chooser
		for i, x := range append([]second{{0, time.Hour + time.Minute, 0, policy.NetCPUObserve}}, seconds...) {
			r.sends[1] += x.sent + x.answers
			more := map[account.Pair]time.Duration{from(account.Task, 2, 1): x.sent + x.received, from(account.Task, 1, 1): x.answers}
			if got := autos.Next(r.next(more), targets(veths(1)), true, boxName)[0]; got.Mode != x.want {
				t.Errorf("%s, second %d: %+v, want %s", name, i, got, x.want)
			}
		}
	}
}

// Whatever a container in the mode isolate robs by, it is isolated, and it is not credited. Many that
// each take less than they may are isolated as well, but not one that takes next to nothing, or that
// only takes something beside one that takes too much.
func TestChooserIsolate(t *testing.T) {
	of := targets(veths(1), veths(2), veths(3), veths(4))
	for i := range of {
		of[i].Settings.NetCPU = policy.NetCPUIsolate
	}
	step := func(one, two, three time.Duration) (modes []policy.NetCPU) {
		r, autos := readings{sends: map[container.ID]time.Duration{}}, Chooser{}
		for range 4 {
			r.sends[1] += one
			modes = nil
			for _, m := range autos.Next(r.next(map[account.Pair]time.Duration{
				from(account.Task, 4, 1): one, from(account.Task, 4, 2): two, from(account.Task, 4, 3): three}), of, true, boxName) {
				modes = append(modes, m.Mode)
			}
		}
		return modes
	}
	for _, x := range []struct {
		one, two, three time.Duration
		want            string
	}{
		{10 * ms, 10 * ms, 4 * ms, "[observe observe observe observe]"},
		{16 * ms, 12 * ms, 4 * ms, "[isolate isolate observe observe]"},
		{100 * ms, 12 * ms, 4 * ms, "[isolate observe observe observe]"},
	} {
		if got := fmt.Sprint(step(x.one, x.two, x.three)); got != x.want {
			t.Errorf("%+v: %s", x, got)
		}
	}
}

// A container that keeps losing time to others is charged, which is a credit, until that ends. One
// that loses time only until the robber is isolated is left alone.
func TestChooserRobbed(t *testing.T) {
	const (
		observe = policy.NetCPUObserve
		charge  = policy.NetCPUCharge
		isolate = policy.NetCPUIsolate
	)
	type phase struct {
		seconds         int
		stolen          time.Duration // in each
		culprit, victim policy.NetCPU // at the end of each
	}
	for _, tt := range []struct {
		name   string
		sends  bool
		phases []phase
	}{
		{"by one that receives", false, []phase{{2, 200 * ms, isolate, observe}, {1, 0, isolate, observe}, {2, 200 * ms, isolate, observe}}},
		{"by one that sends", true, []phase{{2, 200 * ms, charge, observe}, {9, 200 * ms, charge, charge}, {9, 0, charge, charge}, {1, 0, observe, observe}}},
		{"by many", true, []phase{{2, 6 * ms, observe, observe}, {1, 6 * ms, observe, charge}, {20, 3 * ms, observe, charge}, {9, 2 * ms, observe, charge}, {1, 2 * ms, observe, observe}}},
		{"by next to nothing", true, []phase{{100, 5 * ms, observe, observe}}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			r := readings{sends: map[container.ID]time.Duration{}}
			var autos Chooser
			step := func(stolen time.Duration) []Choice {
				if tt.sends {
					r.sends[1] += stolen
				}
				return autos.Next(r.next(map[account.Pair]time.Duration{from(account.Task, 2, 1): stolen}), targets(veths(1), veths(2)), true, boxName)
			}
			step(time.Minute)
			for i, p := range tt.phases {
				for second := range p.seconds {
					if got := step(p.stolen); got[0].Mode != p.culprit || got[1].Mode != p.victim {
						t.Fatalf("phase %d, second %d: %+v", i, second, got)
					}
				}
			}
		})
	}
}

// An earlier agent's decision remains in force, and ends like any other.
func TestChooserAdopt(t *testing.T) {
	var r readings
	var autos Chooser
	autos.Adopt(1, "as before", time.Unix(5, 0))
	of := targets(veths(1))
	for i := range 12 {
		m := autos.Next(r.next(nil), of, true, boxName)[0]
		// The first reading has no length.
		if isolated := m.Mode == policy.NetCPUIsolate; isolated != (i < 10) || isolated && (m.Reason != "as before" || !m.Since.Equal(time.Unix(5, 0))) {
			t.Fatalf("reading %d: %+v", i, m)
		}
	}
}

// An earlier agent's isolation is not forgotten before the labels of its container are known.
func TestChooserKeepWhatIsNotKnownYet(t *testing.T) {
	one, two := policy.Target{Container: container.Container{ID: 1}}, policy.Target{Container: container.Container{ID: 2}}
	for _, complete := range []bool{false, true} {
		var autos Chooser
		autos.Adopt(1, "adopted", time.Unix(1, 0))
		autos.Next(account.Reading{Taken: time.Unix(2, 0)}, []policy.Target{two}, complete, boxName)
		m := autos.Next(account.Reading{Taken: time.Unix(3, 0)}, []policy.Target{one, two}, true, boxName)
		if kept := m[0].Reason == "adopted" && m[0].Mode != policy.NetCPUObserve; kept == complete {
			t.Errorf("after a list that is complete: %v, it is %+v", complete, m[0])
		}
	}
}

// An alarm is raised once the packets of a container that does not pay have taken a second's share. The
// reading that follows counts for that container, and once more, with the rest of the second, for others.
func TestAlarm(t *testing.T) {
	var autos Chooser
	now := account.Reading{Taken: time.Unix(1_800_000_000, 0)}
	after := func(d, one, two time.Duration) account.Reading {
		r := account.Reading{Taken: now.Taken.Add(d), Accounts: make(map[container.ID]account.Account), Thefts: make(map[account.Pair]time.Duration)}
		for id, took := range map[container.ID]time.Duration{1: one, 2: two} {
			a := account.Account{Took: took}
			a.Receive[account.UDP].CPU = took
			r.Accounts[id], r.Thefts[from(account.Task, 3, id)] = a, took
		}
		return r
	}
	alarmed := func(r account.Reading) bool {
		return autos.Alarm(func() (account.Reading, error) { return r, nil })
	}
	next := func(r account.Reading, one, two policy.NetCPU) {
		t.Helper()
		if got := autos.Next(r, targets(veths(1), veths(2)), true, boxName); got[0].Mode != one || got[1].Mode != two {
			t.Errorf("%v: %+v", r.Taken.Sub(now.Taken), got)
		}
	}
	next(after(0, 0, 0), policy.NetCPUObserve, policy.NetCPUObserve)
	for took, want := range map[time.Duration]bool{30 * ms: false, 31 * ms: true} {
		if got := alarmed(after(200*ms, took, 0)); got != want {
			t.Errorf("%v are taken: %v", took, got)
		}
	}
	next(after(200*ms, 31*ms, 20*ms), policy.NetCPUIsolate, policy.NetCPUObserve)
	if alarmed(after(400*ms, time.Hour, 30*ms)) {
		t.Error("an alarm about one that pays")
	}
	next(after(time.Second, 31*ms, 31*ms), policy.NetCPUIsolate, policy.NetCPUIsolate)
	autos.Next(account.Reading{}, nil, true, boxName)
	next(after(time.Minute, time.Hour, time.Hour), policy.NetCPUObserve, policy.NetCPUObserve)
}

// With a full table of pairs, the accounts are enough to isolate a new robber and to credit a new
// victim.
func TestChooserWithoutPairs(t *testing.T) {
	var autos Chooser
	now := account.Reading{Taken: time.Unix(1_800_000_000, 0)}
	took, robbed := make(map[container.ID]time.Duration), make(map[container.ID]time.Duration)
	second := func(full bool) []Choice {
		if now.Taken = now.Taken.Add(time.Second); full {
			now.Lost++
		}
		took[1] += 200 * ms
		robbed[2] += 200 * ms
		now.Accounts = make(map[container.ID]account.Account)
		for _, id := range []container.ID{1, 2, 3} {
			a := account.Account{Took: took[id], Robbed: robbed[id]}
			a.Receive[account.UDP].CPU = took[id]
			now.Accounts[id] = a
		}
		return autos.Next(now, targets(veths(1), veths(2), veths(3)), true, boxName)
	}
	second(false)
	// The pairs are complete: that they are read a moment later is no theft.
	if got := second(false); got[0].Mode != policy.NetCPUObserve {
		t.Errorf("without a full table: %+v", got)
	}
	got := second(true)
	if got[0].Mode != policy.NetCPUIsolate || !strings.Contains(got[0].Reason, "others, not told apart 20.0 %") {
		t.Errorf("the robber: %+v", got[0])
	}
	for range 3 {
		got = second(true)
	}
	if got[1].Mode != policy.NetCPUCharge || got[2].Mode != policy.NetCPUObserve {
		t.Errorf("the victim and somebody else: %+v", got[1:])
	}
}

// The pairs that exist name their victims; the rest of the time taken counts in proportion to how
// often the CPUs were wanted.
func TestUntold(t *testing.T) {
	a := account.Reading{Taken: time.Unix(1_800_000_000, 0)}
	b := account.Reading{Taken: a.Taken.Add(time.Second), Lost: 1, Accounts: map[container.ID]account.Account{1: {Took: 400 * ms}},
		Thefts: map[account.Pair]time.Duration{from(account.Task, 0, 1): 100 * ms, from(account.Idle, 0, 1): 300 * ms, from(account.Ksoftirqd, 0, 1): 200 * ms}}
	// A quarter of the softirqs interrupted a task: that part of the remaining 100 ms counts, as of
	// ksoftirqd's 200.
	if e := between(a, b).evidence(1, boxName); e.robbed() != (100+25+50)*ms || e.idle != (300+75+150)*ms {
		t.Errorf("%v robbed, %v of idle CPUs: %+v", e.robbed(), e.idle, e)
	}
}
