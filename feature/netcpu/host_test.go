package netcpu_test

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/fairlead-project/fairlead/feature"

	"golang.org/x/sys/unix"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/feature/netcpu"
	"github.com/fairlead-project/fairlead/hook"
	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/internal/testkit/faults"
	"github.com/fairlead-project/fairlead/internal/testkit/topology"
	"github.com/fairlead-project/fairlead/kernel"
	"github.com/fairlead-project/fairlead/kernel/cgroup"
	"github.com/fairlead-project/fairlead/kernel/journal"
	"github.com/fairlead-project/fairlead/kernel/netdev"
	"github.com/fairlead-project/fairlead/kernel/qdisc"
	"github.com/fairlead-project/fairlead/kernel/sched"
	"github.com/fairlead-project/fairlead/lab/sandbox"
	"github.com/fairlead-project/fairlead/policy"
	"github.com/fairlead-project/fairlead/tenant/identity"
)

func TestMain(m *testing.M) {
	topology.Reexec(faults.Reexec(topology.Subject(subject)))
	testkit.Main(m)
}

// oneCPU is the cpuset of containers with tasks that compute forever beside their NAPI thread. On several
// CPUs such a group can starve everything else for minutes on Linux 6.18 before 6.18.45 (docs/limits.md).
var oneCPU = sandbox.CPU{Set: "0"}

// host is a small host: a bridge in a namespace, an uplink to the
// wire, and one container behind the bridge.
type host struct {
	*topology.Host
	t         *testing.T
	ns, wire  *sandbox.Box
	box       *sandbox.Box
	journal   *journal.Journal
	netcpu    *netcpu.Netcpu
	container container.Container
	others    map[int]bool // earlier NAPI threads
	feltFrom  uint64       // QueueFlood of open
}

// open makes the feature, as an agent does, with early drop in the driver at these uplinks. In a
// guest fewer packets make a queue a container's own, and fewer fill a ring: an emulated CPU may
// have no time for a thousand in a second.
func (h *host) open(xdp ...string) {
	h.t.Helper()
	who, err := identity.Open("/proc")
	if err != nil { // the agent also continues
		h.t.Log(err)
		who = nil
	}
	cfg := netcpu.Config{
		Host: feature.Host{Roots: kernel.Default(), Journal: h.journal, NetNS: h.ns.NetNS(), Identity: who, Ends: hook.Open("/proc", h.journal)},
		XDP:  xdp, QueueFlood: h.feltFrom,
	}
	if testing.Short() {
		cfg.QueueMin, cfg.Ring = 50, 16
	}
	n, err := netcpu.New(cfg)
	must(h.t, err)
	h.t.Cleanup(func() {
		n.Close()
		who.Close()
	})
	h.netcpu = n
}

// restart has another agent follow.
func (h *host) restart() {
	h.t.Helper()
	must(h.t, h.netcpu.Close())
	h.open()
}

// worth returns a packet rate that makes a queue a container's own.
func worth() string {
	if testing.Short() {
		return "200"
	}
	return "3000"
}

func newHost(t *testing.T, cpu sandbox.CPU) *host {
	t.Helper()
	h := &host{Host: topology.New(t), t: t}
	h.ns, h.wire = h.Uplink("net", "10.66.0.1/24", sandbox.End{Bridge: "br0", Queues: 2})
	must(t, sandbox.LikeNIC(sandbox.End{Box: h.ns, Name: "nic0"}, sandbox.End{Box: h.wire, Name: "wire"}))
	h.box = h.Create(sandbox.Spec{Name: "receiver"})
	must(t, h.box.Limit(cpu)) // after its process has started, which takes long with a small quota
	h.Join(h.box, "10.66.0.2/24", h.ns, "h0")

	h.journal = testkit.Journal(t, journal.Open)
	t.Cleanup(func() { // changes that a failed test has left
		h.journal.Restore(kernel.Opener(kernel.Default()), nil)
	})
	h.open()
	h.container = h.describe(h.box)
	h.others = make(map[int]bool)
	list, err := sched.Threads("/proc", "napi/")
	must(t, err)
	for _, th := range list {
		h.others[th.TID] = true
	}
	return h
}

