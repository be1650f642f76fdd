package agent

import (
	"context"
	"errors"
	"slices"
	"strings"
	"testing"
	"time"
	"unsafe"

	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/feature/netcpu"
	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/kernel/journal"
	"github.com/fairlead-project/fairlead/kernel/sched"
	"github.com/fairlead-project/fairlead/policy"
)

func decision(id container.ID, mode policy.NetCPU, expiry time.Time) policy.Decision {
	return policy.Decision{Container: id, Key: "fairlead.netcpu", Value: string(mode), Expiry: expiry}
}

// script is a decider that notes its calls, and is urgent once.
type script struct {
	decides []policy.Decision
	err     error
	calls   []string
	stop    func()
}

func (s *script) Adopt([]journal.Entry) []policy.Decision { return nil }
func (s *script) Decide([]policy.Target, bool) ([]policy.Decision, error) {
	if s.calls = append(s.calls, "decide"); len(s.calls) > urgencies+1 {
		s.stop()
	}
	return s.decides, s.err
}
func (s *script) Urgent() bool {
	s.calls = append(s.calls, "urgent?")
	return len(s.calls) == 1
}

// Decide is called in its turn, and at once when that is urgent.
func TestUrgent(t *testing.T) {
	r := newRig(t)
	r.start()
	ctx, stop := context.WithCancel(t.Context())
	s := &script{stop: stop}
	r.agent.controller(ctx, &worker{feature: r.agent.workers[0].feature, fence: r.agent.workers[0].fence}, s)
	if got := strings.Join(s.calls, " "); got != "urgent? decide urgent? urgent? urgent? decide urgent? urgent? urgent? urgent? decide" {
		t.Error(got)
	}
}

// Decisions beside an error stand, and the error is reported. Without one, a decision ends that is
// not made again.
func TestDecisionsBesideAnError(t *testing.T) {
	r := newRig(t, 1, 2)
	r.set.set(true, box(1, "observe"), box(2, "isolate"))
	r.start()
	r.untilValue(2, "isolated")
	failed := errors.New("no")
	mine := make(map[choice]bool)
	for _, ds := range [][]policy.Decision{{decision(1, "isolate", time.Time{})}, nil} {
		testkit.Is(t, "control", r.agent.control(&script{decides: ds, err: failed, stop: func() {}}, mine), failed)
		r.untilValue(1, "isolated")
	}
	if err := r.agent.control(&script{stop: func() {}}, mine); err != nil || len(mine) > 0 {
		t.Errorf("control: %v, %v", mine, err)
	}
	r.untilValue(1, "plain")
}

// TestDecisionsLapse has a controller that decides, renews once, and goes silent.
func TestDecisionsLapse(t *testing.T) {
	r := newRig(t, 1, 2)
	r.set.set(true, box(1, "observe"), box(2, "isolate"))
	r.start()
	r.untilValue(2, "isolated")
	start := time.Now()
	r.agent.Decide(decision(1, "isolate", start.Add(time.Hour)))
	r.untilValue(1, "isolated")
	expiry := func() (at time.Time) {
		for _, e := range r.agent.journal.Entries() {
			if e.Owner.Container == 1 {
				at = e.Expiry
			}
		}
		return at
	}
	if at := expiry(); !at.Equal(start.Add(time.Hour)) {
		t.Errorf("the journal has it until %v", at)
	}
	x, err := r.client.Explain(t.Context(), "box-1")
	if err != nil || len(x.Changes) != 1 || len(x.Changes[0].Because) != 1 || x.Changes[0].Because[0].From != "controller" {
		t.Errorf("explained as %+v, %v", x, err)
	}

	renewed := start.Add(2 * time.Hour)
	r.agent.Decide(decision(1, "isolate", renewed))
	r.until("the journal knows of the renewal", func() bool { return expiry().Equal(renewed) })
	r.ahead.Store(int64(90 * time.Minute))
	rounds := r.agent.roundsMade()
	r.until("some rounds more", func() bool { r.agent.nudge(); return r.agent.roundsMade() > rounds+2 })
	if got := r.host.get(t, 1); got != "isolated" {
		t.Errorf("renewed, but it is %q", got)
	}

	// Nobody asks for a round when it lapses.
	r.ahead.Store(int64(3 * time.Hour))
	r.untilValue(1, "plain")
	testkit.Same(t, "2, which policy isolates", "isolated", r.host.get(t, 2))

	// Taken back before it lapses; and what is no decision changes nothing.
	now := r.agent.pace.now()
	r.agent.Decide(decision(1, "isolate", now.Add(time.Hour)))
	r.untilValue(1, "isolated")
	r.agent.Decide(decision(1, "isolate", time.Time{}))
	r.untilValue(1, "plain")
	r.agent.Decide(decision(2, "quickly", now.Add(time.Hour)))
	r.agent.Decide(decision(99, "isolate", now.Add(time.Hour)))
	r.until("what is of no use to be forgotten", func() bool {
		r.agent.nudge()
		r.agent.mu.Lock()
		defer r.agent.mu.Unlock()
		return len(r.agent.decisions) == 1
	})
	testkit.Same(t, "after nonsense 2", "isolated", r.host.get(t, 2))
	r.set.set(true, box(2, "isolate"))
	r.until("the decisions about 1 to go with it", func() bool { return r.state1(1) == "" })
}

