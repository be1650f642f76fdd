package agent

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/discover"
	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/kernel"
	"github.com/fairlead-project/fairlead/kernel/cgroup"
	"github.com/fairlead-project/fairlead/kernel/journal"
	"github.com/fairlead-project/fairlead/policy"
)

// engine is a source that gives one list, or hangs.
type engine struct {
	list  []discover.Record
	hangs bool
}

func (r engine) Name() string { return "docker" }

func (r engine) Run(ctx context.Context, publish func(discover.Report)) error {
	if !r.hangs {
		publish(discover.Report{Records: r.list})
	}
	<-ctx.Done()
	return nil
}

// TestAgentBesideSilentRuntime starts an agent while the runtime does not answer, and only the file
// of an earlier agent has the container: it is in the host's network, and nothing is in force for
// it.
func TestAgentBesideSilentRuntime(t *testing.T) {
	cg, ns := testkit.Cgroup(t), testkit.NetNS(t)
	pid := ns.Start(t, "sleep", "1000").Process.Pid
	cg.Add(t, pid)
	n, err := cgroup.ID(cg.V2)
	testkit.Must(t, err)
	id := container.ID(n)
	r := newRig(t, id)
	source := engine{list: []discover.Record{{PID: pid, Name: "web", RuntimeID: strings.Repeat("ab", 32), Labels: map[string]string{"fairlead.netcpu": "isolate"}}}}
	r.real = func(cfg Config) containers {
		return discover.NewSet(discover.Config{NetNS: ns.Path, Known: loadKnown(cfg)}, source)
	}
	r.start()
	r.untilValue(id, "isolated")
	testkit.Must(t, r.stop())
	if got := r.host.get(t, id); got != "plain" {
		t.Fatalf("after the agent's end it is %q", got)
	}
	source.hangs = true
	r.start()
	r.untilValue(id, "isolated")
	if st, err := r.client.Status(t.Context()); err != nil || st.Complete || !st.Sources[0].Partial {
		t.Errorf("status %+v, %v", st, err)
	}
}

func TestKnownFile(t *testing.T) {
	var log bytes.Buffer
	cfg := Config{StateDir: t.TempDir(), Roots: kernel.Default(), Log: slog.New(slog.NewTextHandler(&log, nil))}
	if got := loadKnown(cfg); got != nil || log.Len() != 0 {
		t.Errorf("without a file: %+v; %s", got, log.String())
	}
	want := &discover.Known{Records: map[string][]discover.Record{"docker": {{PID: 7, Start: 8, Name: "a", Labels: map[string]string{"b": "c"}}}}}
	a := &Agent{cfg: cfg, log: cfg.Log}
	a.remember(want)
	testkit.Same(t, "read again", want, loadKnown(cfg))
	path := filepath.Join(cfg.StateDir, knownName)
	data, err := os.ReadFile(path)
	testkit.Must(t, err)
	other := bytes.Replace(data, []byte(`{"boot":"`), []byte(`{"boot":"x`), 1)
	for _, content := range [][]byte{other, []byte(`{"boot":`), nil} {
		testkit.Must(t, os.WriteFile(path, content, 0o600))
		if got := loadKnown(cfg); got != nil {
			t.Errorf("of %.20q: %+v", content, got)
		}
	}
	// The largest are left out first.
	big := &discover.Known{Records: map[string][]discover.Record{}}
	for i := range 10 {
		big.Records["docker"] = append(big.Records["docker"], discover.Record{Name: fmt.Sprint(i), Image: strings.Repeat("x", 1000-100*i)})
	}
	got := within(big, 1024+1500).Records["docker"]
	if len(got) != 4 || got[0].Name != "9" || got[3].Name != "6" {
		t.Errorf("kept %d: %+v", len(got), got)
	}
}

// What a source lacks is logged once.
func TestAgentSays(t *testing.T) {
	var log bytes.Buffer
	a := &Agent{log: slog.New(slog.NewTextHandler(&log, nil)), said: make(map[string]string)}
	refused := errors.New("connection refused")
	for _, err := range []error{nil, refused, refused, nil, nil} {
		a.say([]discover.SourceStatus{{Name: "docker", Err: err}})
	}
	if got := strings.Count(log.String(), "source=docker"); got != 2 || !strings.Contains(log.String(), "connection refused") || !strings.Contains(log.String(), "again") {
		t.Errorf("the log says %s", log.String())
	}
}

