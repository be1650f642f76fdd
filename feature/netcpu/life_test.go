package netcpu_test

import (
	"context"
	"errors"
	"fmt"
	"math"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/feature/netcpu"
	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/kernel"
	"github.com/fairlead-project/fairlead/kernel/cgroup"
	"github.com/fairlead-project/fairlead/kernel/netdev"
	"github.com/fairlead-project/fairlead/kernel/probe"
	"github.com/fairlead-project/fairlead/kernel/sched"
	"github.com/fairlead-project/fairlead/lab/load"
	"github.com/fairlead-project/fairlead/lab/sandbox"
	"github.com/fairlead-project/fairlead/policy"
)

// A container that ends while it is isolated leaves nothing, and its cgroup can be removed, with or
// without threads.
func TestContainerEnds(t *testing.T) {
	testkit.InFull(t)
	h := newHost(t, sandbox.CPU{})
	must(t, h.netcpu.Apply(t.Context(), h.target(policy.NetCPUIsolate)))
	dir := h.container.Cgroup.CPU
	if got := len(h.threads()["eth0"]); got != 1 {
		t.Fatalf("%d threads of eth0, want 1", got)
	}

	// As after a SIGKILL: the process has gone, cgroup and namespace have not.
	kill(t, h.box)
	must(t, h.netcpu.Remove(t.Context(), h.container.ID))
	must(t, h.box.Destroy())
	if _, err := os.Stat(dir); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("cgroup of the container: %v, want it removed", err)
	}
	h.nothing("in the end")

	// The engine has given up on the cgroups before Remove: the thread was in them. Of v2, TestTidy
	// has names as engines give them.
	for i, closes := range []bool{false, true} {
		box, c := h.join("given-up", 3+i)
		in := c.Cgroup
		if in.V2 == in.CPU {
			break
		}
		h.apply(c, policy.NetCPUIsolate)
		kill(t, box)
		until(t, "the engine removes the cgroup without threads", func() bool { return os.Remove(in.V2) == nil })
		if err := os.Remove(in.CPU); err == nil {
			t.Fatal("the engine could remove the cgroup with the thread")
		}
		must(t, h.netcpu.Remove(t.Context(), c.ID))
		if closes {
			h.restart()
		}
		for _, d := range []string{in.CPU, in.CPUSet} {
			until(t, d+" is removed", func() bool { _, err := os.Stat(d); return errors.Is(err, os.ErrNotExist) })
		}
	}

	// The other order: everything has gone by itself before Remove.
	box, c := h.join("gone", 5)
	must(t, box.Limit(sandbox.CPU{Quota: 100e6, Period: 100e6}))
	h.apply(c, policy.NetCPUIsolate)
	kill(t, box)
	h.vacate(c.Cgroup)
	h.remove(c)
}

// kill ends the process of a box, and waits for its end.
func kill(t *testing.T, b *sandbox.Box) {
	t.Helper()
	must(t, unix.Kill(b.PID, unix.SIGKILL))
	until(t, "it has ended", func() bool { _, err := os.Readlink(fmt.Sprintf("/proc/%d/exe", b.PID)); return err != nil })
}

// vacate removes the cgroups of a container, as an engine does that finds kernel threads in them:
// the threads go to the root group.
func (h *host) vacate(c container.Cgroup) {
	h.t.Helper()
	layout, err := cgroup.Detect("/proc", "")
	must(h.t, err)
	for dir, root := range map[string]string{c.CPU: layout.CPU, c.CPUSet: layout.CPUSet, c.V2: layout.V2} {
		for _, d := range []string{filepath.Join(dir, "fairlead"), dir} {
			procs, err := os.ReadFile(filepath.Join(d, "cgroup.procs"))
			if errors.Is(err, os.ErrNotExist) {
				continue
			}
			must(h.t, err)
			for _, tid := range strings.Fields(string(procs)) {
				must(h.t, os.WriteFile(filepath.Join(root, "cgroup.procs"), []byte(tid), 0))
			}
			until(h.t, d+" can be removed", func() bool { return os.Remove(d) == nil })
		}
	}
}

