package agent

import (
	"context"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/discover"
	"github.com/fairlead-project/fairlead/feature"
	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/kernel/journal"
	"github.com/fairlead-project/fairlead/policy"
)

// many stands for so many containers that a round takes a while.
type many struct {
	*fakeSet
	rounds atomic.Int64
}

const slow = 20 * time.Millisecond

func (m *many) Snapshot() discover.Snapshot {
	m.rounds.Add(1)
	time.Sleep(slow)
	return m.fakeSet.Snapshot()
}

// However often containers come and go, rounds leave the agent most of its time, and
// the last change is seen.
func TestRoundsRest(t *testing.T) {
	r := newRig(t)
	synctest.Test(t, func(t *testing.T) {
		set := &many{fakeSet: newFakeSet(true)}
		a := assemble(Config{StateDir: r.state, Log: quiet()}, set, policy.NewStore("", time.Now), r.journal(), r.host.opener, []feature.Feature{newFake()}, ordinary())
		defer a.journal.Close()
		stop := testkit.Background(t, func(ctx context.Context) error { a.loop(ctx); return nil })
		const changes = 10_000
		for n := range changes {
			set.set(true, box(container.ID(n+1), ""))
			time.Sleep(time.Millisecond)
		}
		most := int64(changes * time.Millisecond / ((1 + roundRest) * slow))
		if n := set.rounds.Load(); n > most+1 || n < most/2 {
			t.Errorf("%d rounds in 10 s, want about %d", n, most)
		}
		time.Sleep(time.Second)
		a.mu.Lock()
		_, seen := a.targets[changes]
		a.mu.Unlock()
		if !seen {
			t.Error("the last container is not seen")
		}
		stop()
	})
}

// Changes of a killed agent: for containers that ended they are undone, for running ones they are
// adopted without a write, and those of a feature that is not here are undone too.
func TestAgentAdopts(t *testing.T) {
	r := newRig(t, 1, 2, 3, 4, 5)
	j := r.journal()
	for id := container.ID(1); id <= 5; id++ {
		owner := journal.Owner{Feature: "netcpu", Container: uint64(id)}
		switch id {
		case 4:
			owner.Feature = "traffic"
		case 5:
			owner.Container = 0 // the host as a whole
		}
		testkit.Must(t, j.Turn(r.host.knob(id), "isolated", owner))
	}
	testkit.Must(t, j.Close())
	r.host.writes.Store(0)

	// While the list may lack some, nothing may be taken for ended.
	r.set.set(false, box(1, "isolate"), box(4, ""))
	r.start()
	r.until("1 is done", func() bool { return r.state1(1) == api.StateDone })
	if got := r.host.get(t, 2); got != "isolated" {
		t.Fatalf("2 was undone before the list was complete: %q", got)
	}
	r.set.set(true, box(1, "isolate"), box(3, "observe"), box(4, ""))
	r.untilValue(2, "plain")
	r.untilValue(3, "plain")
	r.untilValue(4, "plain")
	testkit.Same(t, "1 was not adopted", "isolated", r.host.get(t, 1))
	testkit.Same(t, "what netcpu changed for the host is its own business, but", "isolated", r.host.get(t, 5))
	if got := r.host.writes.Load(); got != 3 {
		t.Errorf("%d writes, want those of 2, 3 and 4", got)
	}
	testkit.Must(t, r.stop())
	for id := container.ID(1); id <= 5; id++ {
		if got := r.host.get(t, id); got != "plain" {
			t.Errorf("after a clean stop %d is %q", id, got)
		}
	}
}

// TestAgentAdoptsPod starts after an agent was killed together with the container that owns its
// changes for a pod. The rest of the pod takes them over before they are undone.
func TestAgentAdoptsPod(t *testing.T) {
	r := newRig(t, 1, 2, 3)
	j := r.journal()
	for _, id := range []container.ID{1, 3} {
		testkit.Must(t, j.Turn(r.host.knob(id), "isolated", journal.Owner{Feature: "netcpu", Container: uint64(id)}))
	}
	testkit.Must(t, j.Close())
	r.host.writes.Store(0)
	first := make(chan struct{})
	r.apply = func(context.Context, policy.Target) error {
		<-first
		return r.feature.journal.Turn(r.host.knob(1), "isolated", journal.Owner{Feature: "netcpu", Container: 2})
	}
	r.set.set(true, box(2, "isolate"))
	r.start()
	r.until("there was a round", func() bool {
		s, err := r.client.Status(t.Context())
		return err == nil && s.Rounds > 0
	})
	stale := func() float64 { return series(r.agent)["agent_journal_stale_changes"] }
	if n := stale(); n != 2 {
		t.Errorf("%v stale changes, want those of 1 and 3", n)
	}
	close(first)
	r.untilValue(3, "plain") // its pod has ended whole
	r.until("no change is stale", func() bool { return stale() == 0 })
	testkit.Same(t, "what the pod was due", "isolated", r.host.get(t, 1))
	if got := r.host.writes.Load(); got != 2 { // of 2 and 3
		t.Errorf("%d writes", got)
	}
}