// join makes one more container behind the bridge, with the address 10.66.0.n.
func (h *host) join(name string, n int) (*sandbox.Box, container.Container) {
	h.t.Helper()
	box := h.Create(sandbox.Spec{Name: fmt.Sprint(name, n)})
	end := fmt.Sprint("h", n)
	h.Join(box, fmt.Sprintf("10.66.0.%d/24", n), h.ns, end)
	c := h.Describe(box)
	c.Interfaces = []container.Interface{h.Veth(box, "eth0", h.ns, end)}
	return box, c
}

// describe returns the sandbox as package container would find it.
func (h *host) describe(box *sandbox.Box) container.Container {
	h.t.Helper()
	c := h.Describe(box)
	c.Interfaces = []container.Interface{h.Veth(box, "eth0", h.ns, "h0")}
	return c
}

// target is what policy asks for a container that pays from the start.
func (h *host) target(mode policy.NetCPU) policy.Target {
	return policy.Target{Container: h.container, Settings: policy.Settings{NetCPU: mode, NetCPUSteal: new(float64)}}
}

// apply applies a mode as the agent does, with retries: a new thread cannot be moved before it has
// run, which beside a flood on a busy machine can take longer than an Apply waits; and a program
// stays attached for as long as another process looks at it, so it cannot be attached again at
// once.
func (h *host) apply(c container.Container, mode policy.NetCPU) {
	h.t.Helper()
	target := h.target(mode)
	target.Container = c
	err := h.netcpu.Apply(h.t.Context(), target)
	again := func() bool { return errors.Is(err, unix.EINVAL) || errors.Is(err, unix.EEXIST) }
	for tries := 0; tries < 10 && again(); tries++ {
		h.t.Log(err)
		err = h.netcpu.Apply(h.t.Context(), target)
	}
	must(h.t, err)
}

// state reads everything that isolate may change from the host.
func (h *host) state() map[string]string {
	h.t.Helper()
	inside, outside := h.Open(h.box), h.Open(h.ns)
	eth0, h0, nic0 := h.Index(h.box, "eth0"), h.Index(h.ns, "h0"), h.Index(h.ns, "nic0")
	s := map[string]string{"group": "absent"}
	for name, k := range map[string]journal.Knob{
		"eth0 gro":      inside.Offload(eth0, netdev.GRO),
		"eth0 threaded": inside.Threaded(eth0),
		"eth0 rps":      inside.RPS(eth0, 0),
		"h0 tso":        outside.Offload(h0, netdev.TSO),
		"nic0 threaded": outside.Threaded(nic0),
		"nic0 rps":      outside.RPS(nic0, 1),
		"nic0 rfs":      outside.RFS(nic0, 1),
	} {
		v, err := k.Read()
		must(h.t, err)
		s[name] = v
	}
	weight, err := cgroup.Weight(h.container.Cgroup.CPU)
	must(h.t, err)
	s["weight"] = strconv.FormatUint(weight, 10)
	if _, err := os.Stat(h.uplinkGroup()); err == nil {
		s["group"] = "present"
	}
	return s
}

