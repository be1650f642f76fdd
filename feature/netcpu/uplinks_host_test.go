package netcpu_test

import (
	"cmp"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/kernel"
	"github.com/fairlead-project/fairlead/kernel/cgroup"
	"github.com/fairlead-project/fairlead/kernel/journal"
	"github.com/fairlead-project/fairlead/kernel/netdev"
	"github.com/fairlead-project/fairlead/kernel/probe"
	"github.com/fairlead-project/fairlead/lab/sandbox"
	"github.com/fairlead-project/fairlead/policy"
)

// Bulk TCP gets its super-packets back, and loses them to a flood.
func TestShapeFollowsTraffic(t *testing.T) {
	h := newHost(t, sandbox.CPU{})
	h.apply(h.container, policy.NetCPUIsolate)
	tso := h.Open(h.ns).Offload(h.Index(h.ns, "h0"), netdev.TSO)
	is := func(want string) func() bool {
		return func() bool { got, err := tso.Read(); must(t, err); return got == want }
	}
	if !is(netdev.Off)() {
		t.Fatal("h0 has super-packets at first")
	}
	h.start(h.box, "tcp-recv", "--listen", ":9001")
	h.start(h.wire, "tcp-send", "--to", "10.66.0.2:9001", "--size", "65536")
	until(t, "bulk TCP alone has super-packets", is(netdev.TSO.On()))
	h.Load(h.wire, nil, "udp-send", "--to", "10.66.0.2:9000", "--rate", "60000")
	until(t, "a flood takes them away", is(netdev.Off))
	h.remove(h.container)
}

// A queue with packets for several containers brings more packets for one container than its quota
// pays for, or its weight beside others that go short, while all CPUs are busy. The uplink drops most of
// them and polls by a timer. That ends with the flood.
func TestFloodIsPaced(t *testing.T) {
	testkit.Later(t)
	h := newHost(t, sandbox.CPU{})
	h.needNAPIs()
	must(t, h.netcpu.Close())
	h.feltFrom = 2000
	h.open()
	h.start(h.box, "udp-recv")
	h.othersPackets("200")
	h.busy()
	deferred := func() bool { return h.hosts(netdev.KindDefer) }
	limits := []sandbox.CPU{{Quota: 10 * time.Millisecond, Period: 100 * time.Millisecond}}
	if _, err := cgroup.Waited(h.container.Cgroup.V2); !errors.Is(err, errors.ErrUnsupported) {
		limits = append(limits, sandbox.CPU{Quota: -1, Shares: 102})
	}
	for _, limit := range limits {
		must(t, h.box.Limit(limit))
		h.apply(h.container, policy.NetCPUIsolate)
		_, sender := h.Load(h.wire, nil, "udp-send", "--to", "10.66.0.2:9000")
		until(t, fmt.Sprintf("the flood is paced with %+v", limit), deferred)
		sender.Kill()
		until(t, "polls are prompt again", func() bool { return !deferred() })
	}
	h.remove(h.container)
}

// busy has a neighbour on each CPU that computes.
func (h *host) busy() {
	h.t.Helper()
	for cpu := range runtime.NumCPU() {
		neighbour := h.Create(sandbox.Spec{Name: fmt.Sprint("burns", cpu), CPU: sandbox.CPU{Set: strconv.Itoa(cpu)}})
		h.start(neighbour, "burn")
		h.apply(h.Describe(neighbour), policy.NetCPUObserve)
	}
}

// hosts reports whether the journal has a change of this kind that is the host's and no container's.
func (h *host) hosts(kind string) bool {
	return slices.ContainsFunc(h.journal.Entries(), func(e journal.Entry) bool {
		return e.Ref.Kind == kind && e.Owner.Container == 0
	})
}

