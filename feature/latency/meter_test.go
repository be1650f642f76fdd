package latency

import (
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/feature"
	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/internal/testkit/faults"
	"github.com/fairlead-project/fairlead/internal/testkit/topology"
	"github.com/fairlead-project/fairlead/kernel"
	"github.com/fairlead-project/fairlead/kernel/journal"
	"github.com/fairlead-project/fairlead/kernel/probe"
	"github.com/fairlead-project/fairlead/lab/load"
	"github.com/fairlead-project/fairlead/lab/sandbox"
	"github.com/fairlead-project/fairlead/policy"
	"github.com/fairlead-project/fairlead/tenant/identity"
)

func TestMain(m *testing.M) {
	topology.Reexec(faults.Reexec(topology.Subject(subject)))
	testkit.Main(m)
}

var must = testkit.Must

// Nothing is in the kernel but between open and close.
func TestMeter(t *testing.T) {
	testkit.NeedRoot(t)
	who, err := identity.Open("/proc")
	must(t, err)
	defer who.Close()
	m, err := openMeter(1, who.Maps())
	must(t, err)
	must(t, m.add(1))
	all, err := m.read(1)
	must(t, err)
	testkit.Same(t, "seen", uint64(0), all[Egress][TCP].Seen)
	must(t, m.remove(1))
	must(t, m.close())
}

// The busiest CPU decides, however many there are, also when its counter has wrapped around. A look
// is as long as it takes to see twice the budget.
func TestFlood(t *testing.T) {
	was, now := make(map[int]uint32), make(map[int]uint32)
	for cpu := range uint32(64) {
		was[int(cpu)] = ^uint32(0) - cpu
		now[int(cpu)] = was[int(cpu)] + 100 + cpu
	}
	now[100] = 1 << 30 // since its last reading it has come online
	testkit.Same(t, "packets", float64(163), busiest(was, now))
	const budget = 5000
	for rate, want := range map[float64]time.Duration{0: look, 2 * budget: look, 20 * budget: look, 40 * budget: look / 2, 200 * budget: look / 10} {
		if got := lookFor(rate, budget); got != want {
			t.Errorf("looks for %v at %v/s, want %v", got, rate, want)
		}
	}
}

// attached returns the numbers of attached programs.
func (m *meter) attached() (programs, sockets int) {
	for _, s := range m.sockets {
		if s.link != nil {
			sockets++
		}
	}
	return len(m.links), sockets
}

func subject(s topology.Spec, _ *journal.Journal) (feature.Feature, error) {
	who, err := identity.Open("/proc")
	if err != nil {
		return nil, err
	}
	return New(Config{
		Host:    feature.Host{Roots: kernel.Default(), Identity: who, NetNS: s.NetNS, Containers: topology.Running(s.Targets)},
		Uplinks: []string{"nic0"}, Budget: 1 << 20,
	})
}

// Each call to the kernel fails once.
func TestFaults(t *testing.T) {
	testkit.Later(t)
	t.Parallel()
	h, _, c := newBridged(t)
	on := true
	spec := topology.Spec{NetNS: h.ns.NetNS(), Dir: t.TempDir(), Targets: []policy.Target{{Container: c, Settings: policy.Settings{Latency: &on}}}}
	faults.Sweep(t, spec.Rig(t, func() string { return h.Net(h.ns) }),
		faults.Case{Op: "apply 0", Undo: []string{"remove 0"}},
		faults.Case{Op: "remove 0", From: []string{"apply 0"}},
		faults.Case{Op: "keep", From: []string{"apply 0"}, Undo: []string{"remove 0"}},
		faults.Case{Op: "measure", From: []string{"apply 0"}, Undo: []string{"remove 0"}, Reads: true},
	)
}

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

// newBridged is a host with one container, behind its bridge.
func newBridged(t testing.TB) (h *host, web *sandbox.Box, c container.Container) {
	t.Helper()
	h = newHost(t)
	h.bridge()
	web, c = h.add("web", "10.66.0.2/24", h.ns)
	return h, web, c
}