// A container in the mode isolate is free until it is decided that it pays, and after that. What
// prevents isolation is an error meanwhile.
func TestFree(t *testing.T) {
	t.Parallel()
	h := newHost(t, sandbox.CPU{})
	if _, err := h.netcpu.Meter.Read(); err != nil {
		testkit.Skip(t, "no accounts: it always pays")
	}
	before := h.state()
	free := policy.Target{Container: h.container, Settings: policy.Settings{NetCPU: policy.NetCPUIsolate}}
	pays, back := free, h.target(policy.NetCPUObserve)
	pays.Decided = map[string]time.Time{"fairlead.netcpu": time.Now().Add(time.Hour)}
	back.Decided = pays.Decided
	for _, x := range []struct {
		policy.Target
		threads int
	}{{free, 0}, {pays, 1}, {back, 0}, {pays, 1}, {free, 0}} {
		must(t, h.netcpu.Apply(t.Context(), x.Target))
		if got := h.threads()["eth0"]; len(got) != x.threads {
			t.Errorf("with %+v, decided %v: threads in %q, want %d", x.Settings, x.Decided, got, x.threads)
		}
		if x.threads == 0 {
			same(t, "while it is free", h.state(), before)
		}
	}
	free.Container.HostNetwork = true
	if err := h.netcpu.Apply(t.Context(), free); err == nil || !strings.Contains(err.Error(), "host's network") {
		t.Errorf("in the host's network: %v", err)
	}
	must(t, h.netcpu.Remove(t.Context(), h.container.ID))
}

func TestIsolateAndRemove(t *testing.T) {
	testkit.Smoke(t)
	h := newHost(t, sandbox.CPU{Quota: 20e6, Period: 100e6})
	must(t, h.box.SetQueues("eth0", "rx", "rps_cpus", func(int) string { return "1" }))
	must(t, h.ns.SetQueues("nic0", "rx", "rps_flow_cnt", func(int) string { return "32" }))
	before := h.state()

	lost := h.target(policy.NetCPUIsolate)
	lost.Container.Interfaces = slices.Clone(lost.Container.Interfaces)
	lost.Container.Interfaces[0].Index = 99
	if err := h.netcpu.Apply(t.Context(), lost); err == nil {
		t.Error("a container without its device is isolated")
	}
	must(t, h.netcpu.Remove(t.Context(), h.container.ID))
	same(t, "not isolated", h.state(), before)

	for range 2 { // the second time there is nothing to do
		must(t, h.netcpu.Apply(t.Context(), h.target(policy.NetCPUIsolate)))
	}
	during := h.state()
	for name, want := range map[string]string{
		"eth0 gro": netdev.GRO.On(), "eth0 threaded": "1", "h0 tso": netdev.Off,
		"nic0 threaded": "1", "nic0 rfs": "0", "group": "present",
		"eth0 rps": netdev.CPUMask(nil, before["eth0 rps"]),
	} {
		if during[name] != want {
			t.Errorf("isolated: %s is %q, want %q", name, during[name], want)
		}
	}
	where := h.threads()
	h.pays("isolated", h.container)
	if got := where["nic0"]; len(got) != 2 || got[0] != h.uplinkGroup() || got[1] != h.uplinkGroup() {
		t.Errorf("threads of nic0 are in %q, want the uplink group", got)
	}
	polled := make(map[uint64]time.Time)
	for _, e := range h.journal.Entries() {
		if e.Ref.Kind == netdev.KindThreaded {
			polled[e.Owner.Container] = e.When
		}
	}
	if !polled[0].Before(polled[uint64(h.container.ID)]) {
		t.Errorf("threads poll the devices of the host and the container since %v: a flood would delay the former", polled)
	}

	must(t, h.netcpu.Remove(t.Context(), h.container.ID))
	same(t, "after Remove", h.state(), before)
	h.noThreads("after Remove")
	must(t, h.netcpu.Remove(t.Context(), h.container.ID))
}

// pays checks that a container's cgroup has the thread that polls eth0.
func (h *host) pays(when string, c container.Container) {
	h.t.Helper()
	if got := h.threads()["eth0"]; len(got) != 1 || got[0] != payer(c) {
		h.t.Errorf("%s: threads of eth0 are in %q, want %q", when, got, payer(c))
	}
}

// payer returns the cgroup of the cpu controller with a container's threads.
func payer(c container.Container) string {
	if c.Cgroup.CPU == c.Cgroup.V2 {
		return filepath.Join(c.Cgroup.CPU, "fairlead")
	}
	return c.Cgroup.CPU
}

