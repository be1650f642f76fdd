package probe

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/cilium/ebpf/btf"

	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/kernel"
	"github.com/fairlead-project/fairlead/kernel/cgroup"
)

func TestCapabilities(t *testing.T) {
	for _, c := range []struct {
		mask  uint64
		level Level
		why   string
	}{
		{0x1ffffffffff, Full, ""},
		{0x1fffeffffff, Full, ""}, // without CAP_SYS_RESOURCE
		{0, Unavailable, "none"},
		{0x1ffff7fffff, Degraded, "missing: CAP_SYS_NICE"},
		{0xc000201000, Degraded, "CAP_SYS_PTRACE"},
	} {
		if a := capabilities(c.mask, nil); a.Level != c.level || !strings.Contains(a.Why, c.why) {
			t.Errorf("%x: %s, %q", c.mask, a.Level, a.Why)
		}
	}
	status, err := os.ReadFile("/proc/self/status")
	testkit.Must(t, err)
	mask, err := effective()
	testkit.Must(t, err)
	if line := fmt.Sprintf("\nCapEff:\t%016x\n", mask); !strings.Contains(string(status), line) {
		t.Errorf("no %q in:\n%s", line, status)
	}
}

func TestLayout(t *testing.T) {
	cfg := Config{Roots: kernel.Roots{Cgroup: "/cg"}}
	for _, c := range []struct {
		name string
		l    cgroup.Layout
		err  error
		want map[string]string // capability: "level detail" or "level why"
	}{
		{"v1", cgroup.Layout{CPU: "/cg/cpu", Mode: "v1"}, nil, map[string]string{
			"cgroup-v2": "unavailable no cgroup v2 tree is mounted", "cgroup-layout": "unavailable this host has cgroup v1 only",
			"cgroup-cpu": "full v1 at /cg/cpu", "cgroup-io": "unavailable no hierarchy with this controller",
		}},
		{"v2", cgroup.Layout{V2: "/cg", CPU: "/cg", CPUSet: "/cg", IO: "/cg", Mode: "v2"}, nil, map[string]string{
			"cgroup-v2": "full /cg", "cgroup-layout": "full v2", "cgroup-cpu": "full v2 at /cg", "cgroup-io": "full v2 at /cg",
		}},
		{"hybrid", cgroup.Layout{V2: "/cg/unified", CPU: "/cg/cpu", CPUSet: "/cg/cpuset", Mode: "hybrid"}, nil, map[string]string{
			"cgroup-v2": "full /cg/unified", "cgroup-layout": "full hybrid", "cgroup-cpuset": "full v1 at /cg/cpuset",
		}},
		{"none", cgroup.Layout{}, cgroup.ErrNone, map[string]string{
			"cgroup-v2": "unavailable no cgroup hierarchy", "cgroup-cpu": "unavailable no cgroup hierarchy",
		}},
	} {
		a := layout(c.l, c.err, cfg)
		for cap, want := range c.want {
			got := fmt.Sprintf("%s %s%s", a[cap].Level, a[cap].Why, a[cap].detail)
			if !strings.HasPrefix(got, want) {
				t.Errorf("%s: %s is %q, want %q", c.name, cap, got, want)
			}
		}
	}
}

func TestBandwidthWithoutController(t *testing.T) {
	// As in a v2 tree in which the root does not enable the controller for its children.
	if a := bandwidth(t.TempDir()); a.Level != Unavailable || !strings.Contains(a.Why, "not enabled below the root") {
		t.Errorf("%+v", a)
	}
	dir := t.TempDir()
	testkit.Write(t, filepath.Join(dir, "cpu.shares"), "1024\n")
	if a := bandwidth(dir); a.Level != Unavailable || !strings.Contains(a.Why, "no cpu.cfs_quota_us") {
		t.Errorf("%+v", a)
	}
}

func TestSweep(t *testing.T) {
	cmd := exec.Command("true")
	must(t, cmd.Run())
	dir := t.TempDir()
	dead, alive, other := fmt.Sprint(groupPrefix, cmd.Process.Pid, "-1"), fmt.Sprint(groupPrefix, os.Getppid(), "-1"), "fairlead-probe"
	for _, n := range []string{dead, alive, other} {
		must(t, os.Mkdir(filepath.Join(dir, n), 0o755))
	}
	sweep(dir)
	for n, want := range map[string]bool{dead: false, alive: true, other: true} {
		if _, err := os.Stat(filepath.Join(dir, n)); (err == nil) != want {
			t.Errorf("%s: %v", n, err)
		}
	}
}

