package agent

import (
	"encoding/json"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/kernel/probe"
)

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
	if diff := cmp.Diff(want, string(got)); diff != "" {
		t.Error(diff)
	}
}