func FuzzKnownFile(f *testing.F) {
	f.Add([]byte(`{"records":{"docker":[{"PID":7,"Start":8,"Name":"a","RuntimeID":"b","Labels":{"c":"d"}}]}}`))
	f.Add([]byte(`{"records":{"docker":[{"PID":-1,"Labels":null}],"":null}}`))
	f.Add([]byte("{"))
	f.Fuzz(func(t *testing.T, data []byte) {
		cfg := Config{StateDir: t.TempDir(), Roots: kernel.Default(), Log: quiet()}
		boot, err := journal.BootID(cfg.Roots.Proc)
		testkit.Must(t, err)
		data = bytes.Replace(data, []byte("{"), []byte(`{"boot":"`+boot+`",`), 1)
		testkit.Must(t, os.WriteFile(cfg.file(knownName, maxKnown).Path, data, 0o600))
		discover.NewSet(discover.Config{Known: loadKnown(cfg)}, engine{})
	})
}

// TestKnownPods has pods that leave no room for records.
func TestKnownPods(t *testing.T) {
	known := &discover.Known{
		Records: map[string][]discover.Record{"cri-o": {{PID: 1, Name: "a"}}},
		Pods:    map[string][]discover.Pod{"kubelet": {{Name: "web-0", Requests: map[string]map[string]uint64{"httpd": {"egress-mbit": 5}}}}},
	}
	testkit.Same(t, "known", known, within(known, 64<<10))
	known.Pods["api-server"] = []discover.Pod{{Name: "web-0", Annotations: map[string]string{"x": strings.Repeat("x", 40<<10)}}}
	if got := within(known, 64<<10); got.Pods != nil || len(got.Records["cri-o"]) != 1 {
		t.Errorf("%d pods, %d records", len(got.Pods), len(got.Records["cri-o"]))
	}
}

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
	testkit.Same(t, "1", "isolated", r.host.get(t, 1))
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
	testkit.Must(t, testkit.Err(r.client.Restore(t.Context(), "1")))
	r.untilValue(1, "plain")
}

func (a *Agent) roundsMade() uint64 {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.rounds.made
}

// The last good policy outlives the agent: one that starts with broken files goes on
// with it. One that has none says so.
func TestAgentStartsWithBrokenPolicy(t *testing.T) {
	r := newRig(t, 1)
	file := filepath.Join(r.policies, "10.yaml")
	write := func(text string) {
		t.Helper()
		testkit.Must(t, os.WriteFile(file, []byte(text), 0o600))
	}
	status := func() api.PolicyStatus {
		t.Helper()
		st, err := r.client.Status(t.Context())
		testkit.Must(t, err)
		return st.Policy
	}
	write("match: {name: box-1}\nset: {netcpu: isolate}\n")
	r.start()
	r.set.set(true, box(1, ""))
	r.untilValue(1, "isolated")
	was := status()
	testkit.Must(t, r.stop())
	if got := r.host.get(t, 1); got != "plain" {
		t.Errorf("without an agent it is %q", got)
	}

	write("match: {name: box-1}\nset: {netcpu: isolat}\n")
	r.start()
	r.untilValue(1, "isolated")
	if st := status(); st.OK || !strings.Contains(st.Error, "10.yaml:2") || !st.Loaded.Equal(was.Loaded) || len(st.Files) != 1 {
		t.Errorf("with broken files: %+v", st)
	}
	testkit.Must(t, r.stop())

	for _, content := range []string{"", "{", `{"dir":"/elsewhere","when":"2026-01-01T00:00:00Z"}`} {
		if content == "" {
			testkit.Must(t, os.Remove(filepath.Join(r.state, lastGoodFile)))
		} else if err := os.WriteFile(filepath.Join(r.state, lastGoodFile), []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
		r.start()
		r.until("it is looked at", func() bool { return r.state1(1) == api.StateDone })
		if st := status(); st.OK || !st.Loaded.IsZero() || r.host.get(t, 1) != "plain" {
			t.Errorf("without a last good policy (%q): %+v, the value is %q", content, st, r.host.get(t, 1))
		}
		testkit.Must(t, r.stop())
	}
}

func FuzzLastGood(f *testing.F) {
	f.Add([]byte(`{"dir":"/d","when":"2026-01-01T00:00:00Z","files":[{"name":"/d/a.yaml","text":"match: {name: x}\nset: {netcpu: auto}"}]}`))
	f.Add([]byte(`{"dir":"/d","when":"2026-01-01T00:00:00Z","files":[null,{"name":"\u001b","text":"labels: deny"}]}`))
	f.Add([]byte("{"))
	f.Fuzz(func(t *testing.T, data []byte) {
		file := Config{StateDir: t.TempDir()}.lastGood()
		testkit.Must(t, os.WriteFile(file.Path, data, 0o600))
		var kept policy.Kept
		if _, err := file.Read(&kept); err != nil {
			return
		}
		store := policy.NewStore("/d", time.Now)
		if store.Recall(kept) == nil {
			store.Resolve([]container.Container{box(1, "")})
		}
	})
}
