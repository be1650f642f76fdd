package account

import (
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/internal/testkit/topology"
	"github.com/fairlead-project/fairlead/lab/load"
	"github.com/fairlead-project/fairlead/lab/sandbox"
	"github.com/fairlead-project/fairlead/tenant/identity"
)

// lab is a meter with the sandboxes that it watches.
type lab struct {
	*topology.Host
	t        testing.TB
	m        *Meter
	softirqs *testkit.Softirqs
	ids      map[*sandbox.Box]container.ID
	// outside is the tenant of world.
	outside container.ID
	began   Reading
	charged map[container.ID]time.Duration // until then; see charges
}

// exactMeter opens a Meter that does not sample, so it counts every packet. Opening takes long, so
// subtests share it.
func exactMeter(t testing.TB) *Meter {
	t.Helper()
	return openMeter(t, true)
}

func newLab(t testing.TB, m *Meter) *lab {
	t.Helper()
	l := &lab{Host: topology.New(t), m: m, ids: make(map[*sandbox.Box]container.ID)}
	t.Cleanup(func() {
		for _, id := range l.ids {
			must(t, l.m.Forget(id))
		}
	})
	l.begin(t)
	return l
}

// begin starts a test or one of its cases: expect looks at later packets.
func (l *lab) begin(t testing.TB) {
	t.Helper()
	l.t, l.softirqs = t, testkit.WatchSoftirqs(t)
	l.await(func() string {
		l.charged, l.began = l.charges(), l.read()
		if !maps.Equal(l.charges(), l.charged) {
			return "packets come all the time"
		}
		return ""
	})
}

// charges reads the charges that package drop compares with its limits.
func (l *lab) charges() map[container.ID]time.Duration {
	l.t.Helper()
	all := make(map[container.ID]time.Duration)
	for _, id := range l.ids {
		if slot, ok := l.m.Slot(id); ok {
			var ns int64
			must(l.t, l.m.Charges().Lookup(slot, &ns))
			all[id] = time.Duration(ns)
		}
	}
	return all
}

func (l *lab) read() Reading {
	l.t.Helper()
	r, err := l.m.Read()
	must(l.t, err)
	return r
}

// bare makes a network namespace without IPv6, because the test would also count the kernel's own
// packets. See ipv6.
func (l *lab) bare(name string) *sandbox.Box {
	l.t.Helper()
	b := l.Create(sandbox.Spec{Name: "acc-" + name, Bare: true})
	l.ipv6(b, false)
	return b
}

// box makes a container; watch makes it a tenant.
func (l *lab) box(name string) *sandbox.Box {
	l.t.Helper()
	b := l.boxIn(name, nil)
	l.ipv6(b, false)
	return b
}

// boxIn makes a container in the network namespace of another box.
func (l *lab) boxIn(name string, network *sandbox.Box) *sandbox.Box {
	l.t.Helper()
	b := l.Create(sandbox.Spec{Name: "acc-" + name, Network: network})
	var st unix.Stat_t
	must(l.t, unix.Stat(b.Cgroups()[0], &st))
	l.ids[b] = container.ID(st.Ino)
	return b
}

func (l *lab) ipv6(b *sandbox.Box, on bool) {
	l.t.Helper()
	off := map[bool]string{false: "1", true: "0"}[on]
	for _, which := range []string{"all", "default"} {
		for name, value := range map[string]string{"disable_ipv6": off, "accept_dad": "0"} {
			if err := b.Sysctl("ipv6/conf/"+which+"/"+name, value); err != nil && !errors.Is(err, fs.ErrNotExist) {
				l.t.Fatal(err)
			}
		}
	}
}

// device names a device of a box for Watch.
func (l *lab) device(b *sandbox.Box, name string, hostEnd bool) identity.Device {
	l.t.Helper()
	return identity.Device{Netns: l.Open(b).Inode(), Ifindex: l.Index(b, name), HostEnd: hostEnd, Trusted: hostEnd}
}

func (l *lab) watch(b *sandbox.Box, devices ...identity.Device) {
	l.t.Helper()
	in := identity.Tenant{NetNS: l.Open(b).Inode()}
	must(l.t, l.m.Watch(identity.Member{ID: l.ids[b], Tenant: in, Cgroups: []uint64{uint64(l.ids[b])}, Devices: devices}))
}

// world makes a tenant of the namespace outside the host, because its work is also done on this
// machine.
func (l *lab) world(b *sandbox.Box, dev string) {
	l.t.Helper()
	w := l.boxIn("world", b)
	l.outside = l.ids[w]
	l.watch(w, l.device(b, dev, false))
}

// wire connects two boxes by a veth. rps is the mask of CPUs that process b's end. An end with an
// address has a MAC address derived from it, and the other end has a neighbour entry for it.
func (l *lab) wire(a, b sandbox.End, rps string) {
	l.t.Helper()
	for _, e := range []*sandbox.End{&a, &b} {
		if e.Addr.IsValid() {
			e.MAC = mac(e.Addr.Addr())
		}
	}
	l.Wire(a, b)
	for _, e := range [][2]sandbox.End{{a, b}, {b, a}} {
		if e[0].Addr.IsValid() && e[1].Addr.IsValid() {
			must(l.t, e[0].Box.Neighbour(e[0].Name, e[1].Addr.Addr(), e[1].MAC))
		}
	}
	if rps != "" {
		l.rps(b.Box, b.Name, rps)
	}
}

// mac returns the MAC address for an IP address.
func mac(a netip.Addr) string {
	b := a.As4()
	return fmt.Sprintf("02:66:00:00:%02x:%02x", b[2], b[3])
}

func (l *lab) rps(b *sandbox.Box, dev, mask string) {
	l.t.Helper()
	must(l.t, b.SetQueues(dev, "rx", "rps_cpus", func(int) string { return mask }))
}

// gateway sets the default gateway.
func (l *lab) gateway(b *sandbox.Box, via string) {
	l.t.Helper()
	all := "0.0.0.0/0"
	if strings.Contains(via, ":") {
		all = "::/0"
	}
	l.Route(b, all, via)
}

// load starts a generator in a box.
func (l *lab) load(b *sandbox.Box, cpu int, args ...string) *load.Board {
	l.t.Helper()
	board, _ := l.Load(b, []int{cpu}, args...)
	return board
}

// send starts a generator that sends n packets, requests or writes, at a rate at which no queue
// overflows.
func (l *lab) send(b *sandbox.Box, cpu, n int, kind, to string, args ...string) *load.Board {
	l.t.Helper()
	return l.load(b, cpu, slices.Concat([]string{kind, "--to", to, "--count", fmt.Sprint(n), "--rate", "1000", "--size", fmt.Sprint(payload)}, args)...)
}

// packets is the number of packets that a test sends to or from each container. The ring of a veth
// that polls has room for more.
const packets = 200

// payload is the number of bytes of data in each packet.
const payload = 64

// receive starts a generator that receives everything, with a buffer for all of it.
func (l *lab) receive(b *sandbox.Box, cpu int, listen string) *load.Board {
	l.t.Helper()
	return l.load(b, cpu, "udp-recv", "--listen", listen, "--buffer", "33554432")
}

// datagrams sends a test's packets to a receiver on a CPU, and waits until it has them.
func (l *lab) datagrams(from, to *sandbox.Box, cpu int, at string) *load.Board {
	l.t.Helper()
	r := l.receive(to, cpu, ":9000")
	l.send(from, 1, packets, "udp-send", at)
	l.got(r, packets)
	return r
}
