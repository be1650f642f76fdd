package traffic_test

import (
	"errors"
	"fmt"
	"maps"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"strconv"
	"testing"
	"time"

	"github.com/fairlead-project/fairlead/feature"

	"golang.org/x/sys/unix"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/feature/traffic"
	"github.com/fairlead-project/fairlead/hook"
	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/internal/testkit/faults"
	"github.com/fairlead-project/fairlead/internal/testkit/topology"
	"github.com/fairlead-project/fairlead/kernel"
	"github.com/fairlead-project/fairlead/kernel/journal"
	"github.com/fairlead-project/fairlead/kernel/probe"
	"github.com/fairlead-project/fairlead/kernel/qdisc"
	"github.com/fairlead-project/fairlead/lab/sandbox"
	"github.com/fairlead-project/fairlead/policy"
	"github.com/fairlead-project/fairlead/tenant/identity"
)

func TestMain(m *testing.M) {
	topology.Reexec(datagramsReexec, faults.Reexec(topology.Subject(subject)))
	testkit.Main(m)
}

const (
	mbit = 1_000_000
	gbit = 1000 * mbit
)

// host is a separate host with an uplink, nic0, to the wire.
type host struct {
	*topology.Host
	t        testing.TB
	ns, wire *sandbox.Box
	apart    *sandbox.Box // with the bridge and the tunnel of the last overlay; nil: they are in ns
	dir      string       // of the journal
	journal  *journal.Journal
	traffic  *traffic.Traffic
	slots    *identity.Identity
	rate     uint64            // of nic0; 0: it is not among the named uplinks
	delays   bool              // always measured
	others   map[string]uint64 // uplinks beside nic0
	nic0     int               // its index
	now      func() time.Time  // nil: time.Now

	containers topology.Containers // nil: none are listed
}

func newHost(t testing.TB, rate uint64) *host {
	t.Helper()
	h := &host{Host: topology.New(t), t: t, dir: t.TempDir(), rate: rate}
	h.ns, h.wire = h.Uplink("tr", "10.66.0.1/24", sandbox.End{})
	h.nic0 = h.Index(h.ns, "nic0")
	return h
}

// newBridged returns a host with a container behind its bridge.
func newBridged(t testing.TB) (h *host, box *sandbox.Box, c container.Container) {
	t.Helper()
	h = newHost(t, gbit)
	h.bridge()
	box, c = h.add("one", "10.66.0.2/24", h.ns)
	return h, box, c
}

// restart takes over from a killed agent.
func (h *host) restart() {
	h.t.Helper()
	must(h.t, h.traffic.Close())
	must(h.t, h.journal.Close())
	h.start()
}

// start makes the journal and the feature, as an agent does.
func (h *host) start() {
	h.t.Helper()
	var err error
	j := testkit.JournalIn(h.t, h.dir, journal.Open)
	h.journal = j
	h.slots, err = identity.Open("/proc")
	must(h.t, err)
	uplinks := make(map[string]uint64)
	maps.Copy(uplinks, h.others)
	if h.rate > 0 {
		uplinks["nic0"] = h.rate
	}
	cfg := traffic.Config{
		Host:    feature.Host{Roots: kernel.Default(), Journal: h.journal, NetNS: h.ns.NetNS(), Identity: h.slots, Ends: hook.Open("/proc", h.journal)},
		Uplinks: uplinks, Delays: h.delays, Now: h.now,
	}
	if h.containers != nil {
		cfg.Containers = h.containers
	}
	h.traffic, err = traffic.New(cfg)
	must(h.t, err)
	if v := h.traffic.Support(); v.Level != probe.Full {
		h.t.Fatalf("%+v", v)
	}
	h.t.Cleanup(func() { // of a failed test
		h.traffic.Close()
		h.slots.Close()
		j.Restore(kernel.Opener(kernel.Default()), nil)
	})
}

