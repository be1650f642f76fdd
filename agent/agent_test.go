package agent

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/common/expfmt"

	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/feature"
	"github.com/fairlead-project/fairlead/feature/netcpu"
	"github.com/fairlead-project/fairlead/feature/netcpu/account"
	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/kernel"
	"github.com/fairlead-project/fairlead/kernel/journal"
	"github.com/fairlead-project/fairlead/kernel/probe"
	"github.com/fairlead-project/fairlead/metrics"
	"github.com/fairlead-project/fairlead/policy"
)

// TestInForce waits for a container from before it is there until its policy is in force, or for as long as the
// context lasts.
func TestInForce(t *testing.T) {
	r := newRig(t, 1)
	entered, goOn := make(chan struct{}, 1), make(chan struct{})
	r.apply = func(ctx context.Context, _ policy.Target) error {
		poke(entered)
		select {
		case <-goOn:
			return nil
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	r.start()
	one, held := box(1, "isolate"), make(chan error, 1)
	go func() { held <- r.agent.inForce(t.Context(), one.RuntimeID) }()
	r.set.set(true, one)
	<-entered
	short, cancel := context.WithCancel(t.Context())
	cancel()
	testkit.Is(t, "while it is being applied", r.agent.inForce(short, one.RuntimeID), context.Canceled)
	select {
	case err := <-held:
		t.Errorf("before it is in force: %v", err)
	default:
	}
	close(goOn)
	if err := <-held; err != nil || r.host.get(t, 1) != "isolated" {
		t.Errorf("%v, and %s", err, r.host.get(t, 1))
	}
	testkit.Is(t, "without the container", r.agent.inForce(short, box(2, "").RuntimeID), context.Canceled)
}

// TestHeldFirst has a container whose start is held wait for no other one.
func TestHeldFirst(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFake()
		w := newWorker(f, ordinary(), quiet(), func() {})
		w.want(targets(target(1, "isolate"), target(2, "isolate"), target(3, "isolate")), false)
		go w.settle(t.Context(), 3)
		synctest.Wait()
		steps(t, w)
		expect(t, f, "apply 3 isolate", "apply 1 isolate", "apply 2 isolate")
	})
}

func TestAgentFollowsContainersAndPolicy(t *testing.T) {
	r := newRig(t, 1, 2, 3)
	r.start()
	r.set.set(true, box(1, "isolate"), box(2, ""))
	r.untilValue(1, "isolated")

	file := filepath.Join(r.policies, "10.yaml")
	testkit.Must(t, os.WriteFile(file, []byte("match: {name: box-2}\nset: {netcpu: isolate}\n"), 0o600))
	r.untilValue(2, "isolated")
	testkit.Must(t, os.WriteFile(file, []byte("match: {name: box-2}\nset: {netcpu: isolat}\n"), 0o600))
	r.until("the broken policy is noticed", func() bool {
		st, err := r.client.Status(t.Context())
		return err == nil && !st.Policy.OK && strings.Contains(st.Policy.Error, "10.yaml:2")
	})
	r.set.set(true, box(1, "isolate"), box(2, ""), box(3, "isolate"))
	r.untilValue(3, "isolated")
	if got := r.host.get(t, 2); got != "isolated" {
		t.Errorf("a broken policy changed 2 to %q; the last good one has to stay", got)
	}

	r.set.set(true, box(2, ""), box(3, "isolate"))
	r.untilValue(1, "plain")
	testkit.Must(t, os.Remove(file))
	r.untilValue(2, "plain")

	testkit.Must(t, r.stop())
	testkit.Same(t, "after a clean stop the value of 3", "plain", r.host.get(t, 3))
	j := r.journal()
	defer j.Close()
	if left := j.Entries(); len(left) != 0 {
		t.Errorf("after a clean stop the journal has %v", left)
	}
}

