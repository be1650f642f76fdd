package probe

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/kernel"
	"github.com/fairlead-project/fairlead/kernel/cgroup"
	"github.com/fairlead-project/fairlead/kernel/sched"
)

var must = testkit.Must

// reporter in the environment makes the test binary print a Report and end.
const reporter = "FAIRLEAD_PROBE_REPORT"

func TestMain(m *testing.M) {
	if os.Getenv(reporter) != "" {
		out, err := json.Marshal(Run(context.Background(), patient()))
		fmt.Printf("%s", out)
		if err != nil {
			os.Exit(1)
		}
		os.Exit(0)
	}
	testkit.Main(m)
}

// patient is a Config for slow machines, such as emulated ones.
func patient() Config { return Config{Timeout: time.Minute} }

// find returns the finding of one capability.
func (r Report) find(t *testing.T, capability string) Finding {
	t.Helper()
	i := slices.IndexFunc(r, func(f Finding) bool { return f.Capability == capability })
	if i < 0 {
		t.Fatalf("the report has no %s", capability)
	}
	return r[i]
}

// sound checks the properties that every report has.
func sound(t *testing.T, r Report) {
	t.Helper()
	want := questions()
	if len(r) != len(want) {
		t.Fatalf("%d findings, want %d", len(r), len(want))
	}
	for i, f := range r {
		if f.Capability != want[i].Capability || f.Area != want[i].Area {
			t.Errorf("finding %d is %s/%s, want %s/%s", i, f.Area, f.Capability, want[i].Area, want[i].Capability)
		}
		switch f.Level {
		case Full:
			if f.Why != "" || f.Mend != "" {
				t.Errorf("%s is full, and yet: %q, %q", f.Capability, f.Why, f.Mend)
			}
		case Degraded, Unavailable:
			if f.Why == "" {
				t.Errorf("%s is %s without a reason", f.Capability, f.Level)
			}
		default:
			t.Errorf("%s has level %q", f.Capability, f.Level)
		}
		if strings.ContainsAny(f.Why+f.Mend+f.Detail, "\n\r\x1b") {
			t.Errorf("%s has more than one line: %q, %q, %q", f.Capability, f.Why, f.Mend, f.Detail)
		}
	}
}

// TestOrder checks the findings of a report, and their order.
func TestOrder(t *testing.T) {
	r := report(answers{
		"root":               full(""),
		"cgroup-layout":      full("hybrid"),
		"kthread-throttling": degraded("charged only", "weights").with("seen"),
	})
	sound(t, r)
	got := []Finding{r.find(t, "root"), r.find(t, "cgroup-layout"), r.find(t, "kthread-throttling"), r.find(t, "btf")}
	want := []Finding{
		{Capability: "root", Area: "host", Verdict: Verdict{Level: Full}},
		{Capability: "cgroup-layout", Area: "cgroup", Verdict: Verdict{Level: Full}, Detail: "hybrid"},
		{Capability: "kthread-throttling", Area: "sched", Verdict: Verdict{Level: Degraded, Why: "charged only", Mend: "weights"}, Detail: "seen"},
		{Capability: "btf", Area: "bpf", Verdict: Verdict{Level: Unavailable, Why: "it did not answer in time", Mend: "try again when the host is less busy"}},
	}
	testkit.Same(t, "findings", want, got)
	var names []string
	for _, f := range r {
		names = append(names, f.Area+"/"+f.Capability)
	}
	const order = "host/kernel host/root host/capabilities host/pid-namespace host/systemd host/psi " +
		"cgroup/cgroup-v2 cgroup/cgroup-layout cgroup/cgroup-cpu cgroup/cgroup-cpuset cgroup/cgroup-io cgroup/cfs-bandwidth " +
		"sched/group-fairness sched/kthread-cgroup sched/kthread-throttling sched/softirq-charge " +
		"bpf/btf bpf/bpf-jit bpf/bpffs bpf/bpf-tp-btf bpf/bpf-fentry bpf/bpf-cgroup-id bpf/bpf-ringbuf bpf/bpf-tc bpf/bpf-tcx bpf/bpf-xdp " +
		"net/netns net/veth net/napi-threaded net/napi-netlink net/qdisc-clsact net/qdisc-htb net/qdisc-hfsc net/qdisc-fq " +
		"runtime/docker runtime/podman runtime/containerd " +
		"owner/xdp-programs owner/tc-programs owner/tcx-programs owner/qdiscs owner/firewall-rules owner/cni owner/cgroup-managers owner/irqbalance owner/fairlead-agents"
	testkit.Same(t, "order", strings.Fields(order), names)
}

