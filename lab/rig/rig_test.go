package rig

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/kernel/cgroup"
	"github.com/fairlead-project/fairlead/lab/load"
	"github.com/fairlead-project/fairlead/lab/sandbox"
	"github.com/vishvananda/netlink"
)

var must = testkit.Must

func TestMain(m *testing.M) {
	if status, ok := sandbox.Reexec(os.Args); ok {
		os.Exit(status)
	}
	if status, ok := load.Reexec(os.Args); ok {
		os.Exit(status)
	}
	if status, ok := Reexec(os.Args); ok {
		os.Exit(status)
	}
	testkit.Main(m)
}

func build(t *testing.T, cfg Config) *Rig {
	t.Helper()
	testkit.NeedRoot(t)
	r, err := New(t.Context(), cfg)
	must(t, err)
	t.Cleanup(func() {
		dirs := append(r.Neighbours()[0].Cgroups(), r.Sandboxes.Dir())
		testkit.Check(t, r.Close())
		for _, dir := range dirs {
			testkit.Fails(t, fmt.Sprintf("%s is left", dir), testkit.Err(os.Stat(dir)))
		}
	})
	return r
}

// moves reports whether the generator counts within the test's patience.
func moves(g *Generator) bool {
	before := g.Read()
	for range 9000 {
		if g.Read().Since(before).Ops > 0 {
			return true
		}
		time.Sleep(10 * time.Millisecond)
	}
	return false
}

// counted waits until the generator has counted n since its start.
func counted(t *testing.T, g *Generator, n uint64) {
	t.Helper()
	testkit.AwaitNone(t, func() string {
		if ops := g.Ops(); ops < n {
			return fmt.Sprintf("%d are counted, of %d", ops, n)
		}
		return ""
	})
}

func TestTraffic(t *testing.T) {
	kinds := []Traffic{{Kind: UDP}, {Kind: Overrun}, {Kind: TCP, Conns: 3}, {Kind: UDPRR}, {Kind: TCPRR}}
	for name, cfg := range map[string]Config{"hop": {Path: Hop}, "nic": {Path: NIC}, "several": {Path: NIC, Containers: Equal(4)}, "vxlan": {Path: VXLAN}} {
		t.Run(name, func(t *testing.T) {
			r := build(t, cfg)
			all := append([]Traffic{}, kinds...)
			if cfg.Path != Hop {
				all = append(all, Traffic{Kind: UDP, Out: true}, Traffic{Kind: TCP, Out: true, Conns: 4}, Traffic{Kind: UDP, Neighbours: 1})
			}
			for _, traffic := range all {
				run, err := r.Send(t.Context(), traffic)
				if err != nil {
					t.Fatalf("%+v: %v", traffic, err)
				}
				want := len(r.Neighbours())
				if traffic.Neighbours > 0 {
					want = traffic.Neighbours
				}
				if got := len(run.Senders) + len(run.Receivers) - 1; got != want {
					t.Errorf("%+v: %d neighbours take part, want %d", traffic, got, want)
				}
				for _, g := range run.Senders {
					if n := g.Read().Since(load.Reading{}).Ops; n != 0 {
						t.Errorf("%+v: %d sent before it was let go", traffic, n)
					}
				}
				testkit.Check(t, run.SetRate(20000))
				for _, g := range append(slices.Clone(run.Senders), run.Receivers...) {
					if !moves(g) {
						t.Errorf("%+v: nothing sent, or nothing received", traffic)
					}
				}
				testkit.Is(t, fmt.Sprintf("%+v", traffic), run.Stop(), nil)
			}
			for _, bad := range []Traffic{{Kind: "pigeon"}, {Kind: UDPRR, Out: true}} {
				testkit.Fails(t, fmt.Sprintf("%+v is sent", bad), testkit.Err(r.Send(t.Context(), bad)))
			}
		})
	}
}

// TestFreeze checks that senders on the shared CPU cost nothing while they pause.
func TestFreeze(t *testing.T) {
	r := build(t, Config{Path: NIC})
	run, err := r.Send(t.Context(), Traffic{Kind: UDP, Out: true})
	must(t, err)
	state := func() string {
		data, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", run.Senders[0].PID))
		must(t, err)
		return strings.Fields(string(data[strings.LastIndexByte(string(data), ')')+1:]))[0]
	}
	for range 3 {
		must(t, run.SetRate(0))
		testkit.AwaitNone(t, func() string {
			if got := state(); got != "T" {
				return "a paused sender is in state " + got + ", want T"
			}
			return ""
		})
		if err := run.SetRate(1000); err != nil || !moves(run.Senders[0]) {
			t.Errorf("a sender does not go on (%v)", err)
		}
	}
}

// TestShape checks the classes that Shape creates, and that the neighbours' packets pass them.
func TestShape(t *testing.T) {
	r := build(t, Config{Path: NIC, Containers: Equal(3)})
	testkit.Is(t, "taking nothing away", r.Shape(t.Context(), 0), nil)
	for _, rate := range []uint64{10e6, 20e6} { // the second in place of the first
		must(t, r.Shape(t.Context(), rate))
	}
	run, err := r.Send(t.Context(), Traffic{Kind: UDP, Out: true})
	must(t, err)
	must(t, run.SetRate(load.Flood))
	testkit.AwaitNone(t, func() string {
		if bytes, err := r.Shaped(); err != nil || len(bytes) != 2 || min(bytes[0], bytes[1]) <= 10_000 {
			return fmt.Sprintf("the senders' packets do not go through their two classes: %v (%v)", bytes, err)
		}
		return ""
	})
	must(t, r.Shape(t.Context(), 0))
	if bytes, err := r.Shaped(); err == nil && len(bytes) > 0 {
		t.Errorf("left: %d classes", len(bytes))
	}
}

