package sandbox

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/fairlead-project/fairlead/discover"
	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/kernel"
	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"golang.org/x/sys/unix"
)

var must = testkit.Must

// makerEnv makes the test program a maker of sandboxes that is to be killed.
const makerEnv = "FAIRLEAD_TEST_MAKER"

func TestMain(m *testing.M) {
	if status, ok := Reexec(os.Args); ok {
		os.Exit(status)
	}
	if dir := os.Getenv(makerEnv); dir != "" {
		os.Exit(maker(dir))
	}
	testkit.Main(m)
}

func newHost(t *testing.T) *Host {
	t.Helper()
	testkit.NeedRoot(t)
	h, err := New(t.TempDir())
	must(t, err)
	t.Cleanup(func() { must(t, h.Close()) })
	return h
}

// name returns a sandbox name that no other test run on this machine has.
func name(s string) string { return fmt.Sprintf("flt%d-%s", os.Getpid(), s) }

func create(t *testing.T, h *Host, spec Spec) *Box {
	t.Helper()
	b, err := h.Create(spec)
	must(t, err)
	return b
}

// output runs a program in the sandbox and returns what it printed.
func output(t *testing.T, b *Box, cpus []int, args ...string) string {
	t.Helper()
	var out bytes.Buffer
	cmd := exec.Command(args[0], args[1:]...)
	cmd.Stdout, cmd.Stderr = &out, &out
	p, err := b.Start(cmd, cpus...)
	must(t, err)
	if err := p.Wait(); err != nil {
		t.Fatalf("%v: %v\n%s", args, err, &out)
	}
	return out.String()
}

func TestCreateDestroy(t *testing.T) {
	h := newHost(t)
	b := create(t, h, Spec{
		Name: name("a"),
		CPU:  CPU{Quota: 50 * time.Millisecond, Shares: 512, Set: "0"},
	})
	home := selfCgroups(t)

	// Everything that runs in it, the first process too, is in its cgroups.
	inside := output(t, b, []int{0}, "cat", "/proc/self/cgroup")
	first, err := os.ReadFile(fmt.Sprintf("/proc/%d/cgroup", b.PID))
	must(t, err)
	if inside != string(first) {
		t.Errorf("a process is in\n%s, the first one in\n%s", inside, first)
	}
	for _, g := range b.dirs {
		want := ":" + g.Controller + ":/" + Prefix + b.Name + "\n"
		if !g.V2 && len(g.Controller) > 0 && !strings.Contains(strings.ReplaceAll(inside, ",cpuacct", ""), want) {
			t.Errorf("no %q in\n%s", want, inside)
		}
		if g.V2 && !strings.Contains(inside, "0::/"+Prefix+b.Name+"\n") {
			t.Errorf("v2 group is not in\n%s", inside)
		}
	}
	if got := output(t, b, nil, "grep", "Cpus_allowed_list", "/proc/self/status"); !strings.HasSuffix(got, "\t0\n") {
		t.Errorf("cpuset 0 gives %q", got)
	}
	wantNS, _ := os.Readlink(b.NetNS())
	if got := strings.TrimSpace(output(t, b, nil, "readlink", "/proc/self/ns/net")); got != wantNS {
		t.Errorf("process is in %s, want %s", got, wantNS)
	}
	if got := output(t, b, nil, "ip", "-o", "link", "show", "up"); !strings.Contains(got, "lo:") {
		t.Errorf("lo is not up: %q", got)
	}
	if got := limits(t, b); got != "50000 100000 512" && got != "50000 100000 20" {
		t.Errorf("quota, period and shares (or weight) are %q", got)
	}
	below := create(t, h, Spec{Name: name("b"), Parent: name("above")})
	if got, want := output(t, below, nil, "cat", "/proc/self/cgroup"), "/"+Prefix+name("above")+"/"+Prefix+below.Name+"\n"; !strings.Contains(got, want) {
		t.Errorf("no %q in\n%s", want, got)
	}
	above := filepath.Dir(below.Cgroups()[0])
	must(t, below.Destroy())
	testkit.Is(t, fmt.Sprintf("%s is still there", above), testkit.Err(os.Stat(above)), fs.ErrNotExist)
	// The threads that went in have come back.
	if got := selfCgroups(t); got != home {
		t.Errorf("this process is in\n%s, was in\n%s", got, home)
	}

	dirs, pid := b.Cgroups(), b.PID
	must(t, b.Destroy())
	testkit.Is(t, "second Destroy", b.Destroy(), nil)
	for _, dir := range dirs {
		testkit.Is(t, fmt.Sprintf("%s is still there", dir), testkit.Err(os.Stat(dir)), fs.ErrNotExist)
	}
	if err := unix.Kill(pid, 0); err != unix.ESRCH {
		t.Errorf("first process is still there (%v)", err)
	}
	if left, _ := os.ReadDir(h.Dir()); len(left) > 0 {
		t.Errorf("state files left: %v", left)
	}
}

