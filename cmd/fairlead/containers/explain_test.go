package containers

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/cmd/internal/cli"
	"github.com/fairlead-project/fairlead/cmd/internal/verbtest"
	"github.com/fairlead-project/fairlead/internal/testkit"
)

// explain shows a controller's decision with its reason. Names of other containers in the reason
// may contain anything.
func TestExplainDecision(t *testing.T) {
	now := time.Unix(1_800_000_000, 0)
	s := api.Setting{Key: "fairlead.netcpu", Value: "isolate", From: "controller", Instead: "fairlead.netcpu=auto (label)", Reason: "its packets took 7 % (db 7 %)", Since: now.Add(-5 * time.Second)}
	verbtest.Compare(t, "fairlead.netcpu = isolate, by controller for fairlead.netcpu=auto (label), since 5 s:\n      its packets took 7 % (db 7 %)", setting1(s, now))
	s.Reason = "its packets took 7 % (\x1b[2J\n)"
	if got := setting1(s, now); strings.ContainsAny(got, "\x1b") || strings.Count(got, "\n") != 1 {
		t.Errorf("%q", got)
	}
}

func TestSettingsAreUnderstood(t *testing.T) {
	now := time.Now()
	verbtest.Compare(t, "fairlead.net.ceil = 20mbit (20.0 Mbit/s), by a label of the container", setting1(api.Setting{Key: "fairlead.net.ceil", Value: "20mbit", From: "label"}, now))
	verbtest.Compare(t, "fairlead.latency = True (on), by a label of the container", setting1(api.Setting{Key: "fairlead.latency", Value: "True", From: "label"}, now))
	verbtest.Compare(t, "fairlead.net.weight = 2, by a label of the container", setting1(api.Setting{Key: "fairlead.net.weight", Value: "2", From: "label"}, now))
}

func run(ctx context.Context, e cli.Env) int { return verbtest.Run(ctx, Verbs(), e) }

func TestScripts(t *testing.T) { verbtest.Scripts(t, run) }

func TestObjectText(t *testing.T) {
	c := verbtest.Example().Explained.Container
	for _, x := range []struct{ kind, object, want string }{
		{"offload", "11/2/gro", "offload gro of eth0 in the container"},
		{"offload", "12/7/tso", "offload tso of veth3f2a1bc, the other end of eth0"},
		{"threaded", "12/8/", "threaded NAPI of docker0"},
		{"qdisc", "9/3", "root qdisc of docker0"}, {"txqueuelen", "9/3", "queue length of docker0"}, {"forward-priority", "9/0", "priority of forwarded packets (ip_forward_update_priority)"},
		{"pair", "9/3/pair", "veth pair past the network namespace of docker0"},
		{"tc-filter", "9/3/ingress/fl_x", "program fl_x at the ingress hook of docker0"},
		{"rps", "11/2/0", "packet steering (rps_cpus) of queue 0 of eth0 in the container"},
		{"defer", "12/8/gro_flush_timeout", "delay of polls (gro_flush_timeout) of docker0"},
		{"kthread", "17:99:/sys/fs/cgroup/cpu", "control group of kernel thread 17 in /sys/fs/cgroup/cpu"},
		{"affinity", "17:99", "allowed CPUs of kernel thread 17"},
		{"slice", "17:99", "slice, in ns, of kernel thread 17"},
		{"nice", "17:99", "nice value of kernel thread 17"},
		{"file", "/sys/fs/cgroup/x\x1b", `"/sys/fs/cgroup/x\x1b"`},
		{"offload", "gro", "offload gro"}, {"offload", "x/y/z", "offload x/y/z"}, {"kthread", "x:y", "kthread x:y"}, {"new\x07", "thing", `"new\a" thing`},
	} {
		testkit.Same(t, fmt.Sprintf("%s %s", x.kind, x.object), x.want, objectText(c, x.kind, x.object, "docker0"))
	}
	// A device without a known name has no numbers either.
	testkit.Same(t, "unnamed", "root qdisc of a device that is not seen any more", objectText(api.Container{}, "qdisc", "4026531840/8", ""))
}