// bridge makes nic0 a port of br0: containers are on the wire's network.
func (h *host) bridge() {
	h.t.Helper()
	must(h.t, h.ns.Bridge("br0", netip.Prefix{}))
	h.Port(h.ns, "nic0")
}

// add makes a container behind a bridge in the box at.
func (h *host) add(name, addr string, at *sandbox.Box) (*sandbox.Box, container.Container) {
	h.t.Helper()
	box := h.Create(sandbox.Spec{Name: name})
	h.Join(box, addr, at, "h"+name)
	c := h.describe(box)
	c.Interfaces = []container.Interface{h.Veth(box, "eth0", at, "h"+name)}
	return box, c
}

// describe describes a sandbox as package container would.
func (h *host) describe(box *sandbox.Box) container.Container {
	h.t.Helper()
	c := h.Describe(box)
	c.HostNetwork = c.NetNS == h.Open(h.ns).Inode()
	return c
}

func (h *host) apply(c container.Container, n policy.Net) error {
	return h.traffic.Apply(h.t.Context(), policy.Target{Container: c, Settings: policy.Settings{Egress: n}})
}

// removes removes a container, after which the host must be as before.
func (h *host) removes(before string, id container.ID) {
	h.t.Helper()
	must(h.t, h.traffic.Remove(h.t.Context(), id))
	h.undone(before)
}

// stats returns the counters of a container's class; nil: of the default class.
func (h *host) stats(c *container.Container) qdisc.Stats {
	h.t.Helper()
	return h.counters(h.nic0, c)
}

// counters is stats at a device.
func (h *host) counters(device int, c *container.Container) qdisc.Stats {
	h.t.Helper()
	d, err := qdisc.Open(h.Open(h.ns), device)
	must(h.t, err)
	defer d.Close()
	all, err := d.Stats(qdisc.KindHTB)
	must(h.t, err)
	if c == nil {
		return all[qdisc.MinorDefault]
	}
	return all[uint16(h.slots.Lookup(c.TenantKey()))]
}

// counted waits until a counter has grown by n, and returns its growth. The sender may end before its
// packets reach a class, because a softirq may wait for a CPU. Only lost packets cost the whole wait.
func counted(counter func() uint64, was, n uint64) (grown uint64) {
	return countedFor(20*time.Second, counter, was, n)
}

// countedFor waits at most for patience.
func countedFor(patience time.Duration, counter func() uint64, was, n uint64) (grown uint64) {
	for end := time.Now().Add(patience); ; time.Sleep(5 * time.Millisecond) {
		if grown = counter() - was; grown >= n || time.Now().After(end) {
			return grown
		}
	}
}

// gained returns the growth of a container's class in packets; see counted.
func (h *host) gained(c *container.Container, was, n uint64) uint64 {
	h.t.Helper()
	return counted(func() uint64 { return h.stats(c).Packets }, was, n)
}

// datagrams is the number that send sends: fewer than any queue on their way holds, and many more than
// the protocols add.
const datagrams = 100

// send sends that many datagrams of 100 bytes, from a process of the container.
func (h *host) send(box *sandbox.Box, to string) uint64 {
	h.t.Helper()
	h.sendSized(box, to, datagrams, 100)
	return datagrams
}

// sendSized sends n datagrams of a size, from a process of the container.
func (h *host) sendSized(box *sandbox.Box, to string, n, size int) {
	h.t.Helper()
	p := h.startSending(box, to, n, size)
	must(h.t, p.Wait())
}

// startSending is sendSized without the wait for the process.
func (h *host) startSending(box *sandbox.Box, to string, n, size int) *sandbox.Process {
	h.t.Helper()
	exe, err := os.Executable()
	must(h.t, err)
	cmd := exec.Command(exe, datagramsVerb, to, strconv.Itoa(n), strconv.Itoa(size))
	cmd.Stderr = os.Stderr
	p, err := box.Start(cmd)
	must(h.t, err)
	return p
}

// datagramsVerb makes the test binary send datagrams: address, number, size in bytes.
const datagramsVerb = "datagrams"

