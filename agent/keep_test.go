package agent

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/discover"
	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/kernel/journal"
)

// nameless is a box that only its cgroup reveals.
func nameless(id container.ID) container.Container {
	c := box(id, "")
	c.Source, c.Name, c.RuntimeID = container.CgroupSource, id.String(), ""
	return c
}

// says puts a list in place, with the word of the runtime on whether it is whole.
func (s *fakeSet) says(partial bool, list ...container.Container) {
	s.set(true, list...)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.snap.Sources = []discover.SourceStatus{{Name: "fake", Listed: true, Partial: partial}, {Name: container.CgroupSource, Listed: true}}
	close(s.changed)
	s.changed = make(chan struct{})
}

// TestAgentKeeps kills an agent, and its successor finds the runtime silent.
func TestAgentKeeps(t *testing.T) {
	r := newRig(t, 1, 2, 3, 4)
	file := filepath.Join(r.policies, "10.yaml")
	testkit.Must(t, os.WriteFile(file, []byte("match: {name: \"4\", runtime: cgroup}\nset: {netcpu: isolate}\n"), 0o600))
	r.set.says(false, box(1, "isolate"), box(2, "isolate"), box(3, "isolate"), nameless(4))
	r.start()
	for id := container.ID(1); id <= 4; id++ {
		r.untilValue(id, "isolated")
	}
	entries := r.agent.journal.Entries()
	for _, e := range entries {
		if want := map[bool]string{true: container.CgroupSource, false: "fake"}[e.Owner.Container == 4]; e.Source != want {
			t.Errorf("entry %+v, want it attributed to %s", e, want)
		}
	}

	// A runtime that comes back and has yet to answer about some.
	r.set.says(true, box(1, "isolate"), nameless(2), box(3, "isolate"), nameless(4))
	rounds := r.agent.roundsMade()
	r.until("some rounds more", func() bool { r.agent.nudge(); return r.agent.roundsMade() > rounds+3 })
	if got := r.host.get(t, 2); got != "isolated" || r.state1(2) != api.StateDone {
		t.Errorf("without a word about it, 2 is %q and %s", got, r.state1(2))
	}

	// As if killed: what it would put back on its way is put in force again.
	testkit.Must(t, r.stop())
	j := r.journal()
	for _, e := range entries {
		j.Attribute(func(uint64) string { return e.Source })
		testkit.Must(t, j.Turn(r.host.knob(container.ID(e.Owner.Container)), "isolated", e.Owner))
	}
	testkit.Must(t, j.Close())
	testkit.Must(t, os.Remove(file))
	r.set.says(true, nameless(1), nameless(2), nameless(4)) // 3 has ended
	r.start()
	r.ahead.Store(int64(readyTime + time.Second)) // it has waited for the runtime
	r.agent.nudge()
	r.untilValue(3, "plain")
	r.untilValue(4, "plain") // its policy has gone, and no runtime knows better
	for id := container.ID(1); id <= 2; id++ {
		if got := r.host.get(t, id); got != "isolated" || r.state1(id) != api.StateKept {
			t.Errorf("without its runtime, %d is %q and %s", id, got, r.state1(id))
		}
	}
	if list, err := r.client.Containers(t.Context()); err != nil || !strings.Contains(list[0].Features[0].Error, "fake, which knows") {
		t.Errorf("containers %+v, %v", list, err)
	}
	for _, call := range r.feature.took() {
		if call == "prune" {
			t.Error("pruned while some were kept")
		}
	}

	// It answers: one has lost its label meanwhile.
	r.set.says(false, box(1, "isolate"), box(2, ""))
	r.untilValue(2, "plain")
	r.until("1 is done", func() bool { return r.state1(1) == api.StateDone })
	if got := r.host.get(t, 1); got != "isolated" {
		t.Errorf("1 is %q", got)
	}
	r.until("the prune that was due", func() bool {
		for _, call := range r.feature.took() {
			if call == "prune" {
				return true
			}
		}
		return false
	})
}

// TestAgentKeepsNothingOnRestore releases a kept container on request.
func TestAgentKeepsNothingOnRestore(t *testing.T) {
	r := newRig(t, 1)
	j := r.journal()
	j.Attribute(func(uint64) string { return "fake" })
	testkit.Must(t, j.Turn(r.host.knob(1), "isolated", journal.Owner{Feature: "netcpu", Container: 1}))
	testkit.Must(t, j.Close())
	r.set.says(true, nameless(1))
	r.start()
	r.until("1 is kept", func() bool { return r.state1(1) == api.StateKept })
	if _, err := r.client.Restore(t.Context(), "1"); err != nil {
		t.Fatal(err)
	}
	r.untilValue(1, "plain")
}

func (a *Agent) roundsMade() uint64 {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.rounds.made
}