// TestExpiredAtStart undoes what lapsed while no agent ran.
func TestExpiredAtStart(t *testing.T) {
	r := newRig(t, 1, 2, 3)
	j := r.journal()
	for id, expiry := range map[container.ID]time.Time{1: time.Now().Add(-time.Second), 2: time.Now().Add(time.Hour), 3: {}} {
		testkit.Must(t, j.TurnUntil(r.host.knob(id), "isolated", journal.Owner{Feature: "netcpu", Container: uint64(id)}, expiry))
	}
	testkit.Must(t, j.Close())
	r.set.set(false, box(2, "observe")) // so that nothing else is undone
	r.start()
	r.untilValue(1, "plain")
	r.untilValue(2, "plain")
	testkit.Same(t, "3, without an expiry", "isolated", r.host.get(t, 3))
}

// TestExpiredEntries has one that its feature does not take back.
func TestExpiredEntries(t *testing.T) {
	r := newRig(t, 1, 2)
	r.set.set(true, box(1, "isolate"))
	r.start()
	r.untilValue(1, "isolated")
	expiry := time.Now().Add(time.Hour)
	testkit.Must(t, r.agent.journal.TurnUntil(r.host.knob(2), "forgotten", journal.Owner{Feature: "netcpu", Container: 1}, expiry))
	r.ahead.Store(int64(time.Hour + lapseGrace/2))
	rounds := r.agent.roundsMade()
	r.until("some rounds more", func() bool { r.agent.nudge(); return r.agent.roundsMade() > rounds+2 })
	if got := r.host.get(t, 2); got != "forgotten" {
		t.Errorf("while the feature may still see to it, it is %q", got)
	}
	r.ahead.Store(int64(time.Hour + 2*lapseGrace))
	r.untilValue(2, "plain")
	testkit.Same(t, "what does not lapse", "isolated", r.host.get(t, 1))
}

// veth is a box that can be isolated.
func veth(id container.ID, mode policy.NetCPU) container.Container {
	c := box(id, mode)
	c.Interfaces = []container.Interface{{Name: "eth0", Index: 2, Kind: "veth", Host: container.HostEnd{NetNS: 1, Index: 3}}}
	return c
}

// A decision is renewed long before it lapses, and not at each look. What policy says of its container
// counts at once.
func TestDecisionsAreRenewed(t *testing.T) {
	r := newRig(t, 1)
	r.set.set(true, box(1, "auto"))
	r.start()
	isolated := decision(1, "isolate", time.Time{})
	isolated.Instead, isolated.Since = "auto", time.Unix(5, 0)
	s := &script{decides: []policy.Decision{isolated}, stop: func() {}}
	mine := make(map[choice]bool)
	var was time.Time
	for _, at := range []struct {
		ahead time.Duration
		new   bool
	}{{0, true}, {decisionFor / 3, false}, {decisionFor * 2 / 3, true}, {decisionFor, false}} {
		r.ahead.Store(int64(at.ahead))
		testkit.Must(t, r.agent.control(s, mine))
		if is := r.agent.decision(isolated).Expiry; is.After(was) != at.new {
			t.Errorf("after %v it is to lapse at %v, before at %v", at.ahead, is, was)
		} else {
			was = is
		}
		r.untilValue(1, "isolated")
		r.until("the journal has it until then", func() bool {
			e := r.agent.journal.Entries()
			return len(e) == 1 && e[0].Expiry.Equal(was)
		})
	}
	r.set.set(true, box(1, "observe"))
	r.untilValue(1, "plain")
}

