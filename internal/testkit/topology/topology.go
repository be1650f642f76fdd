// Package topology builds the hosts through which tests send packets, out of sandboxes: the host
// itself, the outside, containers, and the devices between them. Everything is removed when the
// test ends.
//
// Tests of packages above package sandbox use it. Tests of the packages below have the bare
// namespaces of package testkit. It starts no agent and no feature, and assumes nothing about them.
package topology

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/kernel/cgroup"
	"github.com/fairlead-project/fairlead/kernel/netdev"
	"github.com/fairlead-project/fairlead/lab/load"
	"github.com/fairlead-project/fairlead/lab/sandbox"
)

// Reexec runs this program's part inside a sandbox or as a load generator, or the part that one of
// others runs for the program's arguments, and exits. It returns if the program was started as none
// of these. TestMain calls it first.
func Reexec(others ...func(args []string) (status int, ok bool)) {
	for _, reexec := range append(others, sandbox.Reexec, load.Reexec) {
		if status, ok := reexec(os.Args); ok {
			os.Exit(status)
		}
	}
}

// Host is what a test builds. Its methods fail the test on an error.
type Host struct {
	T         testing.TB
	Sandboxes *sandbox.Host
}

// New creates an empty host. It needs root, and skips t without.
func New(t testing.TB) *Host {
	t.Helper()
	testkit.NeedRoot(t)
	// Socket paths below it have 108 bytes at most, which t.TempDir can exceed.
	dir, err := os.MkdirTemp("/tmp", "fltop-")
	testkit.Must(t, err)
	t.Cleanup(func() { os.RemoveAll(dir) })
	s, err := sandbox.New(dir)
	testkit.Must(t, err)
	t.Cleanup(func() { testkit.Must(t, s.Close()) })
	return &Host{T: t, Sandboxes: s}
}

// Create makes a sandbox. Its name ends with what no other Host's have, so that tests can run side by
// side.
func (h *Host) Create(spec sandbox.Spec) *sandbox.Box {
	h.T.Helper()
	spec.Name += strings.TrimPrefix(filepath.Base(h.Sandboxes.Dir()), "fltop")
	b, err := h.Sandboxes.Create(spec)
	testkit.Must(h.T, err)
	return b
}

// Uplink creates the host's network namespace and the outside, two bare sandboxes called PREFIXhost
// and PREFIXwire, and a veth between them. Its end wire has an address. nic sets address, bridge
// and queues of its end nic0; Uplink creates the bridge, too.
func (h *Host) Uplink(prefix, wireAddr string, nic sandbox.End) (host, wire *sandbox.Box) {
	h.T.Helper()
	host = h.Create(sandbox.Spec{Name: prefix + "host", Bare: true})
	wire = h.Create(sandbox.Spec{Name: prefix + "wire", Bare: true})
	if nic.Bridge != "" {
		testkit.Must(h.T, host.Bridge(nic.Bridge, netip.Prefix{}))
	}
	nic.Box, nic.Name = host, "nic0"
	h.Wire(sandbox.End{Box: wire, Name: "wire", Addr: netip.MustParsePrefix(wireAddr), Queues: nic.Queues}, nic)
	return host, wire
}

// Wire joins two sandboxes by a veth.
func (h *Host) Wire(a, b sandbox.End) {
	h.T.Helper()
	testkit.Must(h.T, sandbox.Wire(a, b))
}

// Join connects a container to the bridge br0 of a box. Its device eth0 has the address, and the
// box's end is called hostEnd.
func (h *Host) Join(b *sandbox.Box, addr string, at *sandbox.Box, hostEnd string) {
	h.T.Helper()
	h.Wire(sandbox.End{Box: at, Name: hostEnd, Bridge: "br0"}, sandbox.End{Box: b, Name: "eth0", Addr: netip.MustParsePrefix(addr)})
}

// Describe returns a sandbox as package container would describe it, except for its interfaces.
func (h *Host) Describe(b *sandbox.Box) container.Container {
	h.T.Helper()
	layout, err := cgroup.Detect("/proc", "")
	testkit.Must(h.T, err)
	paths, err := layout.OfPID("/proc", b.PID)
	testkit.Must(h.T, err)
	id, err := cgroup.ID(paths.V2)
	testkit.Must(h.T, err)
	return container.Container{
		ID: container.ID(id), Name: b.Name, PID: b.PID, NetNS: h.Open(b).Inode(),
		Cgroup: container.Cgroup{V2: paths.V2, CPU: paths.CPU, CPUSet: paths.CPUSet, IO: paths.IO},
	}
}

// Veth describes a device of a container with its host end, a port of the bridge br0 of a box.
func (h *Host) Veth(b *sandbox.Box, dev string, at *sandbox.Box, hostEnd string) container.Interface {
	h.T.Helper()
	return container.Interface{
		Name: dev, Index: h.Index(b, dev), Kind: "veth",
		Host: container.HostEnd{
			NetNS: h.Open(at).Inode(), NSPath: at.NetNS(), Name: hostEnd, Index: h.Index(at, hostEnd), Master: "br0", Trusted: true,
		},
	}
}

// Open opens the network namespace of a box until the test ends.
func (h *Host) Open(b *sandbox.Box) *netdev.NS {
	h.T.Helper()
	ns, err := netdev.Open(b.NetNS())
	testkit.Must(h.T, err)
	h.T.Cleanup(func() { ns.Close() })
	return ns
}

// Index returns the index of a device of a box.
func (h *Host) Index(b *sandbox.Box, dev string) int {
	h.T.Helper()
	ns, err := netdev.Open(b.NetNS())
	testkit.Must(h.T, err)
	defer ns.Close() // it is asked for in loops
	index, err := ns.Index(dev)
	testkit.Must(h.T, err)
	return index
}

