package blockio

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"strconv"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/feature/blockio/decide"
	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/kernel"
	"github.com/fairlead-project/fairlead/kernel/cgroup"
	"github.com/fairlead-project/fairlead/policy"
)

// One label is enough. A container that reserves more than any disk can do, beside burners without
// policy, gets help step by step. Its neighbours keep their settings, and everything is restored, by
// the end of the burners and by the journal alone.
func TestOneKey(t *testing.T) {
	h := newHost(t)
	l := h.disk(100_000_000)
	db, dbCG := h.container("db")
	_, batchCG := h.container("batch")
	realtime := !errors.Is(func() error { _, err := cgroup.RT(dbCG.CPU).Read(); return err }(), errors.ErrUnsupported)
	must(t, weightOf(dbCG).Write("321"))
	leave := target(t, db, "io.reserve: "+l.Path+" riops=50000000")
	h.apply(leave)
	run(t, dbCG, "disk", "--to", l.Path, "--size", "4096", "--conns", "16")
	var burners []*os.Process
	var first unix.CPUSet
	first.Set(0) // where the load is: the scheduler may leave it to the host and them the others
	for range 3 {
		b := batchCG.Spinner(t)
		must(t, unix.SchedSetaffinity(b.Pid, &first))
		burners = append(burners, b)
	}
	weight := func(cg testkit.CG) string { return value(t, weightOf(cg)) }
	own := weight(batchCG)
	_, most := cgroup.WeightKnob(dbCG.CPU, dbCG.CPU == dbCG.V2)
	decided := h.untilDecided("help", leave, func(t policy.Target) bool { return t.Settings.IOHelp != "" })
	if w := weight(dbCG); w != strconv.FormatUint(most.Most, 10) || weight(batchCG) != own {
		t.Errorf("weights %s and %s", w, weight(batchCG))
	}
	if realtime { // nothing can meet it
		decided = h.untilDecided("turns", leave, func(t policy.Target) bool { return t.Settings.IOHelp == policy.HelpTurns })
		h.untilDecided("a promotion", leave, func(policy.Target) bool {
			all := h.realtimes()
			return len(all) == 1 && all[0].Promoted > 0
		})
	}
	h.untilDecided("a row", leave, func(policy.Target) bool {
		r := h.reserved(db.ID)
		return r.State == decide.StateContended && r.Action != "" && r.Mend != ""
	})
	if !slices.ContainsFunc(decided.Origins, func(o policy.Origin) bool { return o.Key == helpKey && o.Reason != "" }) {
		t.Errorf("origins %+v", decided.Origins)
	}
	for _, b := range burners {
		must(t, b.Signal(unix.SIGSTOP))
	}
	released := func(when string) {
		t.Helper()
		budget := "0"
		if realtime {
			budget = value(t, cgroup.RT(dbCG.CPU))
		}
		if w := weight(dbCG); w != "321" || budget != "0" || len(h.journal.Entries()) != 0 {
			t.Errorf("%s: weight %s, budget %s, %+v", when, w, budget, h.journal.Entries())
		}
		tids, err := cgroup.Threads(dbCG.V2, maxPromoted)
		must(t, err)
		for _, tid := range tids {
			a, err := unix.SchedGetAttr(tid, 0)
			if err == nil && (a.Policy != unix.SCHED_NORMAL || a.Runtime == 100001) {
				t.Errorf("%s: thread %d is %+v", when, tid, a)
			}
		}
	}
	h.untilDecided("an end", leave, func(t policy.Target) bool {
		if t.Settings.IOHelp == "" {
			return true
		}
		past := time.Now().Add(-time.Minute) // as of then; TestHelpEnds checks the times
		h.control.AdoptHelp(db.ID, t.Settings.IOHelp, "", past, past)
		return false
	})
	released("after the burners have stopped")

	// The journal alone restores it.
	h.apply(target(t, db, "io.reserve: "+l.Path+" riops=50000000", "io.help: weight"))
	if w := weight(dbCG); w == "321" {
		t.Error("io.help=weight changes nothing")
	}
	_, err := h.journal.Restore(kernel.Opener(kernel.Default()), nil)
	must(t, err)
	released("after restore")
}

// Details are measured for short times while a reservation is met, always while it is missed and its
// container stalls, and no longer once it is met again. Reports show the last details.
func TestDetails(t *testing.T) {
	h := newHost(t)
	l := h.disk(100_000_000)
	db, dbCG := h.container("db")
	_, batchCG := h.container("batch")
	reserve := func(riops string) policy.Target {
		leave := target(t, db, "io.reserve: "+l.Path+" riops="+riops)
		h.apply(leave)
		return leave
	}
	row := func() api.BlockIORow { return h.reserved(db.ID) }
	met := reserve("1")
	run(t, dbCG, "disk", "--to", l.Path, "--size", "4096", "--conns", "16")
	h.untilDecided("a glance at what it waits for", met, func(policy.Target) bool {
		return row().State == decide.StateMet && row().Voluntary > 0
	})
	h.untilDecided("the last details in a window without", met, func(policy.Target) bool {
		r := row()
		return !h.window.Detailed && r.State == decide.StateMet && r.Voluntary > 0 && r.DeviceP99 > 0 && r.Achieved.ReadIOPS > 0
	})
	var burners []*os.Process
	for range 3 {
		burners = append(burners, batchCG.Spinner(t))
	}
	missed := reserve("50000000")
	h.untilDecided("details while it is missed", missed, func(policy.Target) bool { return h.meter.Detailed() && row().State == decide.StateContended })
	for _, b := range burners {
		must(t, b.Kill())
	}
	met = reserve("1")
	h.untilDecided("no details while it is met", met, func(policy.Target) bool { return !h.meter.Detailed() && row().State == decide.StateMet })
}

// If one window decides real time for two containers, the second gets its whole budget or none: with a
// part it would wait for the rest of each second. What policy asks for may be granted in part.
func TestApportion(t *testing.T) {
	const want = 300 * time.Millisecond
	f := &BlockIO{cfg: Config{Deadline: true}, managed: map[container.ID]*managed{1: {}, 2: {}}}
	f.tried.at = time.Now()
	for _, m := range f.managed {
		m.helpWant = want
	}
	turns, half := policy.HelpTurns, decide.MaxRealtime/2
	for _, x := range []struct {
		first, second policy.Help
		want          []time.Duration
	}{
		{policy.HelpRealtime, policy.HelpRealtime, []time.Duration{want, 0}},
		{turns, turns, []time.Duration{half, half}},
		{"", "", []time.Duration{half, half}},
		{turns, policy.HelpRealtime, []time.Duration{decide.MaxRealtime - want, want}},
	} {
		f.actions = map[container.ID]decide.Action{1: {Help: x.first}, 2: {Help: x.second}}
		f.apportion()
		testkit.Same(t, fmt.Sprintf("budgets with help %q and %q", x.first, x.second), x.want, []time.Duration{f.managed[1].budget, f.managed[2].budget})
	}
}
