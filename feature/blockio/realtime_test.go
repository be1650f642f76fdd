package blockio

import (
	"context"
	"errors"
	"fmt"
	"os"
	"runtime"
	"runtime/debug"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/feature"
	"github.com/fairlead-project/fairlead/feature/blockio/decide"
	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/internal/testkit/faults"
	"github.com/fairlead-project/fairlead/internal/testkit/topology"
	"github.com/fairlead-project/fairlead/kernel"
	"github.com/fairlead-project/fairlead/kernel/cgroup"
	"github.com/fairlead-project/fairlead/kernel/journal"
	"github.com/fairlead-project/fairlead/kernel/sched"
	"github.com/fairlead-project/fairlead/policy"
)

// realtimeRig is two containers in one parent group of cgroup v1.
type realtimeRig struct {
	*host
	above  testkit.CG
	a, b   container.Container
	pids   [2]int
	normal string // policy of a thread that is not real-time
}

func newRealtime(t *testing.T) *realtimeRig {
	t.Helper()
	r := &realtimeRig{host: newHost(t), above: testkit.Cgroup(t)}
	if _, err := cgroup.RT(r.above.CPU).Read(); r.above.CPU == "" || errors.Is(err, errors.ErrUnsupported) {
		testkit.Skip(t, "no real-time groups of cgroup v1")
	}
	r.a, r.pids[0] = r.group(r.above, "a")
	r.b, r.pids[1] = r.group(r.above, "b")
	r.normal = r.thread(0)
	return r
}

// thread returns how the thread of a container is scheduled.
func (r *realtimeRig) thread(i int) string {
	r.t.Helper()
	th, err := sched.FindTask("/proc", r.pids[i])
	must(r.t, err)
	return value(r.t, sched.Deadline("/proc", th))
}

// check compares the budgets of the parent group and of the two, and whether their threads are
// real-time.
func (r *realtimeRig) check(when, budgets string, first, second bool) {
	r.t.Helper()
	how := map[bool]string{true: sched.RoundRobin, false: r.normal}
	var got []string
	for _, dir := range []string{r.above.CPU, r.a.Cgroup.CPU, r.b.Cgroup.CPU} {
		got = append(got, value(r.t, cgroup.RT(dir)))
	}
	testkit.Same(r.t, when, append(strings.Fields(budgets), how[first], how[second]), append(got, r.thread(0), r.thread(1)))
}

// Containers get budgets, and their parent group the sum. Their threads are real-time, including later
// ones. Everything is restored, whichever container ends first.
func TestRealtime(t *testing.T) {
	h := newRealtime(t)
	ctx := t.Context()
	must(t, h.Apply(ctx, target(t, h.a, "io.help: realtime", "io.realtime: 20ms")))
	h.check("one", "20000 20000 0", true, false)
	must(t, h.Apply(ctx, target(t, h.b, "io.help: realtime", "io.realtime: 30ms")))
	h.check("two", "50000 20000 30000", true, true)
	must(t, h.Apply(ctx, target(t, h.a, "io.help: realtime", "io.realtime: 10ms")))
	h.check("less", "40000 10000 30000", true, true)
	testkit.Fails(t, "more than all may", h.Apply(ctx, target(t, h.a, "io.help: realtime", "io.realtime: 490ms")), "at most")
	h.check("refused", "40000 10000 30000", true, true)
	attr := &unix.SchedAttr{Size: unix.SizeofSchedAttr, Policy: unix.SCHED_NORMAL}
	_, err := fmt.Sscanf(h.normal, "normal %d", &attr.Nice)
	must(t, errors.Join(err, unix.SchedSetAttr(h.pids[1], attr, 0)))
	_, err = h.Decide(nil, true)
	must(t, err)
	h.check("a thread that is not real-time", "40000 10000 30000", true, true)

	// Another agent continues from what it finds, before it knows all containers.
	must(t, h.Close())
	h.open()
	must(t, h.Apply(ctx, target(t, h.a, "io.help: realtime", "io.realtime: 10ms")))
	h.check("after a restart", "40000 10000 30000", true, true)
	must(t, h.Prune(ctx, func(id container.ID) bool { return id == h.a.ID }))
	h.check("b has ended meanwhile", "10000 10000 0", true, false)
	must(t, h.Apply(ctx, target(t, h.b, "io.help: realtime", "io.realtime: 5ms")))
	must(t, h.Remove(ctx, h.a.ID))
	h.check("removed", "5000 0 5000", false, true)
	must(t, h.Apply(ctx, target(t, h.b, "netcpu: observe")))
	h.check("not asked for", "0 0 0", false, false)
	testkit.None(t, "left in the journal", h.journal.Entries())
}