func TestHostileNames(t *testing.T) {
	r := report(answers{"qdiscs": degraded("a\x1b[2Jb", "mend").with("é\xff\u202e\n")})
	sound(t, r)
	if f := r.find(t, "qdiscs"); f.Why != "a?[2Jb" || f.Detail != "é\ufffd??" {
		t.Errorf("%q, %q", f.Why, f.Detail)
	}
}

// traces lists what a probe might leave behind in this process and on the host.
func traces(t *testing.T) map[string]string {
	t.Helper()
	seen := map[string]string{}
	tasks, _ := filepath.Glob("/proc/self/task/*/ns/net")
	for _, name := range tasks {
		if ns, err := os.Readlink(name); err == nil {
			seen["thread in "+ns] = ""
		}
	}
	for _, dir := range []string{"cpu", "cpu,cpuacct", "unified", "."} {
		left, _ := filepath.Glob(filepath.Join(cgroup.DefaultRoot, dir, groupPrefix+fmt.Sprint(os.Getpid())+"-*"))
		for _, l := range left {
			seen[l] = ""
		}
	}
	threads, err := sched.Threads("/proc", fmt.Sprintf("napi/fl%d", os.Getpid()))
	must(t, err)
	for _, th := range threads {
		seen[th.Comm] = ""
	}
	fds, err := os.ReadDir("/proc/self/fd")
	must(t, err)
	for _, fd := range fds {
		to, _ := os.Readlink(filepath.Join("/proc/self/fd", fd.Name()))
		for _, kind := range []string{"net:", "bpf", "socket:", "/sys/fs/cgroup"} {
			if strings.Contains(to, kind) {
				seen["open "+to] = ""
			}
		}
	}
	return seen
}

// leavesNothing runs f and checks that its traces are gone soon after.
func leavesNothing(t *testing.T, f func()) {
	t.Helper()
	before := traces(t)
	f()
	// An overdue earlier run may remove its own traces meanwhile.
	testkit.AwaitNone(t, func() string { return strings.Join(added(before, traces(t)), "\n") })
}

// added returns the traces that were not there before.
func added(before, after map[string]string) []string {
	var list []string
	for what, value := range after {
		if old, was := before[what]; !was || old != value {
			list = append(list, what+" "+value)
		}
	}
	return list
}

func TestThisHost(t *testing.T) {
	testkit.OnKernels(t)
	cg := testkit.Cgroup(t) // needs root; on a v2 host it enables the cpu controller
	var r Report
	Run(t.Context(), patient()) // opens the descriptors that the libraries keep open
	leavesNothing(t, func() {
		for range 3 {
			r = Run(t.Context(), patient())
		}
	})
	sound(t, r)
	for _, f := range r {
		t.Logf("%-12s %-20s %-11s %s | %s | %s", f.Area, f.Capability, f.Level, f.Why, f.Mend, f.Detail)
	}

	// Every kernel that fairlead supports has these.
	need := []string{"kernel", "root", "pid-namespace", "netns", "veth", "napi-threaded", "qdisc-clsact", "bpf-tc", "bpf-xdp", "bpf-ringbuf"}
	if cg.CPU != "" {
		need = append(need, "cgroup-cpu", "cfs-bandwidth", "kthread-cgroup")
	}
	if _, err := os.Stat("/sys/kernel/btf/vmlinux"); err == nil {
		need = append(need, "btf", "bpf-tp-btf", "bpf-cgroup-id")
	} else if f := r.find(t, "btf"); f.Level != Unavailable || !strings.Contains(f.Why, errNoBTF.Error()) {
		t.Errorf("without BTF: %+v", f)
	}
	for _, c := range need {
		if f := r.find(t, c); f.Level != Full {
			t.Errorf("%s is %s: %s", c, f.Level, f.Why)
		}
	}
	l, err := cgroup.Detect("/proc", "")
	must(t, err)
	testkit.Same(t, "cgroup-v2 is at", l.V2, r.find(t, "cgroup-v2").Detail)
}

// TestJIT has a network namespace without the sysctl of the compiler, which compiles there too.
func TestJIT(t *testing.T) {
	testkit.NeedRoot(t)
	state, err := os.ReadFile("/proc/sys/net/core/bpf_jit_enable")
	if errors.Is(err, os.ErrNotExist) {
		testkit.Skip(t, "the tests run in a network namespace themselves")
	}
	testkit.Must(t, err)
	want := Full
	if strings.TrimSpace(string(state)) == "0" {
		want = Degraded
	}
	testkit.Must(t, testkit.NetNS(t).Do(func() error {
		testkit.Fails(t, "the sysctl in the namespace", testkit.Err(os.Stat("/proc/sys/net/core/bpf_jit_enable")))
		if got := jit(); got.Level != want {
			t.Errorf("the compiler is %s: %s; want %s", got.Level, got.Why, want)
		}
		return nil
	}))
}

