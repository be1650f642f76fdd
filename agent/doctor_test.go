package agent

import (
	"encoding/json"
	"strings"
	"testing"
	"time"

	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/internal/testkit"
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
