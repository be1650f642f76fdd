package agent

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/discover"
	"github.com/fairlead-project/fairlead/feature"
	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/kernel"
	"github.com/fairlead-project/fairlead/kernel/bpf"
	"github.com/fairlead-project/fairlead/kernel/journal"
	"github.com/fairlead-project/fairlead/kernel/netdev"
	"github.com/fairlead-project/fairlead/policy"
)

// torn is a feature that panics where it is told to.
type torn struct {
	*fake
	snapshot, report func()
	loop             feature.Loop
}

func (f *torn) Snapshot() feature.Snapshot { f.snapshot(); return f.fake.Snapshot() }

func (f *torn) Report(context.Context, *container.Container, api.Ask) (any, error) {
	f.report()
	return api.NetCPU{}, nil
}

func (f *torn) Loops() []*feature.Loop { return []*feature.Loop{&f.loop} }

// A container in whose Apply and Remove the feature panics has that error, and is tried again ever
// more rarely, so that it never makes the feature unavailable. Others have theirs meanwhile.
func TestPanicOfOneContainer(t *testing.T) {
	var log bytes.Buffer
	c, f, bad := newClock(), newFake(), true
	tries := []time.Time{}
	fault := func(id container.ID) {
		if id == 1 && bad {
			tries = append(tries, c.Now())
			panic("at odds")
		}
	}
	f.apply = func(_ context.Context, t policy.Target) error { fault(t.Container.ID); return nil }
	f.remove = func(_ context.Context, id container.ID) error { fault(id); return nil }
	w := newWorker(f, c.pace(), slog.New(slog.NewTextHandler(&log, nil)), func() {})
	w.want(targets(target(1, "isolate"), target(2, "isolate")), true)
	for range 3600 {
		steps(t, w)
		c.Advance(time.Second)
	}
	st := w.status(1)
	if st.State != api.StateError || st.Error != "apply: panic: at odds: this is a bug of fairlead; please report it with the stack in the agent's log" || st.Next.IsZero() {
		t.Errorf("the status of 1 is %+v", st)
	}
	if st := w.status(2); st.State != api.StateDone || f.inForce()[2] != "isolate" {
		t.Errorf("the status of 2 is %+v", st)
	}
	if n := len(tries); n < 5 || n > 20 || tries[1].Sub(tries[0]) < 20*time.Second || tries[n-1].Sub(tries[n-2]) < 4*time.Minute {
		t.Errorf("tried at %v", tries)
	}
	if n := strings.Count(log.String(), "stack="); n != 1 || !strings.Contains(log.String(), "TestPanicOfOneContainer") || strings.Contains(log.String(), "not in force") {
		t.Errorf("the log has %d stacks, want one, and nothing else about it:\n%s", n, &log)
	}
	if why := w.fence.unavailable(); why != "" || w.fence.count.Load() != uint64(len(tries)) {
		t.Errorf("%q; %d panics counted of %d", why, w.fence.count.Load(), len(tries))
	}

	w.want(targets(target(2, "isolate")), true)
	steps(t, w)
	if !w.has(1) {
		t.Error("after a panic in Remove it is taken for removed")
	}
	bad = false
	c.Advance(time.Minute)
	if steps(t, w); w.has(1) || w.status(2).State != api.StateDone {
		t.Error("it is not removed once Remove works")
	}
}

