package agent

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/kernel/journal"
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
		if err := r.agent.control(&script{decides: ds, err: failed, stop: func() {}}, mine); !errors.Is(err, failed) {
			t.Errorf("control: %v", err)
		}
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
	if got := r.host.get(t, 2); got != "isolated" {
		t.Errorf("2, which policy isolates, is %q", got)
	}

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
	if got := r.host.get(t, 2); got != "isolated" {
		t.Errorf("after nonsense 2 is %q", got)
	}
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
	if got := r.host.get(t, 3); got != "isolated" {
		t.Errorf("3, without an expiry, is %q", got)
	}
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
	if got := r.host.get(t, 1); got != "isolated" {
		t.Errorf("what does not lapse is %q", got)
	}
}