// Turns continue after a panic.
func TestTurnsAgain(t *testing.T) {
	var made atomic.Int64
	var in feature.Loop
	in.Contain(func(turn func()) {
		if made.Add(1) > 2 { // the panic, and a turn while the loop rests
			turn()
		}
	})
	r := &turning{dir: t.TempDir(), on: turnPeriod, stop: make(chan struct{}), done: make(chan struct{})}
	go r.run(&in)
	testkit.Await(t, "there were three turns", func() bool { return made.Load() > 2 })
	r.end()
}

// childEnv makes this test binary another program: "agent STATE DEADLINE V2 CPU IO" is an agent that
// gives a container real time until it is killed, "threads N" has N threads.
const childEnv = "FAIRLEAD_TEST_CHILD"

func child(role string) {
	args := strings.Split(role, " ")
	err := errors.Join(fmt.Errorf("no role %q", role), unix.Prctl(unix.PR_SET_PDEATHSIG, uintptr(unix.SIGKILL), 0, 0, 0))
	switch {
	case args[0] == "agent" && len(args) == 6:
		err = childAgent(args[1], args[2] == "true", container.Cgroup{V2: args[3], CPU: args[4], IO: args[5]})
	case args[0] == "threads" && len(args) == 2:
		err = childThreads(args[1])
	}
	fmt.Println(err)
	os.Exit(1)
}

func childAgent(state string, deadline bool, cg container.Cgroup) error {
	j, err := journal.Open(state, "")
	if err != nil {
		return err
	}
	id, err := cgroup.ID(cg.V2)
	if err != nil {
		return err
	}
	c := container.Container{ID: container.ID(id), Cgroup: cg}
	f, err := New(Config{Host: feature.Host{Roots: kernel.Default(), Journal: j, Containers: topology.Containers{c}}, Deadline: deadline})
	if err != nil {
		return err
	}
	t := policy.Target{Container: c, Settings: policy.Settings{IOHelp: policy.HelpRealtime, Realtime: killedBudget}}
	for said := false; ; said = true {
		if err := f.Apply(context.Background(), t); err != nil && !errors.Is(err, feature.ErrPartly) {
			return err
		}
		if !said {
			fmt.Println("go")
		}
		if _, err := f.Decide(nil, true); err != nil {
			return err
		}
		time.Sleep(10 * time.Millisecond)
	}
}

func childThreads(count string) error {
	n, err := strconv.Atoi(count)
	if err != nil {
		return err
	}
	debug.SetMaxThreads(2*n + 1000)
	started := make(chan struct{})
	for range n {
		go func() {
			runtime.LockOSThread()
			started <- struct{}{}
			for {
				unix.Pause() // the runtime's signals end it early
			}
		}()
	}
	for range n {
		<-started
	}
	fmt.Println("go")
	for {
		unix.Pause()
	}
}

// killedBudget is the budget per second of each CPU.
const killedBudget = 20 * time.Millisecond