// selfCgroups lists the cgroups of all threads of this process, each once.
func selfCgroups(t *testing.T) string {
	t.Helper()
	files, _ := filepath.Glob("/proc/self/task/*/cgroup")
	var all []string
	for _, f := range files {
		data, err := os.ReadFile(f)
		if err == nil {
			all = append(all, string(data))
		}
	}
	slices.Sort(all)
	return strings.Join(slices.Compact(all), "--\n")
}

func limits(t *testing.T, b *Box) string {
	t.Helper()
	for _, g := range b.dirs {
		if g.Controller == "cpu" {
			return read(t, g.Dir, "cpu.cfs_quota_us") + " " + read(t, g.Dir, "cpu.cfs_period_us") + " " + read(t, g.Dir, "cpu.shares")
		}
	}
	return read(t, b.dirs[0].Dir, "cpu.max") + " " + read(t, b.dirs[0].Dir, "cpu.weight")
}

func read(t *testing.T, dir, file string) string {
	t.Helper()
	data, err := os.ReadFile(filepath.Join(dir, file))
	must(t, err)
	return strings.TrimSpace(string(data))
}

func TestCreateRefuses(t *testing.T) {
	h := newHost(t)
	b := create(t, h, Spec{Name: name("a")})
	tests := []struct {
		label string
		spec  Spec
		is    error
		says  string
	}{
		{"name in use", Spec{Name: b.Name}, ErrExists, ""},
		{"no name", Spec{}, nil, "name must match"},
		{"path as name", Spec{Name: "../x"}, nil, "name must match"},
		{"path as parent", Spec{Name: name("b"), Parent: "../x"}, nil, "name must match"},
		{"no such CPU", Spec{Name: name("b"), CPU: CPU{Set: "4000"}}, nil, "cpuset.cpus"},
		{"quota too small", Spec{Name: name("c"), CPU: CPU{Quota: time.Microsecond}}, unix.EINVAL, ""},
	}
	for _, tt := range tests {
		t.Run(tt.label, func(t *testing.T) {
			_, err := h.Create(tt.spec)
			if err == nil || tt.is != nil && !errors.Is(err, tt.is) || !strings.Contains(err.Error(), tt.says) {
				t.Errorf("got error %v", err)
			}
		})
	}
	testkit.Is(t, "name in use by another Host", testkit.Err(newHost(t).Create(Spec{Name: b.Name})), fs.ErrExist)
	// What failed has left nothing, and the first is as it was.
	if left, _ := os.ReadDir(h.Dir()); len(left) != 1 {
		t.Errorf("state files: %v", left)
	}
	for _, dir := range b.Cgroups() {
		all, err := filepath.Glob(filepath.Join(filepath.Dir(dir), Prefix+name("*")))
		if err != nil || len(all) != 1 {
			t.Errorf("cgroups %v (%v)", all, err)
		}
	}
}