// The accounts are read for those that are to be decided about, and for nobody else.
func TestAccountsAreReadForAuto(t *testing.T) {
	reads := 0
	m := new(fakeMeter)
	m.during.Store(func() { reads++ })
	x := &netcpu.Accounts{Meter: m, Containers: newFakeSet(true)}
	for want, mode := range []policy.NetCPU{policy.NetCPUObserve, policy.NetCPUAuto} {
		_, err := x.Decide([]policy.Target{{Container: veth(1, mode), Settings: policy.Settings{NetCPU: mode}}}, true)
		if testkit.Must(t, err); reads != want {
			t.Errorf("%d readings for one that is %s", reads, mode)
		}
	}
}

// moved is the knob of a thread that was moved for a container.
type moved struct{ journal.Knob }

func (m moved) Ref() journal.Ref {
	return journal.Ref{Kind: sched.KindKthread, Object: m.Knob.Ref().Object}
}

// TestAutoAdopts starts after an agent that was killed while 1 and 2 were isolated by decision, and
// 3 by policy; the policy of 2 has changed since.
func TestAutoAdopts(t *testing.T) {
	r := newRig(t, 1, 2, 3)
	r.accounts = &netcpu.Accounts{Meter: new(fakeMeter)}
	j := r.journal()
	expiry := map[container.ID]time.Time{1: time.Now().Add(time.Minute), 2: time.Now().Add(time.Minute), 3: {}}
	for id, at := range expiry {
		testkit.Must(t, j.TurnUntil(moved{r.host.knob(id)}, "isolated", journal.Owner{Feature: "netcpu", Container: uint64(id)}, at))
	}
	testkit.Must(t, j.Close())
	writes := r.host.writes.Load()
	r.set.set(false) // none is known at first
	r.start()
	r.set.set(false, veth(1, "auto"), veth(2, "observe"), veth(3, "auto"))
	r.untilValue(2, "plain")
	r.untilValue(3, "plain")
	r.set.set(true, veth(1, "auto"), veth(2, "observe"), veth(3, "auto"))
	rounds := r.agent.roundsMade()
	r.until("some rounds more", func() bool { r.agent.nudge(); return r.agent.roundsMade() > rounds+2 })
	if got := r.host.get(t, 1); got != "isolated" || r.host.writes.Load() != writes+2 {
		t.Errorf("1 is %q after %d writes", got, r.host.writes.Load()-writes)
	}
	x, err := r.client.Explain(t.Context(), "box-1")
	testkit.Must(t, err)
	if !slices.ContainsFunc(x.Container.Policy, func(s api.Setting) bool {
		return s.Value == "isolate" && s.From == "controller" && s.Instead == "fairlead.netcpu=auto (label)" &&
			s.Reason == "decided by an earlier agent, which was killed"
	}) {
		t.Errorf("explained as %+v", x.Container.Policy)
	}
}

// step returns a time as read after the clock was set: the wall clock is ahead and the monotonic
// one is not. Package time offers no way to that; its first word holds nanoseconds in 30 bits, and
// above them seconds (time.go, hasMonotonic).
func step(t *testing.T, at time.Time, by time.Duration) time.Time {
	t.Helper()
	was := at
	*(*uint64)(unsafe.Pointer(&at)) += uint64(by/time.Second) << 30
	if at.Sub(was) != 0 || at.Round(0).Sub(was.Round(0)) != by {
		t.Fatalf("%v is %v by a clock set by %v", was, at, by)
	}
	return at
}

// A step of the clock (the first word of NTP, say) is no time that passed: what a controller
// decided stands, on the host too.
func TestClockStep(t *testing.T) {
	r := newRig(t, 1)
	r.set.set(true, box(1, "observe"))
	r.start()
	r.agent.Decide(decision(1, "isolate", time.Now().Add(time.Hour)))
	r.untilValue(1, "isolated")
	for _, by := range []time.Duration{3 * time.Hour, -3 * time.Hour} {
		now := step(t, time.Now(), by)
		if r.agent.lapse(now); r.host.get(t, 1) != "isolated" {
			t.Errorf("after a step of %v it is undone", by)
		}
		if left := slices.DeleteFunc(r.agent.journal.Entries(), func(e journal.Entry) bool { return !e.Expired(now) }); len(left) > 0 {
			t.Errorf("after a step of %v: %+v has lapsed", by, left)
		}
		r.agent.mu.Lock()
		next := r.agent.lapses
		r.agent.mu.Unlock()
		if next.Sub(now) < 50*time.Minute {
			t.Errorf("after a step of %v something is to lapse in %v", by, next.Sub(now))
		}
	}
}
