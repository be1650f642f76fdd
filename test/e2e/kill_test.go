package e2e

import (
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/lab/sandbox"
)

// TestAgentKilled kills the agent at random points while it applies and while it removes. Packets
// get through all the same. The host is as before once `fairlead restore` has run without an agent,
// or another agent has taken over and was stopped.
func TestAgentKilled(t *testing.T) {
	r := newRig(t)
	r.add(sandbox.Spec{Name: "e2e-plain"})
	r.add(sandbox.Spec{Name: "e2e-small", CPU: sandbox.CPU{Quota: 20 * time.Millisecond, Period: 100 * time.Millisecond}})
	r.add(sandbox.Spec{Name: "e2e-heavy", CPU: sandbox.CPU{Quota: 30 * time.Millisecond, Shares: 2048, Set: "0"}})
	// Values that differ from a fresh device's have to be restored, too.
	must(t, r.boxes[0].SetQueues("eth0", "rx", "rps_cpus", func(int) string { return "1" }))
	before := r.state()

	k := &killer{rig: r, agent: r.agent(), before: before}
	k.agent.policy("isolate.yaml", isolateAll)
	k.measure()
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d; to apply takes %v, to remove %v", seed, k.apply.Round(time.Millisecond), k.remove.Round(time.Millisecond))
	k.rand = rand.New(rand.NewPCG(seed, 0))

	for _, c := range []struct {
		name   string
		rounds int
		kill   func()
		mend   func()
		// certain marks a kill that cannot come before anything is in force, or after all of it.
		certain bool
	}{
		{"applied, restore", 1, k.onceApplied, k.restore, true},
		{"applied, damaged, restore", testkit.Scale(t, 1, 4), k.damaged, k.restore, true},
		{"applied, damaged, adopt", testkit.Scale(t, 1, 4), k.damaged, k.adopt, true},
		{"apply, restore", testkit.Scale(t, 1, 12), k.whileApplying, k.restore, false},
		{"remove, restore", testkit.Scale(t, 1, 8), k.whileRemoving, k.restore, false},
		{"apply, adopt", testkit.Scale(t, 1, 6), k.whileApplying, k.adopt, false},
		{"remove, adopt", testkit.Scale(t, 0, 6), k.whileRemoving, k.adopt, false},
		{"applied, again and again", testkit.Scale(t, 0, 2), func() { k.whileApplying(); k.whileApplying(); k.whileApplying() }, k.restore, false},
	} {
		if c.rounds == 0 {
			continue
		}
		t.Run(c.name, func(t *testing.T) {
			defer k.with(t)()
			changed := 0
			for range c.rounds {
				c.kill()
				if r.state().diff(before) != "" {
					changed++
				}
				r.reachable("after the kill")
				c.mend()
				r.sameAs(before, "after that")
			}
			t.Logf("the host was changed at %d of %d kills", changed, c.rounds)
			if c.certain && changed == 0 {
				t.Error("nothing was in force")
			}
		})
	}
}

type killer struct {
	*rig
	agent         *agent
	before        state
	rand          *rand.Rand
	apply, remove time.Duration // how long these take, from the first change to the last
}

func (k *killer) with(t *testing.T) func() {
	was := k.t
	k.t, k.agent.t = t, t
	return func() { k.t, k.agent.t = was, was }
}

// applied waits until every container is isolated.
func (k *killer) applied() {
	k.t.Helper()
	for _, b := range k.boxes {
		k.agent.isolated(b.Name, 1)
	}
}

// measure lets an agent work undisturbed.
func (k *killer) measure() {
	k.t.Helper()
	k.agent.start()
	k.applied()
	// Use the agent's own clock, since waiting takes longer than the work.
	var first, last time.Time
	for _, b := range k.boxes {
		x, err := k.agent.api.Explain(k.t.Context(), b.Name)
		must(k.t, err)
		for _, c := range append(x.Changes, x.Host...) {
			if first.IsZero() || c.When.Before(first) {
				first = c.When
			}
			if c.When.After(last) {
				last = c.When
			}
		}
	}
	k.apply = last.Sub(first)
	k.reachable("isolated")
	now := time.Now()
	k.agent.stop()
	k.remove = time.Since(now)
	k.sameAs(k.before, "after a clean stop")
}

// journalSize is the length of the journal. It only has to grow with each change.
func (k *killer) journalSize() (size int64) {
	files, _ := filepath.Glob(filepath.Join(k.agent.path("state"), "journal-*"))
	for _, name := range files {
		if st, err := os.Stat(name); err == nil {
			size += st.Size()
		}
	}
	return size
}

func (k *killer) whileApplying() {
	k.t.Helper()
	before := k.journalSize()
	k.agent.launch()
	// Wait until the first change, which an earlier agent may have made.
	must(k.t, within(patience, func() error {
		if size := k.journalSize(); size > before+64 { // more than a header
			return nil
		}
		st, err := k.agent.api.Status(k.t.Context())
		if err == nil && st.Changes == 0 {
			err = fmt.Errorf("no change was made")
		}
		return err
	}))
	k.sleepUpTo(k.apply + k.apply/4)
	k.agent.kill()
}

func (k *killer) onceApplied() {
	k.t.Helper()
	k.agent.start()
	k.applied()
	k.agent.kill()
}

// damaged ruins the files in the state directory, or removes them, after a kill.
func (k *killer) damaged() {
	k.t.Helper()
	k.onceApplied()
	files, err := filepath.Glob(filepath.Join(k.agent.path("state"), "*"))
	must(k.t, err)
	how := k.rand.IntN(3)
	k.t.Logf("damage %d of %q", how, files)
	for _, name := range files {
		st, err := os.Stat(name)
		must(k.t, err)
		switch how {
		case 0:
			must(k.t, os.Remove(name))
		case 1:
			must(k.t, os.Truncate(name, st.Size()/2))
		default:
			must(k.t, os.WriteFile(name, make([]byte, st.Size()), 0o600))
		}
	}
}

func (k *killer) whileRemoving() {
	k.t.Helper()
	k.agent.start()
	k.applied()
	if k.rand.IntN(2) == 0 {
		must(k.t, unix.Kill(k.agent.pid, unix.SIGTERM))
	} else {
		k.agent.policy("isolate.yaml", "match: {name: \"e2e-*\"}\nset: {netcpu: observe}\n")
		defer k.agent.policy("isolate.yaml", isolateAll)
		must(k.t, unix.Kill(k.agent.pid, unix.SIGHUP))
	}
	k.sleepUpTo(k.remove)
	k.agent.kill()
}

func (k *killer) sleepUpTo(d time.Duration) {
	time.Sleep(time.Duration(k.rand.Int64N(int64(max(d, time.Millisecond)))))
}

func (k *killer) restore() {
	k.t.Helper()
	out := k.agent.run("restore", "--state-dir", k.agent.path("state"))
	mustSay(k.t, out, 0)
	mustSay(k.t, k.agent.run("restore", "--state-dir", k.agent.path("state")), 0, "nothing to undo")
}

func (k *killer) adopt() {
	k.t.Helper()
	k.agent.start()
	k.applied()
	k.agent.stop()
}