func TestOverdue(t *testing.T) {
	testkit.NeedRoot(t)
	Run(t.Context(), patient())
	cancelled, cancel := context.WithCancel(t.Context())
	cancel()
	for name, run := range map[string]func() Report{
		"no time":   func() Report { return Run(t.Context(), Config{Timeout: time.Nanosecond}) },
		"some time": func() Report { return Run(t.Context(), Config{Timeout: grace + 20*time.Millisecond}) },
		"cancelled": func() Report { return Run(cancelled, Config{Timeout: time.Minute}) },
	} {
		leavesNothing(t, func() {
			r := run()
			sound(t, r)
			if f := r.find(t, "qdisc-fq"); name != "some time" && f.Level == Full {
				t.Errorf("%s, and yet all was tried: %+v", name, f)
			}
		})
	}
}

func TestWithoutRoot(t *testing.T) {
	testkit.NeedRoot(t)
	cmd := exec.Command("/proc/self/exe") // an unprivileged user may not enter the directory of the test binary
	cmd.Env = append(os.Environ(), reporter+"=1")
	cmd.Dir = "/"
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 65534, Gid: 65534}}
	cmd.Stderr = os.Stderr
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	var r Report
	if err := json.Unmarshal(out, &r); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	sound(t, r)
	for _, c := range []string{"root", "capabilities", "netns", "veth", "napi-threaded", "kthread-cgroup", "bpf-tp-btf", "bpf-tc", "bpf-xdp", "qdisc-htb", "tcx-programs"} {
		f := r.find(t, c)
		testkit.Same(t, c, Unavailable, f.Level)
		testkit.Same(t, fmt.Sprintf("%s: %q, mend", c, f.Why), asRoot, f.Mend)
	}
	for _, c := range []string{"kernel", "btf", "cgroup-layout", "kthread-throttling", "softirq-charge"} {
		if f := r.find(t, c); f.Level == Unavailable {
			t.Errorf("%s needs no root: %s", c, f.Why)
		}
	}
}

// TestBareHost probes a host that has nothing.
func TestBareHost(t *testing.T) {
	dir := t.TempDir()
	cfg := Config{
		Roots: kernel.Roots{Proc: dir + "/proc", Sys: dir + "/sys", Cgroup: dir + "/cgroup", BPFFS: dir},
		Run:   dir + "/run", Etc: dir + "/etc",
		Timeout: time.Minute,
		Docker:  dir + "/docker.sock", Podman: "unix://" + dir + "/podman.sock", Containerd: "fd://",
	}
	r := Run(t.Context(), cfg)
	sound(t, r)
	for c, want := range map[string]string{
		"pid-namespace":      "not the host's pid namespace",
		"systemd":            "not started by systemd",
		"psi":                "no pressure stall information",
		"cgroup-v2":          "no such file",
		"cfs-bandwidth":      "no cpu controller is mounted",
		"btf":                "(no BTF)",
		"bpf-tp-btf":         "(no BTF)",
		"kthread-throttling": "(no BTF)",
		"softirq-charge":     "(no BTF)",
		"bpffs":              "no BPF file system is mounted at " + dir,
		"docker":             "there is no " + dir + "/docker.sock",
		"podman":             "there is no " + dir + "/podman.sock",
		"containerd":         "neither a path nor",
		"cgroup-managers":    "no such file",
	} {
		if f := r.find(t, c); f.Level != Unavailable || !strings.Contains(f.Why, want) {
			t.Errorf("%s: %s, %q; want %q", c, f.Level, f.Why, want)
		}
	}
	testkit.Same(t, "cni", Full, r.find(t, "cni").Level)
}

func TestReason(t *testing.T) {
	testkit.Same(t, "reason", "a b c", reason(errors.New("a\n\tb  c")))
	if got := reason(errors.New(strings.Repeat("é", 400))); len(got) > 310 || !strings.HasSuffix(got, "é...") {
		t.Errorf("got %q", got)
	}
}

// Package api lists the areas of all questions. A finding in any other area is a feature's.
func TestAreas(t *testing.T) {
	for _, q := range questions() {
		if !slices.Contains(api.HostAreas(), q.Area) {
			t.Errorf("%s is in the area %s, which is none of %q", q.Capability, q.Area, api.HostAreas())
		}
	}
}
