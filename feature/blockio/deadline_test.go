package blockio

import (
	"errors"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/kernel"
	"github.com/fairlead-project/fairlead/kernel/sched"
)

// Where there are no real-time groups each thread of a container is bounded by its
// deadline. The kernel goes on with that after the agent, and what a later one does not
// know is put back.
func TestDeadlines(t *testing.T) {
	testkit.OnKernels(t)
	h := newHost(t)
	h.cfg.Deadline = true
	c, cg := h.container("db")
	start := func(nice int) int {
		pid := cg.Spinner(t).Pid
		must(t, unix.Setpriority(unix.PRIO_PROCESS, pid, nice))
		return pid
	}
	policyOf := func(pid int) string {
		t.Helper()
		th, err := sched.FindTask("/proc", pid)
		must(t, err)
		return value(t, sched.Deadline("/proc", th))
	}
	held := func(when string, pid int, want bool) {
		t.Helper()
		v := policyOf(pid)
		run, period, ok := sched.ParseDeadline(v)
		if ok != want || ok && (run <= 0 || run > period/50) {
			t.Errorf("%s: %q, want it held to 20ms in a second: %v", when, v, want)
		}
	}
	a := start(5)
	ctx := t.Context()
	must(t, h.Apply(ctx, target(t, c, "io.realtime: 20ms")))
	held("a thread that spins", a, true)
	if got := h.realtimes(); len(got) != 1 || got[0].Way != "deadline" || got[0].Promoted != 1 || got[0].Own != 0 {
		t.Errorf("the report is %+v", got)
	}
	b := start(0)
	_, err := h.Decide(nil, true)
	must(t, err)
	held("a new thread", b, true)

	// One that is real-time by its own doing is counted, and left alone.
	for flags, own := range map[uint64]string{0: "policy 6", unix.SCHED_FLAG_RESET_ON_FORK: "deadline 1000000/200000000"} {
		must(t, unix.SchedSetAttr(b, &unix.SchedAttr{Size: unix.SizeofSchedAttr, Policy: unix.SCHED_DEADLINE, Flags: flags, Runtime: 1e6, Deadline: 2e8, Period: 2e8}, 0))
		_, err = h.Decide(nil, true)
		must(t, err)
		if got := h.realtimes(); len(got) != 1 || got[0].Own != 1 || got[0].Promoted != 1 || !strings.HasPrefix(policyOf(b), own) {
			t.Errorf("the report is %+v, the thread %q", got, policyOf(b))
		}
	}
	must(t, unix.SchedSetAttr(b, &unix.SchedAttr{Size: unix.SizeofSchedAttr, Policy: unix.SCHED_NORMAL}, 0))
	sleeper := cg.Sleeper(t)
	err = unix.SchedSetAttr(sleeper.Pid, &unix.SchedAttr{Size: unix.SizeofSchedAttr, Policy: unix.SCHED_FIFO, Priority: 1}, 0)
	if !errors.Is(err, unix.EPERM) { // a real-time group without runtime: no container can do that there
		must(t, err)
		_, err = h.Decide(nil, true)
		must(t, err)
		if got := h.realtimes(); len(got) != 1 || got[0].Own != 1 || !strings.HasPrefix(policyOf(sleeper.Pid), "policy 1,") {
			t.Errorf("the report is %+v, the thread %q", got, policyOf(sleeper.Pid))
		}
	}
	must(t, sleeper.Kill())
	sleeper.Wait()

	must(t, h.Close()) // the agent has died: the kernel goes on
	held("without an agent", a, true)
	h.open()
	h.cfg.Deadline = true
	must(t, h.Apply(ctx, target(t, c, "io.realtime: 10ms")))
	held("another agent", a, true)
	must(t, h.Apply(ctx, target(t, c, "netcpu: observe")))
	if x, y := policyOf(a), policyOf(b); x != "normal 5" || y != "normal 0" {
		t.Errorf("not asked for: %q and %q", x, y)
	}
	must(t, h.Apply(ctx, target(t, c, "io.realtime: 10ms")))
	must(t, h.Close())
	out, err := h.journal.Restore(kernel.Opener(kernel.Default()), nil) // as `fairlead restore` does
	must(t, err)
	if got := policyOf(a); len(out) != 2 || got != "normal 5" {
		t.Errorf("restore: %q, %+v", got, out)
	}
}

// A budget that the profile gives is taken; without one the refusal says how to get it, and
// the profile outlives the feature.
func TestAutoRealtime(t *testing.T) {
	h := newHost(t)
	h.cfg.Deadline = true
	c, _ := h.container("db")
	disk := h.disk(10_000)
	settings := []string{"io.realtime: auto", "io.reserve: " + disk.Path + " riops=1000"}
	testkit.Fails(t, "without a profile", h.Apply(t.Context(), target(t, c, settings...)), "--realtime")
	_, err := h.Command(t.Context(), nil, api.Ask{Body: api.CapacityRequest{Device: disk.Path, BlockIOFigures: api.BlockIOFigures{ReadIOPS: 10_000, WriteIOPS: 10_000},
		Realtime: []api.RealtimePoint{{Budget: 0.2, ReadIOPS: 8000}, {Budget: 0.1, ReadIOPS: 4000}}}})
	must(t, err)
	h.capacity(disk.Path, 9_000) // a new capacity keeps the profile
	must(t, h.Close())
	h.open()
	h.cfg.Deadline = true
	must(t, h.Apply(t.Context(), target(t, c, settings...)))
	if got := h.report().Realtime; len(got) != 1 || got[0].Budget != 0.025 || !got[0].Auto {
		t.Errorf("the budget is %+v", got)
	}
	profile := func(budget float64) {
		t.Helper()
		_, err := h.Command(t.Context(), nil, api.Ask{Body: api.CapacityRequest{Device: disk.Path, BlockIOFigures: api.BlockIOFigures{ReadIOPS: 10_000, WriteIOPS: 10_000},
			Realtime: []api.RealtimePoint{{Budget: budget, ReadIOPS: 1000}}}})
		must(t, err)
	}
	profile(0.05)
	if got := h.report().Realtime; len(got) != 1 || got[0].Budget != 0.05 {
		t.Errorf("by a new profile the budget is %+v", got)
	}
	other, _ := h.container("other")
	must(t, h.Apply(t.Context(), target(t, other, "io.realtime: 300ms")))
	profile(0.4) // more than there is
	if got := h.report().Realtime; len(got) != 2 || got[0].Budget != 0.05 {
		t.Errorf("by a profile that asks for too much the budget is %+v", got)
	}
	must(t, h.Remove(t.Context(), other.ID))
	testkit.Fails(t, "without a reservation", h.Apply(t.Context(), target(t, c, "io.realtime: auto")), "reserved nothing")
	must(t, h.Remove(t.Context(), c.ID))
}