// A container makes a namespace with a bridge, and a veth that leads there: devices that poll at
// that bridge are not the host's uplinks.
func TestNoUplinksOfAContainer(t *testing.T) {
	t.Parallel()
	h := newHost(t, sandbox.CPU{})
	child := h.Create(sandbox.Spec{Name: "child"})
	must(t, child.Bridge("br1", netip.Prefix{}))
	h.Wire(
		sandbox.End{Box: child, Name: "c1", Bridge: "br1"},
		sandbox.End{Box: h.box, Name: "eth1", Addr: netip.MustParsePrefix("10.67.0.2/24")})
	h.Wire(
		sandbox.End{Box: h.box, Name: "out0"},
		sandbox.End{Box: child, Name: "port0", Bridge: "br1"})
	there := h.Open(child)
	port := h.Index(child, "port0")
	must(t, there.Offload(port, netdev.GRO).Write(netdev.GRO.On()))

	c := h.container
	c.Interfaces = append(c.Interfaces[:1:1], container.Interface{
		Name: "eth1", Index: h.Index(h.box, "eth1"), Kind: "veth",
		Host: container.HostEnd{NetNS: there.Inode(), NSPath: child.NetNS(), Name: "c1", Index: h.Index(child, "c1"), Master: "br1"},
	})
	lives := h.describe(h.box)
	lives.ID, lives.NetNS, lives.Interfaces = 1, there.Inode(), nil
	for _, is := range []struct {
		what    string
		trusted bool
		lives   bool // another container is in that namespace
		want    string
	}{
		{"found by its processes", false, false, "0"},
		{"mounted where the agent sees it, as a container's are, too", true, true, "0"},
		{"mounted where the agent sees it", true, false, "1"},
	} {
		c.Interfaces[1].Host.Trusted = is.trusted
		if is.lives {
			must(t, h.netcpu.Apply(t.Context(), policy.Target{Container: lives}))
		}
		h.apply(c, policy.NetCPUIsolate)
		if got, err := there.Threaded(port).Read(); err != nil || got != is.want {
			t.Errorf("%s: threaded of the bridge's port is %s (%v), want %s", is.what, got, err, is.want)
		}
		must(t, h.netcpu.Remove(t.Context(), c.ID))
		must(t, h.netcpu.Remove(t.Context(), lives.ID))
	}
}

// A container's own queue is not polled while the container has used up its quota: its packets are
// lost in the queue's ring, and the other queue still delivers a neighbour's.
func TestQueueUnpolled(t *testing.T) {
	testkit.OnKernels(t)
	throttled, err := probe.KthreadsThrottled(kernel.Default())
	must(t, err)
	if !throttled {
		testkit.Skip(t, "kernel does not throttle kernel threads")
	}
	h := newHost(t, sandbox.CPU{})
	h.needNAPIs()
	other, _ := h.join("neighbour", 3)
	// The sender's CPU chooses the queue, as a NIC's steering would.
	must(t, h.wire.SetQueues("wire", "tx", "xps_cpus", func(q int) string { return strconv.Itoa(1 << q) }))
	// Static neighbour entries prevent ARP meanwhile: a request counts as another's packet, and may
	// arrive by the queue that is to be the container's alone.
	for to, box := range map[string]*sandbox.Box{"10.66.0.2": h.box, "10.66.0.3": other} {
		must(t, h.wire.Neighbour("wire", netip.MustParseAddr(to), h.MAC(box, "eth0")))
	}
	h.apply(h.container, policy.NetCPUIsolate)
	h.start(h.box, "udp-recv")
	board := h.start(other, "udp-recv")
	// With a buffer larger than the ring: packets that wait there must not hold the sender back.
	sent := h.startOn(h.wire, []int{0}, "udp-send", "--to", "10.66.0.2:9000", "--rate", "2000", "--buffer", "8388608")
	others := h.startOn(h.wire, []int{1}, "udp-send", "--to", "10.66.0.3:9000", "--rate", "200")
	h.untilThreads("one container's packets alone", payer(h.container), h.uplinkGroup())

	window := func() (lost, received float64) {
		was, a, b, c := lostBy(t, h.wire, "wire"), sent.Read(), others.Read(), board.Read()
		time.Sleep(3 * time.Second)
		lost = float64(lostBy(t, h.wire, "wire")-was) / float64(sent.Read().Since(a).Ops)
		return lost, float64(board.Read().Since(c).Ops) / float64(others.Read().Since(b).Ops)
	}
	until := func(what string, ok func(lost, received float64) bool) {
		t.Helper()
		testkit.AwaitNone(t, func() string {
			lost, received := window()
			seen := fmt.Sprintf("%s: %.0f %% of the container's packets are lost in its ring, %.0f %% of the neighbour's arrive", what, 100*lost, 100*received)
			if t.Log(seen); ok(lost, received) {
				return ""
			}
			return seen
		})
	}
	until("without a quota", func(lost, received float64) bool { return lost < 0.1 && received > 0.9 })
	h.start(h.box, "burn")
	must(t, h.box.Limit(sandbox.CPU{Quota: time.Millisecond, Period: 100 * time.Millisecond}))
	until("with its quota used up", func(lost, received float64) bool { return lost > 0.5 && received > 0.9 })
	must(t, h.box.Limit(sandbox.CPU{Quota: -1}))
	h.untilThreads("with no quota again", payer(h.container), h.uplinkGroup())
	must(t, h.netcpu.Remove(t.Context(), h.container.ID))
}