// The third panic within a minute makes a feature unavailable. What is in force stays, the journal
// undoes what is of containers that end, and other features go on.
func TestPanicsOfOneFeature(t *testing.T) {
	r := newRig(t, 1, 2, 3, 4, 5)
	synctest.Test(t, func(t *testing.T) {
		good := turner{newFake(), r.host, r.journal()}
		bad := turner{newFake(), r.host, good.journal}
		good.name, bad.name = "blockio", "netcpu"
		bad.apply = func(_ context.Context, t policy.Target) error {
			if t.Container.ID > 2 {
				panic(fmt.Sprint("at odds with ", t.Container.ID))
			}
			return nil
		}
		set := newFakeSet(true, box(1, "isolate"), box(2, "isolate"))
		a := assemble(Config{StateDir: r.state, Log: quiet()}, set, policy.NewStore("", time.Now), good.journal, r.host.opener, []feature.Feature{bad, good}, ordinary())
		stop := testkit.Background(t, a.Run)
		time.Sleep(time.Minute)
		set.set(true, box(1, "isolate"), box(2, "isolate"), box(3, "isolate"), box(4, "isolate"), box(5, "isolate"))
		time.Sleep(20 * time.Second)
		synctest.Wait()

		const want = "it has panicked 3 times within a minute, the last time in apply of container 5: at odds with 5; what it has done stays"
		for id := range container.ID(5) {
			c, _ := set.Lookup(id + 1)
			st := a.statuses(a.target(c))
			if st[0].State != api.StateUnavailable || st[0].Error != want || st[1].State != api.StateDone {
				t.Errorf("the statuses of %d are %+v", id+1, st)
			}
		}
		m := series(a)
		for name, fell := range map[string]bool{"netcpu": true, "blockio": false} {
			if (m["feature_support "+name+" unavailable"] == 1) != fell || (m["feature_panics_total "+name] == 3) != fell {
				t.Errorf("the metrics are %v", m)
			}
		}
		if list := a.featureTotals(); list[0].Support.Why != want || list[0].Support.Mend == "" {
			t.Errorf("the status is %+v", list)
		}
		if list := examined(a.all, a.examine); list[0].Why != want {
			t.Errorf("doctor finds %+v", list)
		}
		testkit.Fails(t, "it is settable", a.settable(1, map[string]bool{"netcpu": true}), want)
		testkit.Same(t, "what was in force", "isolated", r.host.get(t, 1))
		bad.took()
		set.set(true, box(1, "isolate"))
		time.Sleep(20 * time.Second)
		synctest.Wait()
		if v := r.host.get(t, 2); v != "plain" || r.host.get(t, 1) != "isolated" {
			t.Errorf("of a container that has ended, %q is in force", v)
		}
		if calls := bad.took(); len(calls) > 0 {
			t.Errorf("calls: %v", calls)
		}
		testkit.Check(t, stop())
		if v := r.host.get(t, 1); v != "plain" || !bad.closed {
			t.Errorf("after the end %q is in force", v)
		}
	})
}

// A panic in a method that reads is that call's error. A loop that panics is tried again, and the
// third time the feature is unavailable.
func TestPanicBesideCalls(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		fault := func() { panic(&netdev.Panic{Value: "at odds", Stack: []byte("elsewhere")}) }
		f := &torn{fake: newFake(), snapshot: fault, report: fault, loop: feature.Loop{Name: "what it does"}}
		var log bytes.Buffer
		r := newRig(t)
		a := assemble(Config{StateDir: r.state, Log: slog.New(slog.NewTextHandler(&log, nil))}, newFakeSet(true), policy.NewStore("", time.Now), r.journal(), r.host.opener, []feature.Feature{f}, ordinary())
		defer a.close()
		for range 100 {
			if s := a.workers[0].snapshot(); s.Samples != nil {
				t.Errorf("a snapshot that panics returns %+v", s)
			}
			time.Sleep(time.Second)
		}
		for _, code := range []string{"internal", "unavailable"} {
			var e *api.Error
			if _, err := a.Report(t.Context(), api.Ask{Feature: "netcpu"}); !errors.As(err, &e) || e.Code != code {
				t.Errorf("the report: %v, want %s", err, code)
			}
		}
		if n := a.fences["netcpu"].count.Load(); n < 3 || n > 5 || a.fences["netcpu"].unavailable() != "" {
			t.Errorf("%d panics; %q", n, a.fences["netcpu"].unavailable())
		}
		if n := strings.Count(log.String(), "stack=elsewhere"); n != 1 {
			t.Errorf("the log has the stack %d times:\n%s", n, &log)
		}
		time.Sleep(10 * time.Minute)
		f.snapshot, f.report = func() {}, func() {}
		testkit.Is(t, "a report that works again", testkit.Err(a.Report(t.Context(), api.Ask{Feature: "netcpu"})), nil)

		turns := 0
		for range 60 {
			f.loop.Turn(func() { turns++; panic("in a loop") })
			time.Sleep(time.Second)
		}
		if why := a.fences["netcpu"].unavailable(); turns != mostPanics || !strings.Contains(why, "the last time in what it does: in a loop") {
			t.Errorf("%d turns; %q", turns, why)
		}
	})
}

