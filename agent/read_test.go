package agent

import (
	"bytes"
	"context"
	"log/slog"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/feature"
	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/kernel/bpf"
	"github.com/fairlead-project/fairlead/policy"
)

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
		if m := (view{a}).Agent().Features[0]; m.Failed != 1 || m.Hangs < time.Minute {
			t.Errorf("the metrics are %+v", m)
		}
		if _, err := a.Report(t.Context(), api.Ask{Feature: "blockio"}); err == nil || !strings.Contains(err.Error(), "blockio does not answer: "+what) {
			t.Errorf("its report: %v", err)
		}
		if _, err := a.Command(t.Context(), api.Ask{Feature: "blockio"}); err == nil || !strings.Contains(err.Error(), "blockio does not answer: "+what) {
			t.Errorf("a command: %v", err)
		}
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
		if m := (view{a}).Agent().Features[0]; m.Done != 2 || m.Hangs != 0 {
			t.Errorf("the metrics afterwards are %+v", m)
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