func datagramsReexec(args []string) (status int, ok bool) {
	if len(args) != 5 || args[1] != datagramsVerb {
		return 0, false
	}
	n, err1 := strconv.Atoi(args[3])
	size, err2 := strconv.Atoi(args[4])
	c, err3 := net.Dial("udp", args[2])
	err := errors.Join(err1, err2, err3)
	if err == nil {
		err = testkit.SendDatagrams(c, n, size)
	}
	if err != nil {
		fmt.Fprintf(os.Stderr, "send datagrams to %s: %v\n", args[2], err)
		return 1, true
	}
	return 0, true
}

// resolve waits until a datagram passes from one box to another, at the address of to. After that no
// neighbour lookup is needed. The datagram has a separate port, so that no test counts it.
func (h *host) resolve(from, at *sandbox.Box, to string) {
	h.t.Helper()
	const port = "8999"
	addr, _, err := net.SplitHostPort(to)
	must(h.t, err)
	var in net.PacketConn
	must(h.t, at.Do(func() (err error) { in, err = net.ListenPacket("udp", ":"+port); return err }))
	defer in.Close()
	for end := time.Now().Add(time.Minute); time.Now().Before(end); {
		must(h.t, from.Do(func() error {
			out, err := net.Dial("udp", net.JoinHostPort(addr, port))
			if err != nil {
				return err
			}
			defer out.Close()
			return testkit.SendDatagrams(out, 1, 100)
		}))
		must(h.t, in.SetReadDeadline(time.Now().Add(500*time.Millisecond)))
		if _, _, err := in.ReadFrom(make([]byte, 200)); err == nil {
			return
		}
	}
	h.t.Fatalf("nothing gets from %s to %s", from.Name, to)
}

// forge sends datagrams that claim another container's slot, from a process in the box's network but
// outside its cgroup.
func (h *host) forge(box *sandbox.Box, to string, priority uint32, n int) {
	h.t.Helper()
	must(h.t, box.Do(func() error {
		c, err := net.Dial("udp", to)
		if err != nil {
			return err
		}
		defer c.Close()
		return sendAs(c.(*net.UDPConn), priority, n)
	}))
}

// sendAs sends n datagrams with a priority, and a mark, of the sender's choice.
func sendAs(c *net.UDPConn, priority uint32, n int) error {
	err := testkit.SetSockopts(c, unix.SOL_SOCKET, unix.SO_PRIORITY, int(priority), unix.SOL_SOCKET, unix.SO_MARK, int(priority&0xffff))
	if err != nil {
		return err
	}
	return testkit.SendDatagrams(c, n, 100)
}

// listen receives datagrams on port 9000 of the wire.
func (h *host) listen() {
	h.t.Helper()
	must(h.t, h.wire.Do(func() error {
		c, err := net.ListenPacket("udp", ":9000")
		if err == nil {
			h.t.Cleanup(func() { c.Close() })
		}
		return err
	}))
}

// state is everything that the feature may change on the host.
func (h *host) state() string {
	h.t.Helper()
	ns := h.Open(h.ns)
	var out string
	for _, k := range []journal.Knob{qdisc.Root(ns, h.nic0), qdisc.QueueLen(ns, h.nic0), qdisc.ForwardPriority("/proc", ns)} {
		v, err := k.Read()
		must(h.t, err)
		out += fmt.Sprintf("%s %s\n", k.Ref().Kind, v)
	}
	return out
}

// undone checks that the host is as before, and that the journal is empty.
func (h *host) undone(before string) {
	h.t.Helper()
	if h.state() != before || h.ifbs() != 0 || len(h.journal.Entries()) != 0 {
		h.t.Errorf("in the end: %d IFBs\n%swas\n%s%+v", h.ifbs(), h.state(), before, h.journal.Entries())
	}
}

// ipt runs iptables in a box.
func ipt(b *sandbox.Box, args ...string) error {
	return b.Do(func() error { return exec.Command("iptables", args...).Run() })
}

var must = testkit.Must