// lostBy returns how many packets a veth lost to a full ring at its other end.
func lostBy(t *testing.T, b *sandbox.Box, dev string) (n uint64) {
	t.Helper()
	must(t, b.Sysfs(func(sys string) error {
		data, err := os.ReadFile(filepath.Join(sys, "class/net", dev, "statistics/tx_dropped"))
		if err == nil {
			n, err = strconv.ParseUint(strings.TrimSpace(string(data)), 10, 64)
		}
		return err
	}))
	return n
}

// dropPoints returns the devices with early drop, of all namespaces or of one.
func (h *host) dropPoints(netns uint64) (names []string) {
	for _, d := range h.netcpu.InForce().Points {
		if d.By != "" && (netns == 0 || d.Netns == netns) {
			names = append(names, d.Device)
		}
	}
	return names
}

// uplink makes a port of a box's bridge that leads to the wire and polls.
func (h *host) uplink(b *sandbox.Box, name string) {
	h.t.Helper()
	must(h.t, sandbox.Wire(sandbox.End{Box: h.wire, Name: "w" + name}, sandbox.End{Box: b, Name: name, Bridge: "br0"}))
	must(h.t, h.Open(b).Offload(h.Index(b, name), netdev.GRO).Write(netdev.GRO.On()))
}

// follower is a host with an isolated container. Its agent learns of uplinks that come and go.
type follower struct {
	*host
	told chan container.ID
}

func newFollower(t *testing.T) follower {
	f := follower{newHost(t, sandbox.CPU{}), make(chan container.ID, 1000)}
	f.netcpu.Notify(func(id container.ID) { f.told <- id })
	f.apply(f.container, policy.NetCPUIsolate)
	return f
}

// nic plugs a NIC in.
func (f follower) nic(name, addr string) {
	f.t.Helper()
	f.Wire(sandbox.End{Box: f.wire, Name: "w" + name}, sandbox.End{Box: f.ns, Name: name, Addr: netip.MustParsePrefix(addr)})
	must(f.t, f.Open(f.ns).Offload(f.Index(f.ns, name), netdev.GRO).Write(netdev.GRO.On()))
}

// again calls Apply for each reported change.
func (f follower) again() {
	f.t.Helper()
	for len(f.told) > 0 {
		<-f.told
		f.apply(f.container, policy.NetCPUIsolate)
	}
}

// follows waits until exactly the wanted devices are claimed. It calls Apply for each reported change.
func (f follower) follows(what string, want ...string) {
	f.t.Helper()
	testkit.Await(f.t, what, func() bool {
		f.again()
		threads := f.threads()
		return slices.Equal(f.dropPoints(0), want) && !slices.ContainsFunc(want, func(dev string) bool { return threads[dev] == nil })
	})
}

func TestUplinksFollow(t *testing.T) {
	t.Parallel()
	f := newFollower(t)
	f.nic("nic1", "10.70.0.1/24")
	f.follows("a NIC comes", "nic0", "nic1")
	f.nic("nic2", "10.71.0.1/24")
	f.follows("another one", "nic0", "nic1", "nic2")
	f.Port(f.ns, "nic2")
	f.follows("the bridge takes it in", "nic0", "nic1", "nic2")
	must(t, f.ns.Delete("nic1"))
	f.follows("one goes", "nic0", "nic2")
	f.remove(f.container)
}