func TestAgentExplains(t *testing.T) {
	r := newRig(t, 1, 2)
	c := box(1, "isolate")
	c.Name, c.Image = "evil\x1b[31m", "x"
	c.Labels["fairlead.overlay"] = "on"
	c.Interfaces = []container.Interface{{Name: "eth0", Index: 2, Kind: "veth", Host: container.HostEnd{Name: "veth1", Index: 7, NetNS: 9}}}
	r.set.set(true, c)
	r.start()
	r.untilValue(1, "isolated")
	r.until("done", func() bool { return r.state1(1) == api.StateDone })

	plan, err := r.client.Plan(t.Context(), "1")
	planned := []api.Planned{{
		Feature: "netcpu", Because: api.Setting{Key: "fairlead.netcpu", Value: "isolate"}, Kind: "test", Object: r.host.path(1), Now: "isolated", Value: "isolated",
	}}
	if diff := cmp.Diff(planned, plan); diff != "" || err != nil {
		t.Errorf("plan (-want +got):\n%s%v", diff, err)
	}
	x, err := r.client.Explain(t.Context(), "evil\x1b[31m")
	testkit.Must(t, err)
	if len(x.Changes) != 1 || x.Changes[0].When.IsZero() {
		t.Fatalf("changes %+v", x.Changes)
	}
	x.Changes[0].When = time.Time{}
	want := api.Change{
		Container: 1, Feature: "netcpu", Kind: "test", Object: r.host.path(1), Before: "plain", Wrote: "isolated", Now: "isolated",
		State: api.ChangeInForce, Because: []api.Setting{{Key: "fairlead.netcpu", Value: "isolate", From: "label"}},
	}
	testkit.Same(t, "change", want, x.Changes[0])
	if len(x.Container.Interfaces) != 1 || x.Container.Interfaces[0].Host == nil || x.Container.Interfaces[0].Host.Name != "veth1" {
		t.Errorf("interfaces %+v", x.Container.Interfaces)
	}
	states := map[string]string{}
	for _, f := range x.Container.Features {
		states[f.Feature] = f.State
	}
	testkit.Same(t, "features", map[string]string{"netcpu": api.StateDone}, states)

	r.host.set(t, 1, "somebody's")
	if x, err = r.client.Explain(t.Context(), "1"); err != nil || x.Changes[0].State != api.ChangeForeign || x.Changes[0].Now != "somebody's" {
		t.Errorf("a foreign value: %v, %+v", err, x.Changes)
	}
	r.host.set(t, 1, "plain")
	if x, err = r.client.Explain(t.Context(), "1"); err != nil || x.Changes[0].State != api.ChangeUndone {
		t.Errorf("a value that is as before: %v, %+v", err, x.Changes)
	}
	testkit.Must(t, os.Remove(r.host.path(1)))
	if x, err = r.client.Explain(t.Context(), "1"); err != nil || x.Changes[0].State != api.ChangeGone {
		t.Errorf("an object that is gone: %v, %+v", err, x.Changes)
	}
	if n := r.host.unclosed.Load(); n != 0 {
		t.Errorf("%d knobs were not closed", n)
	}
}