// newWeb is newBridged, and measures the container.
func newWeb(t testing.TB) (h *host, web *sandbox.Box, c container.Container) {
	t.Helper()
	h, web, c = newBridged(t)
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

// read returns the counters of a container.
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

// stamps returns the kernel's state of packets in flight.
func (h *host) stamps() (keys *ebpf.Variable, stamps *ebpf.Map) {
	h.T.Helper()
	var maps struct {
		Keys   *ebpf.Variable `ebpf:"fl_keys"`
		Stamps *ebpf.Map      `ebpf:"fl_stamps"`
	}
	must(h.T, h.f.meter.object.Load(&maps, nil))
	return maps.Keys, maps.Stamps
}

func now(t *testing.T) uint64 {
	t.Helper()
	var ts unix.Timespec
	must(t, unix.ClockGettime(unix.CLOCK_MONOTONIC, &ts))
	return uint64(ts.Nano())
}

// Where every place is taken, the oldest stamp of a row makes room and is counted. New
// packets are measured all the same.
func TestFull(t *testing.T) {
	h, web, c := newWeb(t)
	h.ask(web, h.wire, "udp", "10.66.0.1:9000", 1)
	h.settled(c, UDP, Egress, 1)
	before := h.read(c).Of(Egress, UDP)
	keys, stamps := h.stamps()
	of := latencyStamp{Slot: uint32(h.f.of(c.ID).slot), Protocol: uint8(UDP)}
	of.At[0] = now(t)
	places := int(stamps.MaxEntries())
	for i := range places {
		must(t, stamps.Put(uint32(i), of))
	}
	taken := make([]uint64, places)
	for i := range taken {
		taken[i] = 8 * uint64(i+1) // of no skb
	}
	must(t, keys.Set(taken))
	h.ask(web, h.wire, "udp", "10.66.0.1:9001", packets)
	h.settled(c, UDP, Egress, before.Matched+packets)
	if got := h.read(c).Of(Egress, UDP).Evicted - before.Evicted; got == 0 || got > 4*packets {
		t.Errorf("%d stamps made room for %d requests", got, packets)
	}
}

// Records for which the buffer has no room are counted as lost, and histograms go on.
func TestLost(t *testing.T) {
	h, web, c := newWeb(t)
	h.f.mu.Lock()
	h.f.of(c.ID).traced = true // without a reader
	err := h.f.follow()
	h.f.mu.Unlock()
	must(t, err)
	h.Load(web, nil, "udp-send", "--to", "10.66.0.1:9000", "--size", "64")
	h.await(func() string {
		r, err := h.f.Read()
		must(t, err)
		if cov := r.Tenants[0].Of(Egress, UDP); r.Lost == 0 || cov.Matched < r.Lost {
			return fmt.Sprintf("%d lost, %+v", r.Lost, cov)
		}
		return ""
	})
}

// held has packets wait at the uplink, and gives where their stamps are.
func (h *host) held(web *sandbox.Box, c container.Container) (at []uint32, stamps *ebpf.Map) {
	h.T.Helper()
	h.ask(web, h.wire, "udp", "10.66.0.1:9000", 1) // addresses are known from here on
	h.settled(c, UDP, Egress, 1)
	h.hold(h.ns, "nic0")
	_, stamps = h.stamps()
	h.Load(web, nil, "udp-send", "--to", "10.66.0.1:9001", "--count", "6", "--size", "1000")
	h.await(func() string {
		at = nil
		var s latencyStamp
		for i := range stamps.MaxEntries() {
			must(h.T, stamps.Lookup(i, &s))
			if s.At[3] > s.At[0] && s.Slot != 0 && s.Protocol == uint8(UDP) {
				at = append(at, i)
			}
		}
		if n := h.read(c).Of(Egress, UDP).Seen; n < 7 {
			return fmt.Sprintf("%d packets of 7 were sent", n)
		}
		return ""
	})
	return at, stamps
}

// A stamp that turns out to be another packet's, as of an skb that was used again, is
// counted as that, and its times nowhere.
func TestReused(t *testing.T) {
	h, web, c := newWeb(t)
	at, stamps := h.held(web, c)
	var s latencyStamp
	for _, i := range at {
		must(t, stamps.Lookup(i, &s))
		s.Check ^= 2
		must(t, stamps.Put(i, s))
	}
	h.await(func() string {
		cov := h.read(c).Of(Egress, UDP)
		if cov.Mismatched == 0 {
			return fmt.Sprintf("no packet has another's stamp: %+v", cov)
		}
		if n := h.read(c).Histogram(Egress, Added, UDP).Count(); n != cov.Matched {
			t.Fatalf("%d packets in the histogram, %+v", n, cov)
		}
		return ""
	})
}

// Stamps from before the programs were detached do not count.
func TestInterrupted(t *testing.T) {
	h, web, c := newWeb(t)
	h.held(web, c)
	h.f.mu.Lock()
	err := h.f.meter.rest()
	before := h.f.of(c.ID).slot
	all, rerr := h.f.meter.read(before)
	if err == nil {
		err = h.f.meter.resume()
	}
	h.f.mu.Unlock()
	must(t, err)
	must(t, rerr)
	h.await(func() string {
		cov := h.read(c).Of(Egress, UDP)
		if cov.Matched > all[Egress][UDP].Matched {
			t.Fatalf("packets that were under way are matched: %+v", cov)
		}
		if cov.Unsampled == 0 {
			return fmt.Sprintf("no packet has left: %+v", cov)
		}
		return ""
	})
}

// A flood of a container that is recorded takes no more than its share of the records of a
// second: the rest is counted, and costs the agent nothing.
func TestRecordsOfAFlood(t *testing.T) {
	h, web, c := newWeb(t)
	const each = 335 // MOST_TOLD, in 2^24 ns
	began := time.Now()
	_, ok, err := h.f.Trace(t.Context(), c.ID, false, api.LatencyFilter{Protocol: api.LatencyUDP, Port: 9000}, 1, 0)
	if must(t, err); !ok {
		t.Fatal("not measured")
	}
	h.Load(h.wire, nil, "udp-recv", "--listen", "10.66.0.1:9000")
	h.Load(web, nil, "udp-send", "--to", "10.66.0.1:9000", "--size", "64")
	h.await(func() string {
		out, _, err := h.f.Trace(t.Context(), c.ID, false, api.LatencyFilter{Protocol: api.LatencyUDP, Port: 9000}, 1, 0)
		must(t, err)
		windows := uint64(time.Since(began)>>24) + 2
		if given := out.Next - 1; given > each*windows {
			t.Fatalf("%d records in %d windows of time, want at most %d in each", given, windows, each)
		}
		if out.Lost < 1000 {
			return fmt.Sprintf("%d records, %d lost", out.Next-1, out.Lost)
		}
		return ""
	})
}
