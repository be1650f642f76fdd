package latency

import (
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/fairlead-project/fairlead/bench/load"
	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/kernel"
	"github.com/fairlead-project/fairlead/kernel/cgroup"
	"github.com/fairlead-project/fairlead/kernel/netdev"
	"github.com/fairlead-project/fairlead/kernel/probe"
	"github.com/fairlead-project/fairlead/policy"
	"github.com/fairlead-project/fairlead/sandbox"
)

// host is a host of its own with an uplink, nic0, to the wire.
type host struct {
	t         testing.TB
	sandboxes *sandbox.Host
	ns, wire  *sandbox.Box
	f         *Latency
}

func newHost(t testing.TB) *host {
	t.Helper()
	testkit.NeedRoot(t)
	sh, err := sandbox.New(sandbox.Config{Dir: t.TempDir()})
	must(t, err)
	t.Cleanup(func() { must(t, sh.Close()) })
	h := &host{t: t, sandboxes: sh}
	h.ns, h.wire = h.create(sandbox.Spec{Name: "lathost", Bare: true}), h.create(sandbox.Spec{Name: "latwire", Bare: true})
	// Where br_netfilter has the bridge ask the firewall, that may drop.
	for _, family := range []string{"ip", "ip6"} {
		if err := h.ns.Sysctl("bridge/bridge-nf-call-"+family+"tables", "0"); err != nil && !errors.Is(err, fs.ErrNotExist) {
			t.Fatal(err)
		}
	}
	must(t, sandbox.Wire(
		sandbox.End{Box: h.wire, Name: "wire", Addr: netip.MustParsePrefix("10.66.0.1/24")},
		sandbox.End{Box: h.ns, Name: "nic0"}))
	h.f, err = New(Config{Roots: kernel.Default(), NetNS: h.ns.NetNS(), Uplinks: []string{"nic0"}, Budget: 1 << 20})
	must(t, err)
	t.Cleanup(func() { must(t, h.f.Close()) })
	if v := h.f.Support(); v.Level != probe.Full {
		t.Fatalf("%+v", v)
	}
	return h
}

func (h *host) create(s sandbox.Spec) *sandbox.Box {
	h.t.Helper()
	b, err := h.sandboxes.Create(s)
	must(h.t, err)
	return b
}

// bridge makes nic0 a port of br0: containers are on the wire's network.
func (h *host) bridge() {
	h.t.Helper()
	must(h.t, h.ns.Bridge("br0", netip.MustParsePrefix("10.66.0.254/24")))
	h.change(h.ns, "nic0", func(n *netlink.Handle, nic netlink.Link) error {
		br, err := n.LinkByName("br0")
		if err != nil {
			return err
		}
		return n.LinkSetMaster(nic, br)
	})
}

// change runs fn with a device of a box.
func (h *host) change(b *sandbox.Box, dev string, fn func(*netlink.Handle, netlink.Link) error) {
	h.t.Helper()
	must(h.t, b.Do(func() error {
		n, err := netlink.NewHandle(unix.NETLINK_ROUTE)
		if err != nil {
			return err
		}
		defer n.Close()
		l, err := n.LinkByName(dev)
		if err != nil {
			return err
		}
		return fn(n, l)
	}))
}

func (h *host) device(b *sandbox.Box, name string) (netns uint64, index int) {
	h.t.Helper()
	ns, err := netdev.Open(b.NetNS())
	must(h.t, err)
	defer ns.Close()
	index, err = ns.Index(name)
	must(h.t, err)
	return ns.Inode(), index
}

// add makes a container behind the bridge of a box.
func (h *host) add(name, addr string, at *sandbox.Box) (*sandbox.Box, container.Container) {
	h.t.Helper()
	box := h.create(sandbox.Spec{Name: "lat" + name})
	must(h.t, sandbox.Wire(
		sandbox.End{Box: at, Name: "h" + name, Bridge: "br0"},
		sandbox.End{Box: box, Name: "eth0", Addr: netip.MustParsePrefix(addr)}))
	c := h.describe(box)
	_, inside := h.device(box, "eth0")
	there, index := h.device(at, "h"+name)
	c.Interfaces = []container.Interface{{
		Name: "eth0", Index: inside, Kind: "veth",
		Host: container.HostEnd{NetNS: there, NSPath: at.NetNS(), Name: "h" + name, Index: index, Master: "br0", Trusted: true},
	}}
	return box, c
}

// describe says of a sandbox what package container would find out.
func (h *host) describe(box *sandbox.Box) container.Container {
	h.t.Helper()
	layout, err := cgroup.Detect("/proc", "")
	must(h.t, err)
	paths, err := layout.OfPID("/proc", box.PID)
	must(h.t, err)
	id, err := cgroup.ID(paths.V2)
	must(h.t, err)
	inside, _ := h.device(box, "lo")
	own, _ := h.device(h.ns, "lo")
	return container.Container{
		ID: container.ID(id), Name: box.Name, PID: box.PID, NetNS: inside, HostNetwork: inside == own,
		Cgroup: container.Cgroup{V2: paths.V2},
	}
}

// measure turns the feature on or off for containers.
func (h *host) measure(on bool, of ...container.Container) {
	h.t.Helper()
	for _, c := range of {
		must(h.t, h.f.Apply(h.t.Context(), policy.Target{Container: c, Settings: policy.Settings{Latency: &on}}))
	}
}

// read gives what was counted of a container.
func (h *host) read(c container.Container) Tenant {
	h.t.Helper()
	r, err := h.f.Read()
	must(h.t, err)
	i := slices.IndexFunc(r.Tenants, func(t Tenant) bool { return slices.Contains(t.Members, c.ID) })
	if i < 0 {
		h.t.Fatalf("nothing is known of container %v", c.ID)
	}
	return r.Tenants[i]
}

// await waits until want says "".
func (h *host) await(want func() string) {
	h.t.Helper()
	for end := time.Now().Add(90 * time.Second); ; time.Sleep(5 * time.Millisecond) {
		missing := want()
		if missing == "" {
			return
		}
		if time.Now().After(end) {
			h.t.Fatal(missing)
		}
	}
}

// load starts a generator in a box and waits until it is at work.
func (h *host) load(b *sandbox.Box, args ...string) *load.Board {
	h.t.Helper()
	cmd, board, err := load.Command(args...)
	must(h.t, err)
	h.t.Cleanup(func() { board.Close() })
	p, err := b.Start(cmd)
	must(h.t, err)
	h.t.Cleanup(func() { p.Kill(); p.Wait() })
	must(h.t, board.Await(h.t.Context(), p.Done()))
	return board
}

// ask has a box make n requests of a protocol to another, one after the other, and
// waits for all replies.
func (h *host) ask(client, server *sandbox.Box, proto, to string, n int) {
	h.t.Helper()
	h.load(server, "rr-server", "--proto", proto, "--listen", to)
	b := h.load(client, "rr-client", "--proto", proto, "--to", to, "--conns", "1", "--rate", "1000", "--count", fmt.Sprint(n), "--size", "64")
	h.await(func() string {
		if got := b.Read().Since(load.Reading{}).Ops; got < uint64(n) {
			return fmt.Sprintf("%d of %d requests answered", got, n)
		}
		return ""
	})
}