func TestUplinksOfBondsFollow(t *testing.T) {
	testkit.OnKernels(t)
	t.Parallel()
	f := newFollower(t)
	defer f.remove(f.container)
	add := func(l netlink.Link) error {
		return f.ns.Netlink(func(k *netlink.Handle) error { return k.LinkAdd(l) })
	}
	if err := add(netlink.NewLinkBond(netlink.LinkAttrs{Name: "bond0"})); errors.Is(err, unix.EOPNOTSUPP) {
		testkit.Skip(t, "kernel has no bonding")
	}
	f.nic("nic1", "10.72.0.1/24")
	must(t, f.ns.Change("nic1", func(k *netlink.Handle, port netlink.Link) error {
		bond, err := k.LinkByName("bond0")
		return cmp.Or(err, k.LinkSetDown(port), k.LinkSetMaster(port, bond), k.LinkSetUp(bond), k.LinkSetUp(port))
	}))
	f.follows("a bond gains a member", "nic0", "nic1")
	f.nic("nic2", "10.73.0.1/24")
	must(t, add(&netlink.Vlan{LinkAttrs: netlink.LinkAttrs{Name: "vlan5", ParentIndex: f.Index(f.ns, "nic2")}, VlanId: 5}))
	f.follows("a NIC comes with a VLAN", "nic0", "nic1", "nic2")
}

// The drop points of a deleted namespace go with it, while others stay.
func TestDropPointsOfAGoneNamespace(t *testing.T) {
	t.Parallel()
	h := newHost(t, sandbox.CPU{})
	far := *h
	far.ns = h.Create(sandbox.Spec{Name: "nethost2", Bare: true})
	far.box = h.Create(sandbox.Spec{Name: "receiver2"})
	must(t, far.ns.Bridge("br0", netip.Prefix{}))
	h.uplink(far.ns, "nic2")
	h.Join(far.box, "10.67.0.2/24", far.ns, "h0")
	other := far.describe(far.box)
	netns := other.Interfaces[0].Host.NetNS
	h.apply(h.container, policy.NetCPUIsolate)
	h.apply(other, policy.NetCPUIsolate)
	if got := h.dropPoints(netns); !slices.Equal(got, []string{"nic2"}) {
		t.Fatalf("drop points of the second namespace: %q of %+v", got, h.netcpu.InForce().Points)
	}
	must(t, h.netcpu.Remove(t.Context(), other.ID))
	must(t, far.box.Destroy())
	must(t, far.ns.Destroy())
	h.apply(h.container, policy.NetCPUIsolate)
	if got := h.dropPoints(0); !slices.Equal(got, []string{"nic0"}) {
		t.Errorf("drop points %q once the second namespace has gone", got)
	}
	must(t, h.netcpu.Remove(t.Context(), h.container.ID))
}

// An uplink that no program can be attached to is an error, but the others are still attached, and
// points without a device are still removed.
func TestDropPointsGoOn(t *testing.T) {
	testkit.InFull(t)
	t.Parallel()
	h := newHost(t, sandbox.CPU{})
	h.uplink(h.ns, "nic1") // after nic0 in order
	nic := h.Open(h.ns)
	number := h.Index(h.ns, "nic0")
	for full := false; !full; {
		p, err := testkit.Verdict(ebpf.SchedCLS, "cil_tc", -1)
		must(t, err)
		defer p.Close()
		var l link.Link
		err = nic.Do(func() (err error) {
			l, err = link.AttachTCX(link.TCXOptions{Interface: number, Program: p, Attach: ebpf.AttachTCXIngress})
			return err
		})
		switch {
		case errors.Is(err, ebpf.ErrNotSupported):
			testkit.Skip(t, "kernel has no tcx")
		case errors.Is(err, unix.ERANGE): // as many as a hook takes (BPF_MPROG_MAX)
			full = true
		default:
			must(t, err)
			t.Cleanup(func() { l.Close() })
		}
	}
	target := h.target(policy.NetCPUIsolate)
	if err := h.netcpu.Apply(t.Context(), target); err == nil || !strings.Contains(err.Error(), "uplink nic0: ") {
		t.Errorf("applied with a full hook at nic0: %v", err)
	}
	if got := h.dropPoints(0); !slices.Equal(got, []string{"nic1"}) {
		t.Errorf("drop points %q", got)
	}
	must(t, h.ns.Delete("nic1"))
	if err := h.netcpu.Apply(t.Context(), target); err == nil {
		t.Error("applied with a full hook at nic0")
	}
	if got := h.dropPoints(0); len(got) != 0 {
		t.Errorf("drop points %q once nic1 has gone", got)
	}
	must(t, h.netcpu.Remove(t.Context(), h.container.ID))
}