func TestApplyRefuses(t *testing.T) {
	h := newHost(t, sandbox.CPU{})
	if err := h.netcpu.Apply(t.Context(), h.target("quickly")); err == nil {
		t.Error("a mode that there is not is applied")
	}
	if _, err := h.netcpu.Meter.Read(); !errors.Is(err, netcpu.ErrNoAccounts) {
		must(t, h.netcpu.Apply(t.Context(), h.target(policy.NetCPUAuto)))
	} else if err := h.netcpu.Apply(t.Context(), h.target(policy.NetCPUAuto)); !errors.Is(err, netcpu.ErrNoAccounts) {
		t.Errorf("auto without accounts: %v", err)
	}
	refused := func(why string, change func(*container.Container)) {
		t.Helper()
		target := h.target(policy.NetCPUIsolate)
		target.Container.Interfaces = append([]container.Interface(nil), target.Container.Interfaces...)
		change(&target.Container)
		if err := h.netcpu.Apply(t.Context(), target); err == nil {
			t.Errorf("%s: no error", why)
		} else {
			t.Logf("%s: %v", why, err)
		}
	}
	refused("host network", func(c *container.Container) { c.HostNetwork = true })
	refused("macvlan", func(c *container.Container) {
		c.Interfaces[0].Kind = "macvlan"
		c.Interfaces[0].Host = container.HostEnd{}
	})
	refused("host end in a namespace that is hidden", func(c *container.Container) { c.Interfaces[0].Host = container.HostEnd{} })
	refused("namespace that has gone", func(c *container.Container) { c.NetNS, c.PID = 1, 0 })
	refused("unknown cgroup", func(c *container.Container) { c.Cgroup.CPU = "" })
	h.nothing("after refusals")
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := h.netcpu.Apply(ctx, h.target(policy.NetCPUIsolate)); !errors.Is(err, context.Canceled) {
		t.Errorf("cancelled: %v", err)
	}

	// Packets that cannot all be accounted for are no reason not to isolate. The status names the gap.
	if _, err := h.netcpu.Meter.Read(); err == nil {
		target := h.target(policy.NetCPUIsolate)
		gone := container.Interface{Name: "gone0", Index: 99, Kind: "macvlan", Host: container.HostEnd{NetNS: 1, Index: 1}}
		target.Container.Interfaces = append(target.Container.Interfaces[:1:1], gone)
		if err := h.netcpu.Apply(t.Context(), target); err == nil || !strings.Contains(err.Error(), "observe") {
			t.Errorf("a device that is not there: %v, want an error about observing", err)
		}
		h.pays("isolated", h.container)
	}
	h.remove(h.container)
}

// If a quota does not stop the thread, packets are dropped instead: for its own group's quota, or
// for that of a group above it, like a pod's.
func TestFloodBeyondQuota(t *testing.T) {
	testkit.InFull(t)
	throttled, err := probe.KthreadsThrottled(kernel.Default())
	must(t, err)
	if throttled {
		testkit.Skip(t, "kernel throttles kernel threads")
	}
	h := newHost(t, sandbox.CPU{})
	// Before the quota, with which they would not start within the time of a test.
	board := h.start(h.box, "udp-recv")
	h.start(h.wire, "udp-send", "--to", "10.66.0.2:9000")
	// The group of the box becomes the pod of a group below it.
	pod := h.container.Cgroup.CPU
	own, v2 := filepath.Join(pod, "own"), pod == h.container.Cgroup.V2
	must(t, os.Mkdir(own, 0o755))
	pids, err := cgroup.Procs(pod, math.MaxInt)
	must(t, err)
	for _, pid := range pids {
		must(t, os.WriteFile(filepath.Join(own, "cgroup.procs"), []byte(strconv.Itoa(pid)), 0))
	}
	if h.container.Cgroup.CPU = own; v2 {
		h.container.Cgroup.V2 = own
		must(t, os.WriteFile(filepath.Join(pod, "cgroup.subtree_control"), []byte("+cpu"), 0))
	}
	for _, dir := range []string{own, pod} {
		knob, _ := cgroup.Quota(dir, v2, 0, 0)
		none, err := knob.Read()
		must(t, err)
		t.Cleanup(func() { must(t, knob.Write(none)) })
		// With the first quota an emulated CPU may need all of it for the packet that passes each
		// millisecond, and have no time to receive. The right quota depends on the machine: each one
		// gets some seconds.
		both := func(quota time.Duration) bool {
			_, value := cgroup.Quota(dir, v2, quota, 100*time.Millisecond)
			must(t, knob.Write(value))
			h.apply(h.container, policy.NetCPUIsolate)
			dropped, was := h.beyond(), board.Read()
			for end := time.Now().Add(4 * time.Second); time.Now().Before(end); time.Sleep(50 * time.Millisecond) {
				if h.beyond() > dropped && board.Read().Since(was).Ops > 0 {
					return true
				}
			}
			return false
		}
		quotas := []time.Duration{5 * time.Millisecond, 20 * time.Millisecond, 50 * time.Millisecond}
		turn := 0
		until(t, "packets are both dropped for the quota of "+dir+", and received", func() bool {
			turn++
			return both(quotas[turn%len(quotas)])
		})
		must(t, knob.Write(none))
	}
}

// beyond returns the number of packets dropped because of a quota.
func (h *host) beyond() (packets uint64) {
	for _, c := range h.netcpu.InForce().Drops {
		packets += c.Beyond
	}
	return packets
}

// start starts a load generator and waits until it runs.
func (h *host) start(b *sandbox.Box, args ...string) *load.Board { return h.startOn(b, nil, args...) }

// startOn is start on some CPUs.
func (h *host) startOn(b *sandbox.Box, cpus []int, args ...string) *load.Board {
	h.t.Helper()
	if testing.Short() && args[0] == "udp-send" {
		args = paced(args)
	}
	board, _ := h.Load(b, cpus, args...)
	return board
}