// threads returns the cpu cgroups of new polling threads, by device. If the slice of a thread is not
// short, it adds the slice: a thread gets its slice only after its place.
func (h *host) threads() map[string][]string {
	h.t.Helper()
	layout, err := cgroup.Detect("/proc", "")
	must(h.t, err)
	where := make(map[string][]string)
	for _, device := range []string{"eth0", "nic0", "nic1", "nic2", "nic3", "h0"} {
		for _, th := range h.polling(device) {
			paths, err := layout.OfPID("/proc", th.TID)
			if ended(err) {
				continue
			}
			must(h.t, err)
			// Some kernels keep a device's threads for as long as it polls, idle and in the root
			// group.
			if paths.CPU != layout.CPU {
				slice, err := sched.Slice("/proc", th).Read()
				if ended(err) {
					continue
				}
				must(h.t, err)
				at := paths.CPU
				if slice != sched.NoSlice && slice != sched.FormatSlice(100*time.Microsecond) {
					at += " with a slice of " + slice + " ns"
				}
				where[device] = append(where[device], at)
			}
		}
	}
	return where
}

// polling returns the threads that poll a device: the ones that the kernel lists or, if it lists
// none, the ones with such a name that appeared after the host.
func (h *host) polling(device string) (threads []sched.Thread) {
	h.t.Helper()
	box := h.ns
	if device == "eth0" {
		box = h.box
	}
	ns, err := netdev.Open(box.NetNS())
	must(h.t, err)
	defer ns.Close()
	i, err := ns.Index(device)
	if errors.Is(err, netdev.ErrNoLink) {
		return nil
	}
	must(h.t, err)
	napis, err := ns.NAPIs(i)
	if errors.Is(err, netdev.ErrNoNAPIList) {
		list, err := sched.Threads("/proc", "napi/"+device+"-")
		must(h.t, err)
		for _, th := range list {
			if !h.others[th.TID] {
				threads = append(threads, th.Thread)
			}
		}
		return threads
	}
	must(h.t, err)
	for _, n := range napis {
		if n.Thread == 0 {
			continue
		}
		th, err := sched.Find("/proc", n.Thread)
		if ended(err) {
			continue
		}
		must(h.t, err)
		threads = append(threads, th)
	}
	return threads
}

// ended reports that a thread ended during a look at it: the kernel releases a stopped thread a
// moment later.
func ended(err error) bool {
	return errors.Is(err, journal.ErrGone) || errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ESRCH)
}

// notes returns the journal's entries except those of the accounts, which exist in every mode.
func (h *host) notes() []journal.Entry {
	return slices.DeleteFunc(h.journal.Entries(), func(e journal.Entry) bool {
		return e.Ref.Kind == qdisc.KindFilter && strings.Contains(e.Ref.Object, "/stamp_")
	})
}

// nothing checks that there are no such entries.
func (h *host) nothing(when string) {
	h.t.Helper()
	testkit.None(h.t, "journal "+when, h.notes())
}

// noThreads checks in addition that no thread is in a cgroup.
func (h *host) noThreads(when string) {
	h.t.Helper()
	h.nothing(when)
	if got := h.threads(); len(got) != 0 {
		h.t.Errorf("%s: threads in %v", when, got)
	}
}

// remove removes a container, after which there is nothing left of it in the journal.
func (h *host) remove(c container.Container) {
	h.t.Helper()
	must(h.t, h.netcpu.Remove(h.t.Context(), c.ID))
	h.nothing("after Remove")
}

// uplinkGroup is the cgroup that the feature makes for the threads of nic0.
func (h *host) uplinkGroup() string {
	l, err := cgroup.Detect("/proc", "")
	must(h.t, err)
	return filepath.Join(l.CPU, "fairlead-uplink-"+strconv.FormatUint(h.Open(h.ns).Inode(), 10))
}

var must = testkit.Must