func TestAgentFinds(t *testing.T) {
	r := newRig(t)
	id := func(first string) string { return first + strings.Repeat("0", 64-len(first)) }
	list := []container.Container{
		{ID: 10, Name: "web", RuntimeID: id("abcd1")},
		{ID: 11, Name: "db", RuntimeID: id("abcd2")},
		{ID: 12, Name: "10", RuntimeID: id("ef01")}, // what a person means by "10"; 10 is still id:10
		{ID: 13, Name: "twin"}, {ID: 14, Name: "twin"},
		{ID: 15, Name: id("abcd1")}, // and the first one's runtime id
		{ID: 16, Name: "default/web-0/nginx", Namespace: "default", Pod: "web-0"},
		{ID: 17, Name: "default/web-1/nginx", Namespace: "default", Pod: "web-1"},
		{ID: 18, Name: "default/web-1/side", Namespace: "default", Pod: "web-1"},
		// Any user may make a cgroup, and names it as he likes.
		{ID: 20, Name: "web", Source: container.CgroupSource},
		{ID: 21, Name: "11", Source: container.CgroupSource},
		{ID: 22, Name: "scope-of-a-user-with-a-long-name", Source: container.CgroupSource},
		{ID: 23, Name: "job-of-a-user-1"}, {ID: 24, Name: "job-of-a-user-2"},
	}
	for i := range list {
		if list[i].Source == "" {
			list[i].Source = "docker"
		}
	}
	r.set.set(true, append(list, container.Container{ID: 99, Name: "gone"})...)
	r.set.set(true, list...)
	r.start()
	for _, x := range []struct {
		ref   string
		want  container.ID
		code  string
		ended bool
	}{
		{ref: "web", want: 10}, {ref: "10", want: 12}, {ref: "id:10", want: 10}, {ref: "12", want: 12}, {ref: "11", want: 11}, {ref: "id:20", want: 20}, {ref: id("abcd1"), want: 10}, {ref: "abcd2", want: 11},
		{ref: "99", want: 99, ended: true}, {ref: "id:99", want: 99, ended: true}, {ref: "id:98", code: "not_found"}, {ref: "id:web", code: "not_found"},
		{ref: "scope-of…", want: 22}, {ref: "scope-of-a-us", want: 22}, {ref: "job-of-a-user-…", code: "ambiguous"},
		{ref: "default/web-1/nginx", want: 17}, {ref: "default/web-0", want: 16}, {ref: "side", want: 18},
		{ref: "default/web-1", code: "ambiguous"}, {ref: "nginx", code: "ambiguous"}, {ref: "web-0", code: "not_found"},
		{ref: "abcd", code: "ambiguous"}, {ref: "twin", code: "ambiguous"},
		{ref: "ef0", code: "not_found"}, {ref: "gone", code: "not_found"}, {ref: "../etc", code: "not_found"},
	} {
		got, err := r.client.Explain(t.Context(), x.ref)
		var e *api.Error
		switch {
		case x.code != "" && (!errors.As(err, &e) || e.Code != x.code):
			t.Errorf("%q: %v, want an error %s", x.ref, err, x.code)
		case x.code == "" && (err != nil || got.Container.ID != api.ID(x.want) || got.Ended != x.ended):
			t.Errorf("%q: found %d, ended %v, %v; want %d", x.ref, got.Container.ID, got.Ended, err, x.want)
		}
	}

	// What changes something does not guess: "web-1" is not another's "web-10".
	for ref, want := range map[string]string{
		"scope-of-a-us": `no container "scope-of-a-us" runs here; did you mean "scope-of-a-user-with-a-long-name"?`,
		"twin":          `"twin" may be any of 2 containers: id:13 (twin, docker), id:14 (twin, docker); give the id`,
	} {
		if _, err := r.client.Restore(t.Context(), ref); err == nil || err.Error() != want {
			t.Errorf("restore %s: %v", ref, err)
		}
	}
	if done, err := r.client.Restore(t.Context(), "scope-of…"); err != nil || done.Container != 22 || done.Name != "scope-of-a-user-with-a-long-name" || done.Source != container.CgroupSource {
		t.Errorf("restore of a name that was cut: %+v, %v", done, err)
	}
}

func TestAgentRestoresAndHolds(t *testing.T) {
	r := newRig(t, 1, 2, 3)
	r.set.set(true, box(1, "isolate"), box(2, "isolate"))
	r.start()
	r.untilValue(1, "isolated")
	r.untilValue(2, "isolated")

	done, err := r.client.Restore(t.Context(), "box-1")
	if err != nil || len(done.Outcomes) != 1 || done.Outcomes[0].Result != "restored" || done.Outcomes[0].Container != 1 {
		t.Fatalf("restore: %+v, %v", done, err)
	}
	testkit.Same(t, "restored to", "plain", r.host.get(t, 1))
	// Nothing brings it back but a reload.
	r.set.set(true, box(1, "isolate"), box(2, "isolate"), box(3, "isolate"))
	r.untilValue(3, "isolated")
	if got := r.state1(1); got != api.StateHeld || r.host.get(t, 1) != "plain" {
		t.Errorf("state %q, value %q", got, r.host.get(t, 1))
	}
	if st, err := r.client.Status(t.Context()); err != nil || len(st.Held) != 1 || st.HeldAll {
		t.Errorf("status: held %v, all %v, %v", st.Held, st.HeldAll, err)
	}
	testkit.Must(t, testkit.Err(r.client.Reload(t.Context())))
	r.untilValue(1, "isolated")

	if done, err = r.client.Restore(t.Context(), ""); err != nil || len(done.Outcomes) != 3 {
		t.Fatalf("restore all: %+v, %v", done, err)
	}
	for id := container.ID(1); id <= 3; id++ {
		if got := r.host.get(t, id); got != "plain" {
			t.Errorf("after restore %d is %q", id, got)
		}
	}
}