// paced limits a sender to a rate that is a flood for an emulated CPU. A higher rate only keeps the
// test from running there.
func paced(args []string) []string {
	const most = 5000
	args = slices.Clone(args)
	i := slices.Index(args, "--rate")
	if i < 0 {
		return append(args, "--rate", strconv.Itoa(most))
	}
	if n, err := strconv.Atoi(args[i+1]); err == nil && n > most {
		args[i+1] = strconv.Itoa(most)
	}
	return args
}

// enough returns how many of n packets a test waits for: in a guest a tenth, which takes it as
// long.
func enough(n uint64) uint64 {
	if testing.Short() {
		return n / 10
	}
	return n
}

func same(t *testing.T, when string, got, want map[string]string) {
	t.Helper()
	for name, v := range want {
		if got[name] != v {
			t.Errorf("%s: %s is %q, want %q", when, name, got[name], v)
		}
	}
}

// othersPackets sends packets for no container by all queues of the uplink. A flow uses one queue.
func (h *host) othersPackets(rate string) {
	h.t.Helper()
	var others []string
	for i := range 32 {
		to := fmt.Sprintf("10.66.0.%d", 100+i)
		must(h.t, h.wire.Neighbour("wire", netip.MustParseAddr(to), "02:00:00:00:00:99"))
		others = append(others, to+":9000")
	}
	h.start(h.wire, "udp-send", "--to", strings.Join(others, ","), "--rate", rate)
}

// TestUplinkSteered checks that the threads of an uplink stay on the CPUs of RPS: in the group of
// the uplinks, not while a queue is a container's, and again after that.
func TestUplinkSteered(t *testing.T) {
	testkit.InFull(t)
	testkit.Later(t)
	t.Parallel()
	h := newHost(t, sandbox.CPU{Set: "0"})
	h.needNAPIs()
	must(t, h.ns.SetQueues("nic0", "rx", "rps_cpus", func(int) string { return "2" }))
	before := h.state()
	must(t, h.netcpu.Apply(t.Context(), h.target(policy.NetCPUIsolate)))
	h.untilCPUs("isolated", "1", "1")

	h.start(h.box, "udp-recv")
	send := h.start(h.wire, "udp-send", "--to", "10.66.0.2:9000", "--rate", worth())
	h.untilCPUs("one container's packets alone", "0", "1")

	// Another agent finds the threads so, and knows the CPUs of RPS from the journal.
	h.restart()
	send.SetRate(0)
	must(t, h.netcpu.Apply(t.Context(), h.target(policy.NetCPUIsolate)))
	h.untilCPUs("with another agent", "1", "1")

	// One more gives up what policy no longer asks for. TestFaults has one that goes on with it.
	h.restart()
	must(t, h.netcpu.Apply(t.Context(), h.target(policy.NetCPUObserve)))
	must(t, h.netcpu.Prune(t.Context(), func(container.ID) bool { return true }))
	same(t, "given up", h.state(), before)
	h.noThreads("in the end")
}

// untilCPUs waits until the threads of nic0 may use these CPUs.
func (h *host) untilCPUs(what string, want ...string) {
	h.t.Helper()
	nic := h.Open(h.ns)
	h.untilAll(what+", CPUs", want, func() (got []string) {
		list, err := nic.NAPIs(h.Index(h.ns, "nic0"))
		must(h.t, err)
		for _, napi := range list {
			th, err := sched.Find("/proc", napi.Thread)
			must(h.t, err)
			cpus, err := sched.Affinity("/proc", th).Read()
			must(h.t, err)
			got = append(got, cpus)
		}
		return got
	})
}

// needNAPIs skips a test of queues if the kernel does not report which thread polls which NAPI.
func (h *host) needNAPIs() {
	h.t.Helper()
	nic := h.Open(h.ns)
	if _, err := nic.NAPIs(h.Index(h.ns, "nic0")); errors.Is(err, netdev.ErrNoNAPIList) {
		testkit.Skip(h.t, "kernel does not list napi contexts (before 6.8)")
	}
}

// untilThreads waits until the threads of nic0 are in these cgroups.
func (h *host) untilThreads(what string, want ...string) {
	h.t.Helper()
	h.untilAll(what+", cgroups", want, func() []string { return h.threads()["nic0"] })
}

// untilAll waits until the threads of nic0 have this, in any order.
func (h *host) untilAll(what string, want []string, look func() []string) {
	h.t.Helper()
	slices.Sort(want)
	testkit.AwaitNone(h.t, func() string {
		got := look()
		if slices.Sort(got); slices.Equal(got, want) {
			return ""
		}
		time.Sleep(100 * time.Millisecond) // a look takes milliseconds of the CPUs that others wait for
		return fmt.Sprintf("%s of the threads of nic0: %q, want %q", what, got, want)
	})
}
