package latency

import (
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"slices"
	"testing"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/feature"
	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/internal/testkit/topology"
	"github.com/fairlead-project/fairlead/kernel"
	"github.com/fairlead-project/fairlead/kernel/probe"
	"github.com/fairlead-project/fairlead/lab/load"
	"github.com/fairlead-project/fairlead/lab/sandbox"
	"github.com/fairlead-project/fairlead/policy"
	"github.com/fairlead-project/fairlead/tenant/identity"
)

// host is a host of its own with an uplink, nic0, to the wire.
type host struct {
	*topology.Host
	ns, wire *sandbox.Box
	f        *Latency
}

func newHost(t testing.TB) *host {
	t.Helper()
	h := &host{Host: topology.New(t)}
	h.ns, h.wire = h.Uplink("lat", "10.66.0.1/24", sandbox.End{})
	// Where br_netfilter has the bridge ask the firewall, that may drop.
	for _, family := range []string{"ip", "ip6"} {
		if err := h.ns.Sysctl("bridge/bridge-nf-call-"+family+"tables", "0"); err != nil && !errors.Is(err, fs.ErrNotExist) {
			t.Fatal(err)
		}
	}
	who, err := identity.Open("/proc")
	must(t, err)
	t.Cleanup(func() { must(t, who.Close()) })
	h.f, err = New(Config{Host: feature.Host{Roots: kernel.Default(), Identity: who, NetNS: h.ns.NetNS()}, Uplinks: []string{"nic0"}, Budget: 1 << 20})
	must(t, err)
	t.Cleanup(func() { must(t, h.f.Close()) })
	if v := h.f.Support(); v.Level != probe.Full {
		t.Fatalf("%+v", v)
	}
	return h
}

// bridge makes nic0 a port of br0: containers are on the wire's network.
func (h *host) bridge() {
	h.T.Helper()
	must(h.T, h.ns.Bridge("br0", netip.MustParsePrefix("10.66.0.254/24")))
	h.Port(h.ns, "nic0")
}

// add makes a container behind the bridge of a box.
func (h *host) add(name, addr string, at *sandbox.Box) (*sandbox.Box, container.Container) {
	h.T.Helper()
	box := h.Create(sandbox.Spec{Name: "lat" + name})
	h.Join(box, addr, at, "h"+name)
	c := h.Describe(box)
	c.Interfaces = []container.Interface{h.Veth(box, "eth0", at, "h"+name)}
	return box, c
}

// newWeb is a host with one measured container, behind its bridge.
func newWeb(t testing.TB) (h *host, web *sandbox.Box, c container.Container) {
	t.Helper()
	h = newHost(t)
	h.bridge()
	web, c = h.add("web", "10.66.0.2/24", h.ns)
	h.measure(true, c)
	return h, web, c
}

// measure turns the feature on or off for containers.
func (h *host) measure(on bool, of ...container.Container) {
	h.T.Helper()
	for _, c := range of {
		must(h.T, h.f.Apply(h.T.Context(), policy.Target{Container: c, Settings: policy.Settings{Latency: &on}}))
	}
}

// read gives what was counted of a container.
func (h *host) read(c container.Container) Tenant {
	h.T.Helper()
	r, err := h.f.Read()
	must(h.T, err)
	i := slices.IndexFunc(r.Tenants, func(t Tenant) bool { return slices.Contains(t.Members, c.ID) })
	if i < 0 {
		h.T.Fatalf("nothing is known of container %v", c.ID)
	}
	return r.Tenants[i]
}

// await waits until want says "".
func (h *host) await(want func() string) {
	h.T.Helper()
	testkit.AwaitNone(h.T, want)
}

// ask has a box make n requests of a protocol to another, one after the other, and
// waits for all replies.
func (h *host) ask(client, server *sandbox.Box, proto, to string, n int) {
	h.T.Helper()
	h.Load(server, nil, "rr-server", "--proto", proto, "--listen", to)
	b, _ := h.Load(client, nil, "rr-client", "--proto", proto, "--to", to, "--conns", "1", "--rate", "1000", "--count", fmt.Sprint(n), "--size", "64")
	h.await(func() string {
		if got := b.Read().Since(load.Reading{}).Ops; got < uint64(n) {
			return fmt.Sprintf("%d of %d requests answered", got, n)
		}
		return ""
	})
}