func TestAgentWithUnavailableFeature(t *testing.T) {
	r := newRig(t, 1)
	r.set.set(true, box(1, "isolate"))
	j := r.journal()
	f := newFake()
	f.support = probe.Verdict{Level: probe.Unavailable, Why: "no such thing", Mend: "another kernel"}
	a := assemble(Config{StateDir: r.state, Log: quiet()}, r.set, policy.NewStore("", time.Now), j, r.host.opener, []feature.Feature{f}, ordinary())
	a.round()
	list, err := a.Containers(t.Context())
	if err != nil || len(list) != 1 {
		t.Fatal(list, err)
	}
	want := []api.FeatureStatus{{Feature: "netcpu", State: api.StateUnavailable, Asked: true, Error: "no such thing"}}
	testkit.Same(t, "features", want, list[0].Features)
	if calls := f.took(); len(calls) != 0 {
		t.Errorf("an unavailable feature was called: %v", calls)
	}
	if err := a.close(); err != nil || !f.closed {
		t.Errorf("close: %v, feature closed: %v", err, f.closed)
	}
}

func TestAgentClosesWhatItCannotServe(t *testing.T) {
	r := newRig(t)
	r.start()
	state := t.TempDir()
	j, err := journal.Open(state, "")
	testkit.Must(t, err)
	f := newFake()
	cfg := Config{StateDir: state, Socket: r.agent.cfg.Socket, Log: quiet()}
	a := assemble(cfg, r.set, policy.NewStore("", time.Now), j, r.host.opener, []feature.Feature{f}, ordinary())
	testkit.Fails(t, "a second agent at the same socket", a.Run(t.Context()), "another agent answers")
	if !f.closed {
		t.Error("its feature was not closed")
	}
	if j, err = journal.Open(state, ""); err != nil {
		t.Fatalf("its journal was not closed: %v", err)
	}
	j.Close()
}

// A knob that hangs in the kernel's hands, with the feature's mutex held as in life, keeps neither the
// others waiting nor the agent from stopping, nor from restoring what else that feature has in force.
func TestAgentWithHungKnob(t *testing.T) {
	r := newRig(t, 1, 2, 3, 4)
	synctest.Test(t, func(t *testing.T) {
		j := r.journal()
		good := turner{newFake(), r.host, j}
		stuck := stuckKnob{r.host.knob(2), make(chan struct{}), make(chan struct{})}
		bad := newFake()
		bad.name = "blockio"
		locked := make(chan struct{}, 1) // a mutex with waiters that count as idle
		bad.apply = func(context.Context, policy.Target) error {
			locked <- struct{}{}
			defer func() { <-locked }()
			own := journal.Owner{Feature: bad.name, Container: 1}
			return errors.Join(j.Turn(r.host.knob(4), "isolated", own), j.Turn(stuck, "isolated", own))
		}
		r.set = newFakeSet(true, box(1, "isolate"), box(3, "auto"))
		open := func(ref journal.Ref) (journal.Knob, error) {
			if ref == stuck.Ref() {
				return stuck, nil
			}
			return r.host.open(ref)
		}
		f := reporter{good, &netcpu.Accounts{Meter: lockedMeter(locked), Containers: r.set, Since: time.Now()}}
		a := assemble(Config{StateDir: r.state, Log: quiet()}, r.set, policy.NewStore("", time.Now), j, func() journal.Opener { return open }, []feature.Feature{bad, f}, ordinary())
		stop := testkit.Background(t, a.Run)
		<-stuck.began
		synctest.Wait()
		if st, err := a.Status(t.Context()); err != nil || st.Changes != 3 {
			t.Errorf("status: %+v, %v", st, err)
		}
		testkit.Same(t, "the good feature waits for the bad one", "isolated", r.host.get(t, 1))
		r.set.set(true) // the entry of the one that hangs is to be swept
		time.Sleep(time.Minute)
		r.set.set(true, box(1, "isolate"), box(3, "auto"))
		time.Sleep(time.Minute)
		testkit.Same(t, "the good feature waits for the bad one", "isolated", r.host.get(t, 1))
		began := time.Now()
		err := stop()
		if err == nil || !strings.Contains(err.Error(), "a feature does not return") || !errors.Is(err, journal.ErrStuck) {
			t.Errorf("stop: %v", err)
		}
		if took := time.Since(began); took > 2*a.pace.stop+a.pace.call {
			t.Errorf("stop took %v", took)
		}
		testkit.Same(t, "what the good feature had in force", "plain", r.host.get(t, 1))
		testkit.Same(t, "what else the bad feature had in force", "plain", r.host.get(t, 4))
		close(stuck.release)
	})
}