func TestWire(t *testing.T) {
	h := newHost(t)
	outside := create(t, h, Spec{Name: name("out"), Bare: true})
	host := create(t, h, Spec{Name: name("host"), Bare: true})
	box := create(t, h, Spec{Name: name("box")})
	pod := create(t, h, Spec{Name: name("pod"), Network: box})
	must(t, host.Bridge("br0", netip.MustParsePrefix("10.9.0.254/24")))
	err := errors.Join(
		Wire(End{Box: host, Name: "nic", Queues: 2, Bridge: "br0"},
			End{Box: outside, Name: "eth0", Queues: 2, Addr: netip.MustParsePrefix("10.9.0.1/24")}),
		Wire(End{Box: host, Name: "veth-box", Bridge: "br0"},
			End{Box: box, Name: "eth0", MAC: "02:00:00:00:00:02", Addr: netip.MustParsePrefix("10.9.0.2/24")}),
		outside.Neighbour("eth0", netip.MustParseAddr("10.9.0.2"), "02:00:00:00:00:02"),
		host.Sysctl("ipv6/conf/all/disable_ipv6", "1"),
		host.SetQueues("nic", "rx", "rps_cpus", func(q int) string { return strconv.Itoa(q + 1) }),
	)
	must(t, err)
	var l net.Listener
	err = box.Do(func() (err error) {
		l, err = net.Listen("tcp", "10.9.0.2:9")
		return err
	})
	must(t, err)
	defer l.Close()
	err = outside.Do(func() error {
		c, err := net.DialTimeout("tcp", "10.9.0.2:9", 10*time.Second)
		if err == nil {
			err = c.Close()
		}
		return err
	})
	testkit.Is(t, "through the bridge", err, nil)
	if got := output(t, pod, nil, "ip", "addr", "show", "eth0"); !strings.Contains(got, "10.9.0.2/24") {
		t.Errorf("pod's eth0 is %q", got)
	}
	var masks []string
	err = host.Sysfs(func(sys string) error {
		for q := range 2 {
			data, err := os.ReadFile(fmt.Sprintf("%s/class/net/nic/queues/rx-%d/rps_cpus", sys, q))
			if err != nil {
				return err
			}
			masks = append(masks, strings.TrimSpace(string(data)))
		}
		return nil
	})
	if err != nil || !slices.Equal(masks, []string{"1", "2"}) {
		t.Errorf("rps_cpus are %v (%v)", masks, err)
	}
	testkit.Fails(t, "the sandbox's sysfs is mounted in this process", testkit.Err(os.Stat("/sys/class/net/nic")))
	testkit.Check(t, host.Delete("veth-box"))
}

func TestProcessEndsWithSandbox(t *testing.T) {
	h := newHost(t)
	b := create(t, h, Spec{Name: name("a")})
	p, err := b.Start(exec.Command("sleep", "1000"))
	must(t, err)
	// The cgroup finds an unknown grandchild.
	output(t, b, nil, "sh", "-c", "sleep 1000 >/dev/null 2>&1 &")
	must(t, b.Destroy())
	select {
	case <-p.Done():
	default:
		t.Error("process outlives the sandbox")
	}
	testkit.Fails(t, "a destroyed sandbox starts processes", testkit.Err(b.Start(exec.Command("true"))))
}

func TestSource(t *testing.T) {
	h := newHost(t)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	reports := make(chan discover.Report)
	go discover.Sandboxes("/proc", h.Dir()).Run(ctx, func(r discover.Report) {
		select {
		case reports <- r:
		case <-ctx.Done():
		}
	})
	expect := func(want ...discover.Record) {
		t.Helper()
		timeout := time.After(90 * time.Second)
		for {
			select {
			case r := <-reports:
				if r.Err == nil && cmp.Equal(want, r.Records, cmpopts.EquateEmpty()) {
					return
				}
			case <-timeout:
				t.Fatalf("never reported: %v", want)
			}
		}
	}
	expect()
	create(t, h, Spec{Name: name("bare"), Bare: true})
	b := create(t, h, Spec{Name: name("a"), Image: "none", Labels: map[string]string{"fairlead.netcpu": "isolate"}})
	rec := discover.Record{PID: b.PID, Name: b.Name, Image: "none", Labels: map[string]string{"fairlead.netcpu": "isolate"}}
	expect(rec)
	other := create(t, h, Spec{Name: name("b")})
	expect(rec, discover.Record{PID: other.PID, Name: other.Name})
	// One ends by itself, the other one is removed.
	unix.Kill(b.PID, unix.SIGKILL)
	<-b.Done()
	expect(discover.Record{PID: other.PID, Name: other.Name})
	must(t, other.Destroy())
	expect()
}

