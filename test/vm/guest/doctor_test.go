package guest

import (
	"bytes"
	"encoding/json"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/kernel"
	"github.com/fairlead-project/fairlead/kernel/probe"
)

// TestDoctor runs fairlead doctor on whatever kernel this is: it has to say of
// every capability how it stands, and why where it is not full. That it ran
// out of time is an answer: an emulated CPU is slow.
func TestDoctor(t *testing.T) {
	testkit.Smoke(t)
	v := version(t)
	cmd := exec.Command("fairlead", "doctor", "-o", "json")
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	var report probe.Report
	if jsonErr := json.Unmarshal(out, &report); jsonErr != nil {
		t.Fatalf("fairlead doctor: %v, %v\n%s%s", err, jsonErr, out, &stderr)
	}
	if err != nil && stderr.Len() == 0 {
		t.Errorf("fairlead doctor: %v without a word", err)
	}
	answered(t, report)
	const refusal = "fairlead needs Linux 6.1 or later"
	for _, x := range report {
		if x.Capability == "kernel" && strings.Contains(x.Why, refusal) != tooOld(v) {
			t.Errorf("kernel is %s on Linux %d.%d: %s", x.Level, v[0], v[1], x.Why)
		}
	}
	if !tooOld(v) {
		return
	}
	out, err = exec.Command("fairlead", "agent", "--state-dir", t.TempDir()).CombinedOutput()
	if err == nil || !strings.Contains(string(out), refusal) {
		t.Errorf("an agent on Linux %d.%d: %v, %s", v[0], v[1], err, out)
	}
}

// answered checks that every line of a report is a whole answer.
func answered(t *testing.T, report probe.Report) {
	t.Helper()
	if len(report) < 20 {
		t.Errorf("%d capabilities, want many", len(report))
	}
	for _, x := range report {
		t.Logf("%-11s %s: %s", x.Level, x.Capability, x.Why)
		switch x.Level {
		case probe.Full:
		case probe.Degraded, probe.Unavailable:
			if x.Why == "" {
				t.Errorf("%s is %s without a reason", x.Capability, x.Level)
			}
		default:
			t.Errorf("%s is %q", x.Capability, x.Level)
		}
	}
}

// TestCapabilities compares what the probes find by trying with what is known
// of the kernel's history.
func TestCapabilities(t *testing.T) {
	testkit.OnKernels(t)
	v := version(t)
	report := probe.Run(t.Context(), probe.Config{Roots: kernel.Default(), Timeout: time.Minute})
	answered(t, report)
	levels := map[string]probe.Level{}
	for _, x := range report {
		levels[x.Capability] = x.Level
	}
	// Each capability, and the first version that has it.
	for _, c := range []struct {
		capability string
		since      [2]int
	}{
		{"cgroup-v2", [2]int{4, 5}},
		{"bpf-tc", [2]int{4, 5}},
		{"qdisc-hfsc", [2]int{2, 6}},
		{"qdisc-fq", [2]int{3, 12}},
		{"bpf-ringbuf", [2]int{5, 8}},
		{"napi-threaded", [2]int{5, 12}},
		{"bpf-tcx", [2]int{6, 6}},
	} {
		has := v[0] > c.since[0] || v[0] == c.since[0] && v[1] >= c.since[1]
		if got := levels[c.capability]; (got == probe.Full) != has {
			t.Errorf("%s is %q on Linux %d.%d", c.capability, got, v[0], v[1])
		}
	}
}