// A source that panics runs again, later each time. The third panic in a minute ends it for good.
func TestPanicOfSource(t *testing.T) {
	elsewhere := fmt.Errorf("docker: %w", &netdev.Panic{Value: "at odds", Stack: []byte("elsewhere")})
	const fell = "it has panicked 3 times within a minute, the last time in run: at odds; what it has done stays"
	for name, tc := range map[string]struct {
		run  func() error
		at   []time.Duration // it runs
		told string          // last
	}{
		"at once":     {func() error { panic("at odds") }, []time.Duration{0, 5, 15}, fell},
		"elsewhere":   {func() error { return elsewhere }, []time.Duration{0, 5, 15}, fell},
		"each minute": {func() error { time.Sleep(61 * time.Second); panic("at odds") }, []time.Duration{0, 66, 132}, "run: panic: at odds"},
	} {
		synctest.Test(t, func(t *testing.T) {
			var log bytes.Buffer
			var at []time.Duration
			began, told := time.Now(), ""
			f := make(parts).add("docker", slog.New(slog.NewTextHandler(&log, nil)), nil)
			ctx, cancel := context.WithTimeout(t.Context(), 195*time.Second)
			defer cancel()
			err := f.keep(ctx, func(context.Context) error {
				at = append(at, time.Since(began)/time.Second)
				return tc.run()
			}, func(err error) { told = err.Error() })
			if !slices.Equal(at, tc.at) || !strings.HasPrefix(told, tc.told) || (tc.told == fell) != (err != nil) {
				t.Errorf("%s: it ran at %d s, told %q, and ended with %v", name, at, told, err)
			}
			if n := strings.Count(log.String(), "stack="); n != 1 || !strings.Contains(log.String(), "part=docker") || f.count.Load() != 3 {
				t.Errorf("%s: the log has %d stacks of %d panics:\n%s", name, n, f.count.Load(), &log)
			}
		})
	}
}

// unsound is a source that panics.
type unsound struct{}

func (unsound) Name() string { return "docker" }

func (unsound) Run(context.Context, func(discover.Report)) error { panic("at odds") }

// The list of containers goes on without a source that panics, and says why.
func TestPanicInSet(t *testing.T) {
	testkit.NeedRoot(t)
	in := make(parts)
	set := watch(Config{Sources: []discover.Source{unsound{}, discover.CgroupTree("/proc", "")}, Roots: kernel.Default(), Log: quiet()}, nil, in, nil, nil)
	stop := testkit.Background(t, set.Run)
	testkit.Await(t, "the list goes on without it", func() bool {
		s := set.Snapshot().Sources
		return s[0].Err != nil && strings.Contains(s[0].Err.Error(), "run: panic: at odds") && s[1].Listed && in["docker"].count.Load() == 1
	})
	testkit.Must(t, stop())
}

// panicking is an agent that panics in a round that a request has made, or in the journal while a
// feature uses it.
func panicking(args string) {
	where, state, _ := strings.Cut(args, " ")
	j, err := journal.Open(state, "")
	if err != nil {
		fmt.Println(err)
		os.Exit(1)
	}
	set, f := newFakeSet(true, box(1, "isolate")), newFake()
	f.apply = func(context.Context, policy.Target) error {
		if where == "journal" {
			j.Extend(func(journal.Entry) bool { panic("torn") }, time.Time{})
		}
		return nil
	}
	opener := func() journal.Opener { return nil }
	if err := j.Turn(knob{&host{dir: state}, state + "/knob"}, "ours", journal.Owner{Feature: f.name, Container: 1}); err != nil {
		fmt.Println(err)
		os.Exit(1)
	}
	a := assemble(Config{StateDir: state, Log: quiet()}, set, policy.NewStore("", time.Now), j, opener, []feature.Feature{f}, ordinary())
	if where == "round" {
		a.set = nil
		func() { // as net/http does
			defer func() { recover() }()
			a.Reload(context.Background())
		}()
	} else {
		a.Run(context.Background())
	}
	time.Sleep(time.Minute)
}