// MAC returns the hardware address of a device of a box.
func (h *Host) MAC(b *sandbox.Box, dev string) string {
	h.T.Helper()
	l, err := h.Open(b).Link(h.Index(b, dev))
	testkit.Must(h.T, err)
	return l.MAC
}

// Netlink runs fn with an rtnetlink socket of a box's namespace.
func (h *Host) Netlink(b *sandbox.Box, fn func(*netlink.Handle) error) {
	h.T.Helper()
	testkit.Must(h.T, b.Netlink(fn))
}

// Change runs fn with a device of a box.
func (h *Host) Change(b *sandbox.Box, dev string, fn func(*netlink.Handle, netlink.Link) error) {
	h.T.Helper()
	testkit.Must(h.T, b.Change(dev, fn))
}

// Address adds an address to a device, without duplicate address detection.
func (h *Host) Address(b *sandbox.Box, dev, addr string) {
	h.T.Helper()
	h.Change(b, dev, func(n *netlink.Handle, l netlink.Link) error {
		a, err := netlink.ParseAddr(addr)
		if err != nil {
			return err
		}
		if a.IP.To4() == nil {
			a.Flags = unix.IFA_F_NODAD
		}
		return n.AddrAdd(l, a)
	})
}

// Route routes packets for a network, in CIDR notation, to a gateway.
func (h *Host) Route(b *sandbox.Box, to, via string) {
	h.T.Helper()
	_, dst, err := net.ParseCIDR(to)
	testkit.Must(h.T, err)
	h.Netlink(b, func(n *netlink.Handle) error {
		return n.RouteAdd(&netlink.Route{Dst: dst, Gw: net.ParseIP(via)})
	})
}

// Port makes a device a port of the bridge br0.
func (h *Host) Port(b *sandbox.Box, dev string) {
	h.T.Helper()
	h.Change(b, dev, func(n *netlink.Handle, l netlink.Link) error {
		br, err := n.LinkByName("br0")
		if err != nil {
			return err
		}
		return n.LinkSetMaster(l, br)
	})
}

// Tunnel creates vx0, an end of a VXLAN with the VNI 42 and the port 4789. The box below sends its
// packets to remote. end sets the device's properties. If dev is not "", the tunnel is bound to
// dev, a device of below.
func (h *Host) Tunnel(below *sandbox.Box, dev, remote string, end sandbox.End) {
	h.T.Helper()
	end.Name = "vx0"
	v := &netlink.Vxlan{LinkAttrs: netlink.NewLinkAttrs(), VxlanId: 42, Port: 4789, Group: net.ParseIP(remote), Learning: true}
	if dev != "" {
		v.VtepDevIndex = h.Index(below, dev)
	}
	testkit.Must(h.T, below.Add(v, end))
}

// Macvlan gives a box a macvlan device on nic0 of the host.
func (h *Host) Macvlan(host *sandbox.Box, end sandbox.End) container.Interface {
	h.T.Helper()
	a := netlink.NewLinkAttrs()
	a.ParentIndex = h.Index(host, "nic0")
	testkit.Must(h.T, host.Add(&netlink.Macvlan{LinkAttrs: a, Mode: netlink.MACVLAN_MODE_BRIDGE}, end))
	return container.Interface{Name: end.Name, Index: h.Index(end.Box, end.Name), Kind: "macvlan"}
}

// Load starts a load generator in a box, on the given CPUs or all, and waits until it is at work.
func (h *Host) Load(b *sandbox.Box, cpus []int, args ...string) (*load.Board, *sandbox.Process) {
	h.T.Helper()
	cmd, board, err := load.Command(args...)
	testkit.Must(h.T, err)
	return board, h.Start(b, cpus, cmd, board)
}

// InGroup starts a load generator in the cgroups of a test, on one CPU or, if that is negative, on
// all, and waits until it is at work.
func InGroup(t testing.TB, cg testkit.CG, cpu int, args ...string) (*load.Board, int) {
	t.Helper()
	cmd, board, err := load.Command(args...)
	testkit.Must(t, err)
	testkit.Must(t, cmd.Start())
	done := make(chan struct{})
	go func() { cmd.Wait(); close(done) }()
	t.Cleanup(func() {
		cmd.Process.Kill()
		<-done
		testkit.Must(t, board.Close())
	})
	if cpu >= 0 {
		var set unix.CPUSet
		set.Set(cpu)
		tasks, err := os.ReadDir(fmt.Sprintf("/proc/%d/task", cmd.Process.Pid))
		testkit.Must(t, err)
		for _, task := range tasks { // the others are made by these
			tid := 0
			fmt.Sscan(task.Name(), &tid)
			testkit.Must(t, unix.SchedSetaffinity(tid, &set))
		}
	}
	cg.Add(t, cmd.Process.Pid)
	testkit.Must(t, load.Await(t.Context(), done, board.Ready))
	return board, cmd.Process.Pid
}

// Start is Load with the command of a generator, which the caller may have changed.
func (h *Host) Start(b *sandbox.Box, cpus []int, cmd *exec.Cmd, board *load.Board) *sandbox.Process {
	h.T.Helper()
	h.T.Cleanup(func() { board.Close() })
	p, err := b.Start(cmd, cpus...)
	testkit.Must(h.T, err)
	h.T.Cleanup(func() { p.Kill(); p.Wait() })
	ctx, cancel := context.WithTimeout(h.T.Context(), 90*time.Second)
	defer cancel()
	testkit.Must(h.T, load.Await(ctx, p.Done(), board.Ready))
	return p
}