// A killed agent leaves real-time threads that the kernel bounds. The journal alone makes them ordinary
// again.
func TestRealtimeKilled(t *testing.T) {
	testkit.InFull(t)
	testkit.NeedRoot(t)
	for _, deadline := range []bool{true, false} {
		way := map[bool]string{true: "deadline", false: "groups"}[deadline]
		t.Run(way, func(t *testing.T) {
			cg := testkit.Cgroup(t)
			if cg.V2 == "" || cg.CPU == "" || cg.IO == "" {
				testkit.Skip(t, "no cgroup v2 tree, or no controller of CPUs or of block I/O")
			}
			if _, err := cgroup.RT(cg.CPU).Read(); !deadline && errors.Is(err, errors.ErrUnsupported) {
				testkit.Skip(t, "no real-time groups of cgroup v1")
			}
			spin := cg.Spinner(t)
			policyOf := func() uint32 {
				t.Helper()
				attr, err := unix.SchedGetAttr(spin.Pid, 0)
				must(t, err)
				return attr.Policy
			}
			state := t.TempDir()
			_, kill := testkit.Again(t, fmt.Sprintf("%s=agent %s %v %s %s %s", childEnv, state, deadline, cg.V2, cg.CPU, cg.IO))
			kill()
			want := uint32(unix.SCHED_RR)
			if deadline {
				want = unix.SCHED_DEADLINE
			}
			testkit.Same(t, "policy", want, policyOf())
			ran, err := sched.Ran("/proc", spin.Pid)
			must(t, err)
			began := time.Now()
			time.Sleep(2 * time.Second)
			now, err := sched.Ran("/proc", spin.Pid)
			must(t, err)
			// The budget of one more second may be left on each CPU, and the kernel may notice its end a tick
			// late.
			most := time.Duration(runtime.NumCPU()) * (killedBudget*time.Duration(2+time.Since(began)/time.Second) + 100*time.Millisecond)
			if now-ran > most {
				t.Errorf("without an agent the thread ran for %s of %s, more than %s", now-ran, time.Since(began), most)
			}

			j := testkit.JournalIn(t, state, journal.Open)
			_, err = j.Restore(kernel.Opener(kernel.Default()), nil)
			must(t, err)
			if got := policyOf(); got != unix.SCHED_NORMAL || len(j.Entries()) != 0 {
				t.Errorf("after restore: policy %d, %+v", got, j.Entries())
			}
		})
	}
}

// A container with many threads gets its budget for some of them, and costs the agent no more than
// those.
func TestManyThreads(t *testing.T) {
	n := testkit.Scale(t, 1500, 10_000)
	h := newHost(t)
	h.cfg.Deadline = true
	c, cg := h.container("many")
	must(t, h.Apply(t.Context(), target(t, c, "io.help: realtime", "io.realtime: 20ms")))
	pid, kill := testkit.Again(t, fmt.Sprintf("%s=threads %d", childEnv, n))
	cg.Add(t, pid)
	_, err := h.Decide(nil, true)
	must(t, err)
	got := h.realtimes()
	if len(got) != 1 || got[0].Promoted != decide.MaxDeadlines || got[0].Others != maxPromoted-decide.MaxDeadlines || len(h.journal.Entries()) != decide.MaxDeadlines+1 { // and its weight
		t.Errorf("%+v, and %d in the journal", got, len(h.journal.Entries()))
	}
	kill()
	_, err = h.Decide(nil, true)
	must(t, err)
	if got := h.realtimes(); len(h.journal.Entries()) != 1 || got[0].Promoted+got[0].Others != 0 {
		t.Errorf("once they have ended: %+v, %+v", got, h.journal.Entries())
	}
	h.apply(target(t, c, "io.help: realtime", "io.realtime: 20ms"))
}

func subject(s topology.Spec, j *journal.Journal) (feature.Feature, error) {
	return New(Config{Host: feature.Host{Roots: kernel.Default(), Journal: j, Containers: topology.Running(s.Targets)}, Deadline: true})
}

// Each system call fails once.
func TestFaults(t *testing.T) {
	testkit.Later(t)
	cg := testkit.Cgroup(t)
	if cg.V2 == "" || cg.IO == "" || cg.CPU == "" {
		testkit.Skip(t, "no cgroup v2 tree, or no controller of CPUs or of block I/O")
	}
	id, err := cgroup.ID(cg.V2)
	must(t, err)
	// A thread that sleeps while it enters or leaves SCHED_DEADLINE costs Linux 6.18 its bandwidth, until
	// the scheduler's domains are rebuilt.
	cg.Spinner(t)
	c := container.Container{ID: container.ID(id), Name: "task", Cgroup: container.Cgroup{V2: cg.V2, CPU: cg.CPU, IO: cg.IO}}
	due := policy.Settings{IOHelp: policy.HelpRealtime, Realtime: killedBudget, IOYield: "auto"}
	spec := topology.Spec{Dir: t.TempDir(), Targets: []policy.Target{{Container: c, Settings: due}}}
	faults.Sweep(t, spec.Rig(t, nil),
		faults.Case{Op: "apply 0", Undo: []string{"remove 0"}},
		faults.Case{Op: "remove 0", From: []string{"apply 0", "decide"}},
		faults.Case{Op: "decide", From: []string{"apply 0"}, Undo: []string{"remove 0"}, Later: "decide"},
		faults.Case{Op: "keep", From: []string{"apply 0"}, Undo: []string{"remove 0"}},
		faults.Case{Op: "measure", From: []string{"apply 0"}, Undo: []string{"remove 0"}, Reads: true},
	)
}