func TestDrop(t *testing.T) {
	r := build(t, Config{Path: NIC, Containers: Equal(3)})
	run, err := r.Send(t.Context(), Traffic{Kind: Overrun})
	must(t, err)
	must(t, run.SetRate(5000))
	received := func(length time.Duration) (n uint64) {
		var before []load.Reading
		for _, g := range run.Receivers {
			before = append(before, g.Read())
		}
		time.Sleep(length)
		for i, g := range run.Receivers {
			n += g.Read().Since(before[i]).Ops
		}
		return n
	}
	must(t, r.Drop(true))
	// Packets under way may still be received, for as long as the receivers wait for a CPU.
	// Then nothing is received, however much is sent.
	testkit.AwaitNone(t, func() string {
		before := run.Senders[0].Read()
		n := received(300 * time.Millisecond)
		if sent := run.Senders[0].Read().Since(before).Ops; n > 0 || sent < 300 {
			return fmt.Sprintf("%d packets were sent and %d received", sent, n)
		}
		return ""
	})
	must(t, r.Drop(false))
	for _, g := range run.Receivers {
		if !moves(g) {
			t.Error("after dropping nothing is received")
		}
	}
}

func TestLift(t *testing.T) {
	r := build(t, Config{Path: NIC, Containers: Pair(50, 35)})
	for _, lifted := range []bool{true, false} {
		must(t, r.Lift(1, lifted))
		limited := false
		for _, dir := range r.Neighbours()[0].Cgroups() {
			cpus, yes, err := cgroup.CPUQuota(dir)
			limited = limited || err == nil && yes && cpus == 0.35
		}
		if limited == lifted {
			t.Errorf("lifted %v: limited to 0.35 CPUs %v", lifted, limited)
		}
	}
}

// TestSteering checks where the packets are received: on the shared CPU, and at the NIC by the
// queue that Config promises.
func TestSteering(t *testing.T) {
	r := build(t, Config{Path: NIC, Containers: Pair(80, 20)})
	run, err := r.Send(t.Context(), Traffic{Kind: UDP})
	must(t, err)
	recv := run.Receivers[0]
	before := netRx(t)
	run.SetRate(20000)
	counted(t, recv, 5000)
	after := netRx(t)
	if shared := after[SharedCPU] - before[SharedCPU]; shared < 1000 {
		t.Errorf("CPU %d received %d times, CPU %d %d times", SharedCPU, shared, SenderCPU, after[SenderCPU]-before[SenderCPU])
	}
	masks := map[string]string{}
	err = r.Node.Sysfs(func(sys string) error {
		files, err := filepath.Glob(filepath.Join(sys, "class/net", NICDevice, "queues/rx-*/rps_cpus"))
		for _, f := range files {
			data, _ := os.ReadFile(f)
			masks[filepath.Base(filepath.Dir(f))] = strings.TrimSpace(string(data))
		}
		return err
	})
	if err != nil || len(masks) != 2 || masks["rx-0"] != "1" || masks["rx-1"] != "1" {
		t.Errorf("rps_cpus of the NIC: %v (%v)", masks, err)
	}
}

// netRx returns how many packets each CPU has taken from a backlog or a device since boot: the
// first column of softnet_stat, which is hexadecimal.
func netRx(t *testing.T) []uint64 {
	t.Helper()
	data, err := os.ReadFile("/proc/net/softnet_stat")
	must(t, err)
	var counts []uint64
	for line := range strings.Lines(string(data)) {
		var n uint64
		for _, c := range strings.Fields(line)[0] {
			n = n<<4 + uint64(strings.IndexRune("0123456789abcdef", c))
		}
		counts = append(counts, n)
	}
	return counts
}

func TestNewRefuses(t *testing.T) {
	testkit.NeedRoot(t)
	if r, err := New(t.Context(), Config{Path: "pigeon"}); err == nil {
		r.Close()
		t.Error("a rig of pigeons was built")
	}
	// The kernel refuses this quota half way, after the namespaces exist.
	if r, err := New(t.Context(), Config{Containers: Pair(50, 2e12)}); err == nil {
		r.Close()
		t.Error("an impossible quota was taken")
	}
	if left, _ := filepath.Glob(filepath.Join(stateParent, fmt.Sprintf("rig-fl%d-*", os.Getpid()))); len(left) > 0 {
		t.Errorf("left: %v", left)
	}
}

// Shaped returns the bytes that each neighbour's class has let out, in the order of Neighbours; nil
// without Shape.
func (r *Rig) Shaped() (bytes []uint64, err error) {
	err = r.Node.Change(NICDevice, func(h *netlink.Handle, link netlink.Link) error {
		classes, err := h.ClassList(link, netlink.MakeHandle(1, 0))
		if err != nil {
			return err
		}
		slices.SortFunc(classes, func(a, b netlink.Class) int { return int(a.Attrs().Handle) - int(b.Attrs().Handle) })
		for _, c := range classes {
			if s := c.Attrs().Statistics; s != nil {
				bytes = append(bytes, s.Basic.Bytes)
			}
		}
		return nil
	})
	return bytes, err
}