// maker makes sandboxes until it is killed, and says so.
func maker(dir string) int {
	h, err := New(dir)
	if err != nil {
		fmt.Println(err)
		return 1
	}
	for i := 0; ; i++ {
		b, err := h.Create(Spec{Name: fmt.Sprintf("flt%d-%d", os.Getppid(), i)})
		if err == nil {
			_, err = b.Start(exec.Command("sleep", "1000"))
		}
		if err != nil {
			fmt.Println(err)
			return 1
		}
		fmt.Println("made", b.PID)
	}
}

func TestSweepAfterKill(t *testing.T) {
	testkit.NeedRoot(t)
	dir := t.TempDir()
	t.Cleanup(func() { Sweep(kernel.Roots{}, dir) })
	exe, err := os.Executable()
	must(t, err)
	for round := range 4 {
		cmd := exec.Command(exe)
		cmd.Env = append(os.Environ(), makerEnv+"="+dir)
		out, err := cmd.StdoutPipe()
		must(t, err)
		must(t, cmd.Start())
		var word string
		var pid int
		if _, err := fmt.Fscan(out, &word, &pid); err != nil || word != "made" {
			cmd.Process.Kill()
			cmd.Wait()
			t.Fatalf("maker says %q (%v)", word, err)
		}
		if swept, err := Sweep(kernel.Roots{}, dir); len(swept) > 0 || err != nil {
			t.Errorf("sweep took %v from a living maker (%v)", swept, err)
		}
		// Somewhere in the middle of the next ones.
		time.Sleep(time.Duration(round*7) * time.Millisecond)
		cmd.Process.Kill()
		cmd.Wait()
		swept, err := Sweep(kernel.Roots{}, dir)
		if len(swept) == 0 || err != nil {
			t.Errorf("swept %v: %v", swept, err)
		}
		if p, err := discover.FindProcess("/proc", pid); err == nil {
			t.Errorf("process %d is still there", p.PID)
		}
		if left, err := os.ReadDir(dir); len(left) > 0 && !strings.HasPrefix(left[0].Name(), ".") {
			t.Errorf("left: %v (%v)", left, err)
		}
	}
}

func TestSweepTrustsNoFile(t *testing.T) {
	root, dir := t.TempDir(), t.TempDir()
	roots := kernel.Roots{Proc: filepath.Join(root, "proc"), Cgroup: filepath.Join(root, "cgroup")}
	precious := filepath.Join(root, "cgroup", "cpu", "precious")
	must(t, os.MkdirAll(precious, 0o755))
	for _, bad := range []string{precious, root + "/cgroup/" + Prefix + "x/../cpu/precious", root + "/cgroup/cpu/" + Prefix + "other", root + "/" + Prefix + "precious", "/", ""} {
		file := filepath.Join(dir, "precious.json")
		must(t, os.WriteFile(file, fmt.Appendf(nil, `{"name":"precious","cgroups":[%q]}`, bad), 0o644))
		if swept, err := Sweep(roots, dir); err == nil || len(swept) > 0 {
			t.Errorf("swept %v from %q (%v)", swept, bad, err)
		}
	}
	testkit.Check(t, testkit.Err(os.Stat(precious)))
}

func TestWeight(t *testing.T) {
	for shares, want := range map[uint64]uint64{0: 1, 2: 1, 1024: 39, 262144: 10000, 1 << 40: 10000} {
		if got := weight(shares); got != want {
			t.Errorf("weight(%d) = %d, want %d", shares, got, want)
		}
	}
}