// Without real-time groups, a deadline bounds each thread of a container. The kernel keeps enforcing it
// after the agent. A later agent restores threads that it does not know.
func TestDeadlines(t *testing.T) {
	testkit.InFull(t)
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
	must(t, h.Apply(ctx, target(t, c, "io.help: realtime", "io.realtime: 20ms")))
	held("a thread that spins", a, true)
	if got := h.realtimes(); len(got) != 1 || got[0].Way != "deadline" || got[0].Promoted != 1 || got[0].Own != 0 {
		t.Errorf("the report is %+v", got)
	}
	b := start(0)
	_, err := h.Decide(nil, true)
	must(t, err)
	held("a new thread", b, true)

	// A thread that is real-time without us is counted, and left alone.
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
	if !errors.Is(err, unix.EPERM) { // a real-time group without runtime, where no container can be real-time
		must(t, err)
		_, err = h.Decide(nil, true)
		must(t, err)
		if got := h.realtimes(); len(got) != 1 || got[0].Own != 1 || !strings.HasPrefix(policyOf(sleeper.Pid), "policy 1,") {
			t.Errorf("the report is %+v, the thread %q", got, policyOf(sleeper.Pid))
		}
	}
	must(t, sleeper.Kill())
	sleeper.Wait()

	must(t, h.Close()) // the agent dies; the kernel continues
	held("without an agent", a, true)
	h.open()
	h.cfg.Deadline = true
	must(t, h.Apply(ctx, target(t, c, "io.help: realtime", "io.realtime: 10ms")))
	held("another agent", a, true)
	must(t, h.Apply(ctx, target(t, c, "netcpu: observe")))
	if x, y := policyOf(a), policyOf(b); x != "normal 5" || y != "normal 0" {
		t.Errorf("not asked for: %q and %q", x, y)
	}
	must(t, h.Apply(ctx, target(t, c, "io.help: realtime", "io.realtime: 10ms")))
	must(t, h.Close())
	out, err := h.journal.Restore(kernel.Opener(kernel.Default()), nil) // as `fairlead restore` does
	must(t, err)
	if got := policyOf(a); len(out) != 3 || got != "normal 5" { // and its weight
		t.Errorf("restore: %q, %+v", got, out)
	}
}

// The profile decides the budget. Without a profile the refusal says how to make one. The profile
// outlives the feature.
func TestAutoRealtime(t *testing.T) {
	h := newHost(t)
	h.cfg.Deadline = true
	c, _ := h.container("db")
	disk := h.disk(10_000)
	settings := []string{"io.help: realtime", "io.realtime: auto", "io.reserve: " + disk.Path + " riops=1000"}
	testkit.Fails(t, "without a profile", h.Apply(t.Context(), target(t, c, settings...)), "--realtime")
	_, err := h.Command(t.Context(), nil, api.Ask{Body: api.CapacityRequest{Device: disk.Path, BlockIOFigures: api.BlockIOFigures{ReadIOPS: 10_000, WriteIOPS: 10_000},
		Realtime: []api.RealtimePoint{{Budget: 0.2, ReadIOPS: 8000}, {Budget: 0.1, ReadIOPS: 4000}}}})
	must(t, err)
	h.capacity(disk.Path, 9_000) // a new capacity keeps the profile
	must(t, h.Close())
	h.open()
	h.cfg.Deadline = true
	must(t, h.Apply(t.Context(), target(t, c, settings...)))
	if got := h.report().Realtime; len(got) != 1 || got[0].Budget != 0.025 || !got[0].Auto || h.mayHelp(h.managed[c.ID]).Budget != 25*time.Millisecond {
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
	must(t, h.Apply(t.Context(), target(t, other, "io.help: realtime", "io.realtime: 300ms")))
	profile(0.4) // more than is available
	if got := h.report().Realtime; len(got) != 2 || got[0].Budget != 0.05 {
		t.Errorf("by a profile that asks for too much the budget is %+v", got)
	}
	must(t, h.Remove(t.Context(), other.ID))
	testkit.Fails(t, "without a reservation", h.Apply(t.Context(), target(t, c, "io.realtime: auto")), "reserved nothing")
	must(t, h.Remove(t.Context(), c.ID))
}