// lockedMeter is the meter of a feature that reads it under its mutex.
type lockedMeter chan struct{}

func (m lockedMeter) Read() (account.Reading, error) {
	m <- struct{}{}
	defer func() { <-m }()
	return account.Reading{}, nil
}

// stuckKnob is a knob at a place of its own with a Write that does not return.
type stuckKnob struct {
	journal.Knob
	began, release chan struct{}
}

func (k stuckKnob) Ref() journal.Ref { return journal.Ref{Kind: "test", Object: "stuck/2"} }

func (k stuckKnob) Write(v string) error {
	close(k.began)
	<-k.release
	return k.Knob.Write(v)
}

func TestAgentMetrics(t *testing.T) {
	r := newRig(t, 1, 2)
	r.set.set(true, box(1, "isolate"), box(2, "isolate"))
	r.start()
	r.untilValue(2, "isolated")
	own := series(r.agent)
	if own["agent_containers fake"] != 2 || own["agent_policy_last_reload_success"] != 1 || own["feature_calls_total netcpu"] == 0 {
		t.Errorf("the agent's own series %v", own)
	}
	if _, ok := (view{r.agent}).Container(1); !ok {
		t.Error("container 1 is not found")
	}
	families, err := metrics.New(view{r.agent}).Gather()
	testkit.Must(t, err)
	var text strings.Builder
	got := make(map[string][]float64)
	for _, f := range families {
		if n := f.GetName(); strings.HasPrefix(n, "fairlead_agent_") || strings.HasPrefix(n, "fairlead_feature_") || n == "fairlead_build_info" {
			testkit.Must(t, testkit.Err(expfmt.MetricFamilyToText(&text, f)))
		}
		for _, m := range f.GetMetric() {
			got[f.GetName()] = append(got[f.GetName()], m.GetGauge().GetValue())
		}
	}
	if !slices.Equal(got["fairlead_bpf_map_entries"], []float64{3, 0}) || !slices.Equal(got["fairlead_bpf_map_max_entries"], []float64{8, 9}) {
		t.Errorf("BPF maps have %v entries of %v", got["fairlead_bpf_map_entries"], got["fairlead_bpf_map_max_entries"])
	}
	want, err := os.ReadFile("testdata/series.txt")
	testkit.Must(t, err)
	names := regexp.MustCompile(`(?m)^([^#\n].*) \S+$`).ReplaceAllString(text.String(), "$1")
	testkit.Same(t, "the agent's own series", string(want), strings.ReplaceAll(names, runtime.Version(), "GOVERSION"))
	r.set.set(true, box(2, "isolate"))
	r.until("1 has gone", func() bool { _, ok := (view{r.agent}).Container(1); return !ok })
	s, err := r.client.Samples(t.Context())
	if err != nil || len(s.Features) != 1 || len(s.Features[0].Samples) == 0 {
		t.Errorf("samples %+v, %v", s, err)
	}
}

func TestAgentNeedsItsState(t *testing.T) {
	testkit.Fails(t, "New without a state directory", testkit.Err(New(Config{})), "state directory")
	dir := t.TempDir()
	j, err := journal.Open(dir, "")
	testkit.Must(t, err)
	defer j.Close()
	if _, err := New(Config{StateDir: dir, Roots: kernel.Roots{Proc: fakeProc(t)}}); !errors.Is(err, journal.ErrBusy) {
		t.Errorf("New beside another agent: %v", err)
	}
}
