package e2e

import (
	"bytes"
	"errors"
	"os"
	"slices"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/lab/sandbox"
)

// TestTakeOver makes one agent wait for the end of another, as a pod of a DaemonSet does during an
// update. The stopping agent leaves what is in force to the waiting one; if none waits, it undoes
// everything. If both are told to stop, in any order, nothing is left.
func TestTakeOver(t *testing.T) {
	r := newRig(t)
	r.add(sandbox.Spec{Name: "e2e-plain"})
	before := r.state()
	first := r.agent()
	first.policy("isolate.yaml", isolateAll)
	first.flags = append(first.flags, "--take-over")
	second := *first // of the same directories
	t.Cleanup(second.kill)
	waits := func(a *agent) { t.Helper(); a.tells("this one takes over when it stops", func() { a.launch() }) }
	term := func(a *agent) { t.Helper(); must(t, unix.Kill(a.pid, unix.SIGTERM)) }

	first.start()
	first.isolated("e2e-plain", 1)
	applied := r.state()
	waits(&second)
	term(first)
	first.finishes()
	// The second agent holds the programs of the first until it has replaced them.
	testkit.Is(t, "in between something was undone", r.state().diff(applied), nil)
	second.isolated("e2e-plain", 1)
	testkit.Is(t, "the second agent has not adopted everything", r.state().diff(applied), nil)

	// Now the other way round, and the waiting agent is stopped alone.
	waits(first)
	term(first)
	first.finishes()
	second.isolated("e2e-plain", 1)
	second.stop()
	r.sameAs(before, "after a stop while nobody waits any more")

	for i := range testkit.Scale(t, 2, 20) {
		first.start()
		first.isolated("e2e-plain", 1)
		waits(&second)
		both := []*agent{first, &second}
		term(both[i%2])
		term(both[1-i%2])
		first.finishes()
		second.finishes()
		r.sameAs(before, "after both were stopped")
	}
}

// TestLinger tells an agent to stop, and kills it before it undoes anything, as kubelet does to
// restart the container of a hanging agent. The next agent adopts everything. An agent that comes
// in time takes over, and an agent without a successor finally undoes everything.
func TestLinger(t *testing.T) {
	r := newRig(t)
	r.add(sandbox.Spec{Name: "e2e-plain"})
	before := r.state()
	a := r.agent()
	a.policy("isolate.yaml", isolateAll)
	plain := a.flags
	a.flags = append(slices.Clone(plain), "--take-over", "--linger=1h")
	lingers := func() {
		t.Helper()
		a.tells("it works on for now", func() { must(t, unix.Kill(a.pid, unix.SIGTERM)) })
		a.isolated("e2e-plain", 1)
	}
	a.start()
	a.isolated("e2e-plain", 1)
	applied := r.state()
	lingers()
	a.kill()
	a.start()
	a.isolated("e2e-plain", 1)
	testkit.Is(t, "the next agent has not adopted everything", r.state().diff(applied), nil)

	lingers()
	next := *a
	t.Cleanup(next.kill)
	next.flags = append(slices.Clone(plain), "--take-over", "--linger=1ms")
	next.start()
	a.finishes()
	next.isolated("e2e-plain", 1)
	next.stop()
	r.sameAs(before, "after one that nobody followed in time")
}

// tells waits until the log contains text once more than before.
func (a *agent) tells(text string, do func()) {
	a.t.Helper()
	said := func() int {
		log, _ := os.ReadFile(a.path("log")) // there may be none yet
		return bytes.Count(log, []byte(text))
	}
	before := said()
	do()
	await(a.t, text, func() error {
		if said() == before {
			return errors.New("the log has it no more often")
		}
		return nil
	})
}
