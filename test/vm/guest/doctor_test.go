package guest

import (
	"bytes"
	"encoding/json"
	"os/exec"
	"testing"

	"github.com/fairlead-project/fairlead/kernel/probe"
)

// TestDoctor runs fairlead doctor on whatever kernel this is: it has to work,
// to say of every capability how it stands, and to say why where it is not
// full.
func TestDoctor(t *testing.T) {
	v := version(t)
	cmd := exec.Command("fairlead", "doctor", "-o", "json")
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("fairlead doctor: %v\n%s", err, &stderr)
	}
	var rows []struct {
		Capability, Why string
		Level           probe.Level
	}
	if err := json.Unmarshal(out, &rows); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	levels := map[string]probe.Level{}
	for _, r := range rows {
		levels[r.Capability] = r.Level
		t.Logf("%-11s %s: %s", r.Level, r.Capability, r.Why)
		switch r.Level {
		case probe.Full:
		case probe.Degraded, probe.Unavailable:
			if r.Why == "" {
				t.Errorf("%s is %s without a reason", r.Capability, r.Level)
			}
		default:
			t.Errorf("%s is %q", r.Capability, r.Level)
		}
	}
	// Known of the kernel's history, so it can be wrong: each capability, and
	// the first version that has it.
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