// A panic in the journal, or in the round, ends the agent, whoever would recover it. What it has put
// in force stays in the journal.
func TestPanicEnds(t *testing.T) {
	for where, frame := range map[string]string{"journal": "panicking.func1.1", "round": "agent.(*Agent).round"} {
		t.Run(where, func(t *testing.T) {
			state := t.TempDir()
			testkit.Must(t, os.WriteFile(state+"/knob", []byte("before"), 0o600))
			ctx, cancel := context.WithTimeout(t.Context(), 50*time.Second)
			defer cancel()
			cmd := exec.CommandContext(ctx, "/proc/self/exe")
			cmd.Env = append(os.Environ(), childEnv+"=panics "+where+" "+state)
			out, err := cmd.CombinedOutput()
			if cmd.ProcessState.ExitCode() != 2 || !strings.Contains(string(out), "panic: ") || !strings.Contains(string(out), frame) {
				t.Errorf("%v:\n%s", err, out)
			}
			j, err := journal.Open(state, "")
			testkit.Must(t, err)
			defer j.Close()
			if data, err := os.ReadFile(state + "/knob"); string(data) != "ours" || len(j.Entries()) != 1 {
				t.Errorf("the knob is %q, %v, and the journal has %v", data, err, j.Entries())
			}
		})
	}
}

// locked is a feature that holds in Apply what its counters need.
type locked struct {
	*fake
	lock chan struct{} // a mutex with waiters that count as idle
	read atomic.Int32  // calls that wait for it
}

func (f *locked) wait() {
	f.read.Add(1)
	f.lock <- struct{}{}
	<-f.lock
	f.read.Add(-1)
}

func (f *locked) Snapshot() feature.Snapshot { f.wait(); return f.fake.Snapshot() }
func (f *locked) Export() feature.Snapshot   { f.wait(); return feature.Snapshot{} }
func (f *locked) Maps() []bpf.Usage          { f.wait(); return nil }
func (f *locked) SelfReport(context.Context) func(container.Container, *api.SelfReports) {
	f.wait()
	return func(_ container.Container, to *api.SelfReports) { to.NetCPU = &api.SelfNetCPU{} }
}
func (f *locked) Report(context.Context, *container.Container, api.Ask) (any, error) {
	f.wait()
	return api.NetCPU{}, nil
}
func (f *locked) Command(context.Context, *container.Container, api.Ask) (any, error) {
	f.wait()
	return nil, nil
}

