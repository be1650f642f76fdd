package agent

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/discover"
	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/kernel"
	"github.com/fairlead-project/fairlead/kernel/probe"
)

// A doctor without an agent says of a feature what an agent would: none depends on an agent that runs.
func TestExamine(t *testing.T) {
	testkit.NeedRoot(t)
	seen := 0
	for _, f := range Examine(t.Context(), Config{StateDir: t.TempDir()}) {
		if f.Area != probe.Features {
			continue
		}
		seen++
		if f.Level == api.LevelUnavailable {
			t.Errorf("%s: %s", f.Capability, f.Why)
		}
	}
	if seen < 5 {
		t.Errorf("%d features are examined", seen)
	}
}

// A policy that matches nothing is a finding with its place.
func TestUnmatched(t *testing.T) {
	if r := Unmatched(api.PolicyStatus{}); len(r) != 0 {
		t.Errorf("without one: %v", r)
	}
	r := Unmatched(api.PolicyStatus{Idle: []api.Idle{{File: "/etc/fairlead/policy.d/10-web.yaml", Line: 3, Since: time.Now()}}})
	if len(r) != 1 || r[0].Capability != "10-web.yaml:3" || r[0].Level != api.LevelDegraded || !strings.Contains(r[0].Why, "matched no container since 20") || !strings.Contains(r[0].Mend, "policy.d/10-web.yaml") {
		t.Errorf("with one: %+v", r)
	}
}

// TestWireReport checks the JSON form of a report, which clients parse.
func TestWireReport(t *testing.T) {
	got, err := json.Marshal(wireReport(probe.Report{
		{Capability: "root", Area: "host", Verdict: probe.Verdict{Level: probe.Full}},
		{Capability: "cgroup-layout", Area: "cgroup", Verdict: probe.Verdict{Level: probe.Full}, Detail: "hybrid"},
		{Capability: "kthread-throttling", Area: "sched", Verdict: probe.Verdict{Level: probe.Degraded, Why: "charged only", Mend: "weights"}, Detail: "seen"},
		{Capability: "btf", Area: "bpf", Verdict: probe.Verdict{Level: probe.Unavailable, Why: "it did not answer in time", Mend: "try again when the host is less busy"}},
	}))
	testkit.Must(t, err)
	const want = `[{"capability":"root","area":"host","level":"full"},` +
		`{"capability":"cgroup-layout","area":"cgroup","level":"full","detail":"hybrid"},` +
		`{"capability":"kthread-throttling","area":"sched","level":"degraded","why":"charged only","mend":"weights","detail":"seen"},` +
		`{"capability":"btf","area":"bpf","level":"unavailable","why":"it did not answer in time","mend":"try again when the host is less busy"}]`
	testkit.Same(t, "report", want, string(got))
}

// TestUnexplained has containers of engines that no runtime reports.
func TestUnexplained(t *testing.T) {
	now := time.Now()
	in := func(id int, source, dir string, age time.Duration) container.Container {
		return container.Container{ID: container.ID(id), Source: source, Started: now.Add(-age), Cgroup: container.Cgroup{V2: fmt.Sprintf("/sys/fs/cgroup"+dir, id)}}
	}
	const user = "/user.slice/user-1000.slice/user@1000.service/user.slice/"
	list := []container.Container{
		in(1, "docker", "/system.slice/docker-%064x.scope", time.Hour),
		in(2, "cgroup", "/machine.slice/libpod-%064x.scope", time.Hour),
		in(3, "cgroup", "/machine.slice/libpod-%064x.scope", time.Second), // about to be reported
		in(4, "cgroup", user+"docker-%064x.scope", time.Hour),
		in(5, "cgroup", user+"docker-%064x.scope", time.Hour),
		in(6, "cgroup", "/x/crio-%064x", time.Hour),
		in(7, "cgroup", "/system.slice/run-%d.scope", time.Hour),
	}
	found := unexplained(list, now)
	want := map[discover.Engine]int{{Name: "podman"}: 1, {Name: "docker", User: 1000}: 2, {Name: "cri-o"}: 1}
	if diff := cmp.Diff(want, found); diff != "" {
		t.Fatalf("engines (-want +got):\n%s", diff)
	}
	r := newRig(t)
	for i := range list {
		list[i].Name = fmt.Sprint(i)
	}
	r.set.says(false, list...)
	r.set.snap.Sources = []discover.SourceStatus{{Name: "docker", Listed: true}, {Name: "podman", Listed: true, Partial: true, Absent: true}, {Name: "cri-o", Listed: true, Partial: true, Absent: true}, {Name: container.CgroupSource, Listed: true}}
	r.start()
	st, err := r.client.Status(t.Context())
	testkit.Must(t, err)
	for i, says := range [][]string{
		{"2 containers of the rootless Docker of user 1000", "--docker-host=unix:///run/user/1000/docker.sock"},
		{"1 container of Podman", "systemctl enable --now podman.socket"},
		{"1 container of CRI-O", "--crio"},
	} {
		for _, text := range says {
			if got := st.Sources[i].Error; !strings.Contains(got, text) {
				t.Errorf("source %s says %q, want %q", st.Sources[i].Name, got, text)
			}
		}
	}
}

// TestDoctorEngines has a container of an engine that no runtime reports.
func TestDoctorEngines(t *testing.T) {
	cg, ns := testkit.Cgroup(t), testkit.NetNS(t)
	in := cg.Child(t, fmt.Sprintf("crio-%064x.scope", 1))
	in.Add(t, ns.Start(t, "sleep", "1000").Process.Pid)
	r := withEngines(nil, Config{Roots: kernel.Default()})
	for _, f := range r {
		if f.Capability == "cri-o" && f.Level == probe.Degraded && strings.Contains(f.Why, "of CRI-O") && f.Mend != "" {
			return
		}
	}
	t.Errorf("report %+v", r)
}