// vmlinux writes the BTF of a kernel with a task_struct of these members.
func vmlinux(t *testing.T, members ...string) kernel.Roots {
	t.Helper()
	return withType(t, "task_struct", members...)
}

// withType writes the BTF of a kernel with one struct that has these members.
func withType(t *testing.T, name string, members ...string) kernel.Roots {
	t.Helper()
	u32 := &btf.Int{Name: "unsigned int", Size: 4}
	typ := &btf.Struct{Name: name, Size: uint32(4 * len(members))}
	for i, m := range members {
		typ.Members = append(typ.Members, btf.Member{Name: m, Type: u32, Offset: btf.Bits(32 * i)})
	}
	b, err := btf.NewBuilder([]btf.Type{typ}, nil)
	must(t, err)
	raw, err := b.Marshal(nil, nil)
	must(t, err)
	sys := t.TempDir()
	testkit.Write(t, filepath.Join(sys, "kernel/btf/vmlinux"), string(raw))
	return kernel.Roots{Sys: sys}
}

func TestKthreadsThrottled(t *testing.T) {
	if got, err := KthreadsThrottled(vmlinux(t, "pid", "sched_throttle_work")); err != nil || got {
		t.Errorf("6.18: %v, %v", got, err)
	}
	if got, err := KthreadsThrottled(vmlinux(t, "pid")); err != nil || !got {
		t.Errorf("6.12: %v, %v", got, err)
	}
	testkit.Is(t, "no BTF", testkit.Err(KthreadsThrottled(kernel.Roots{Sys: t.TempDir()})), errNoBTF)
	sys := t.TempDir()
	testkit.Write(t, filepath.Join(sys, "kernel/btf/vmlinux"), "garbage")
	testkit.Is(t, "garbage", testkit.Err(KthreadsThrottled(kernel.Roots{Sys: sys})), errNoBTF)
}

func TestSoftirqsChargeTasks(t *testing.T) {
	for _, c := range []struct {
		name, member, cmdline string
		charges               bool
		says                  string
	}{
		{"without IRQ time accounting", "clock", "quiet\n", true, "counts for the task"},
		{"with it", "prev_irq_time", "quiet\n", false, "not credited"},
		{"with it, and no command line", "prev_irq_time", "", false, "not credited"},
		{"told not to", "prev_irq_time", "quiet tsc=noirqtime\n", true, "tsc=noirqtime: "},
		{"told something else", "prev_irq_time", "tsc=reliable xtsc=noirqtime", false, "not credited"},
	} {
		t.Run(c.name, func(t *testing.T) {
			roots := withType(t, "rq", c.member)
			roots.Proc = t.TempDir()
			if c.cmdline != "" {
				testkit.Write(t, filepath.Join(roots.Proc, "cmdline"), c.cmdline)
			}
			testkit.Gives(t, "SoftirqsChargeTasks", c.charges)(SoftirqsChargeTasks(roots))
			spec, err := kernelTypes(roots, btf.NewCache())
			must(t, err)
			a := softirqCharge(roots, spec)
			if (a.Level == Full) != c.charges || !strings.Contains(a.Why+a.detail, c.says) {
				t.Errorf("doctor says %+v", a)
			}
		})
	}
	testkit.Is(t, "no BTF", testkit.Err(SoftirqsChargeTasks(kernel.Roots{Sys: t.TempDir()})), errNoBTF)
}

func TestGroupFairness(t *testing.T) {
	for version, want := range map[string]Level{
		"6.18.44-fc-v669, x86_64": Degraded, "6.18.0-1-amd64, x86_64": Degraded,
		"6.18.45, x86_64": Full, "6.17.9, x86_64": Full, "6.1.0-35-amd64, x86_64": Full, "7.0.1, x86_64": Full, "": Full,
	} {
		testkit.Same(t, version, want, groupFairness(version).Level)
	}
}

func TestSupported(t *testing.T) {
	for release, want := range map[string]string{
		"6.1.0-35-amd64, x86_64": "", "6.18.44, x86_64": "", "7.0.1, x86_64": "", "": "",
		"6.0.12, x86_64":          "fairlead needs Linux 6.1 or later, and this is 6.0.12",
		"5.10.0-32-amd64, x86_64": "fairlead needs Linux 6.1 or later, and this is 5.10.0-32-amd64",
	} {
		err := supported(release)
		if (err == nil) != (want == "") || err != nil && (err.Error() != want || !errors.Is(err, ErrKernel)) {
			t.Errorf("%q: %v, want %q", release, err, want)
		}
	}
}