// While a call of a feature hangs with a mutex held that its counters need, the numbers of the
// others are available, the feature reports it, and the agent lives.
func TestAgentWithHungCall(t *testing.T) {
	r := newRig(t, 1, 2)
	synctest.Test(t, func(t *testing.T) {
		var log bytes.Buffer
		signs := atomic.Int64{}
		good := turner{newFake(), r.host, r.journal()}
		bad, release := &locked{fake: newFake(), lock: make(chan struct{}, 1)}, make(chan struct{})
		bad.name = "blockio"
		bad.apply = func(_ context.Context, target policy.Target) error {
			if target.Container.ID == 1 {
				bad.lock <- struct{}{}
				<-release
				<-bad.lock
			}
			return nil
		}
		set := newFakeSet(true, box(1, "isolate"), box(2, "isolate"))
		cfg := Config{StateDir: r.state, Log: slog.New(slog.NewTextHandler(&log, nil)), Alive: func() { signs.Add(1) }}
		a := assemble(cfg, set, policy.NewStore("", time.Now), good.journal, r.host.opener, []feature.Feature{bad, good}, ordinary())
		stop := testkit.Background(t, a.Run)
		synctest.Wait()

		number := func(list []feature.Snapshot, name string) bool {
			return slices.ContainsFunc(list, func(s feature.Snapshot) bool {
				return slices.ContainsFunc(s.Samples, func(x feature.Sample) bool { return x.Name == name })
			})
		}
		for range 100 { // of scrapers, say
			if list := (view{a}).Snapshots(); !number(list, "netcpu_test_seconds_total") || !number(list, "bpf_map_entries") {
				t.Fatal("the page lacks the numbers of the feature that works")
			}
			if got, err := a.Samples(t.Context()); err != nil || len(got.Features) != 2 || len(got.Features[0].Samples) != 0 || len(got.Features[1].Samples) == 0 {
				t.Fatalf("samples: %+v, %v", got, err)
			}
		}
		if n := bad.read.Load(); n != 4 {
			t.Errorf("%d calls wait for the mutex, want one each of Snapshot, Export, Maps and the overview's Report", n)
		}

		time.Sleep(time.Minute)
		was := signs.Load()
		time.Sleep(time.Minute)
		if n := signs.Load() - was; n < 50 {
			t.Errorf("%d signs of life in a minute", n)
		}
		const what = "apply of container 1, which was given 10s, has not returned for "
		for id, want := range map[container.ID]string{1: what, 2: "it waits: " + what} {
			c, _ := set.Lookup(id)
			if st := a.statuses(a.target(c))[0]; st.Feature != "blockio" || !strings.HasPrefix(st.Error, want) {
				t.Errorf("the status of %d is %+v", id, st)
			}
		}
		if m := series(a); m["feature_containers blockio error"] != 1 || m["feature_hangs_seconds blockio"] < 60 {
			t.Errorf("the metrics are %v", m)
		}
		testkit.Fails(t, "its report", testkit.Err(a.Report(t.Context(), api.Ask{Feature: "blockio"})), "blockio does not answer: "+what)
		testkit.Fails(t, "a command", testkit.Err(a.Command(t.Context(), api.Ask{Feature: "blockio"})), "blockio does not answer: "+what)
		if list := examined(a.all, a.examine); len(list) != 2 || !strings.HasPrefix(list[0].Why, "blockio does not answer: "+what) {
			t.Errorf("doctor finds %+v", list)
		}
		if n := strings.Count(log.String(), "a feature hangs"); n != 1 {
			t.Errorf("the log says so %d times, want once:\n%s", n, &log)
		}

		close(release)
		synctest.Wait()
		if list := (view{a}).Snapshots(); !number(list[:1], "netcpu_test_seconds_total") {
			t.Error("its numbers do not come back")
		}
		if m := series(a); m["feature_containers blockio done"] != 2 || m["feature_hangs_seconds blockio"] != 0 {
			t.Errorf("the metrics afterwards are %v", m)
		}
		testkit.Check(t, stop())
	})
}

// A loop that waits for a mutex of Apply's may take as long as it says.
func TestLoopWithABound(t *testing.T) {
	r, c, signs := newRig(t), newClock(), 0
	c.Advance(time.Since(c.Now()))
	l := &looper{fake: newFake(), loop: feature.Loop{Name: "behind calls", Bound: feature.BehindCalls}}
	cfg := Config{StateDir: r.state, Log: quiet(), Alive: func() { signs++ }}
	j := r.journal()
	defer j.Close()
	a := assemble(cfg, newFakeSet(true), policy.NewStore("", time.Now), j, r.host.opener, []feature.Feature{l}, c.pace())
	l.loop.Begin()
	for _, want := range []int{1, 2, 2} {
		a.alive()
		if signs != want {
			t.Errorf("%d signs of life after %v, want %d", signs, c.Now().Sub(l.loop.Busy()), want)
		}
		c.Advance(40 * time.Second)
	}
}
