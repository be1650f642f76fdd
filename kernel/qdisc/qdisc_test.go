package qdisc_test

import (
	"errors"
	"fmt"
	"net"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/kernel/journal"
	"github.com/fairlead-project/fairlead/kernel/netdev"
	"github.com/fairlead-project/fairlead/kernel/qdisc"
)

func TestMain(m *testing.M) {
	if dir := os.Getenv(turnerDir); dir != "" {
		fmt.Println(turnForever(dir))
		os.Exit(1)
	}
	if dir := os.Getenv(dropperDir); dir != "" {
		fmt.Println(dropForever(dir))
		os.Exit(1)
	}
	testkit.Main(m)
}

var must = testkit.Must

// wire is a device to shape, u0, and its other end in a namespace behind it.
type wire struct {
	t       *testing.T
	near    *testkit.NS
	far     *testkit.NS
	ns      *netdev.NS
	h       *netlink.Handle
	u0      netlink.Link
	index   int
	address *net.UDPAddr // of the far end
}

func newWire(t *testing.T) *wire {
	t.Helper()
	w := &wire{t: t, near: testkit.NetNS(t), far: testkit.NetNS(t)}
	for _, ns := range []*testkit.NS{w.near, w.far} { // its devices announce themselves, in packets without a sender
		must(t, ns.Do(func() error { return os.WriteFile("/proc/sys/net/ipv6/conf/all/disable_ipv6", []byte("1"), 0) }))
	}
	testkit.Veth(t, w.near, "u0", w.far, "u1")
	var err error
	w.ns, err = netdev.Open(w.near.Path)
	must(t, err)
	t.Cleanup(func() { w.ns.Close() })
	w.h = w.near.Handle(t)
	w.u0, err = w.h.LinkByName("u0")
	must(t, err)
	w.index = w.u0.Attrs().Index
	must(t, w.h.LinkSetTxQLen(w.u0, 1000)) // like a device of hardware
	fh := w.far.Handle(t)
	u1, err := fh.LinkByName("u1")
	must(t, err)
	// The neighbours are known: a packet that waits for its address counts nowhere.
	w.near.Address(t, "u0", "192.0.2.1/24")
	w.far.Address(t, "u1", "192.0.2.2/24")
	for _, e := range []struct {
		h        *netlink.Handle
		l, other netlink.Link
		next     net.IP
	}{{w.h, w.u0, u1, net.IPv4(192, 0, 2, 2)}, {fh, u1, w.u0, net.IPv4(192, 0, 2, 1)}} {
		must(t, e.h.NeighSet(&netlink.Neigh{
			LinkIndex: e.l.Attrs().Index, IP: e.next, HardwareAddr: e.other.Attrs().HardwareAddr, State: netlink.NUD_PERMANENT,
		}))
	}
	w.address = &net.UDPAddr{IP: net.IPv4(192, 0, 2, 2), Port: 9000}
	return w
}

func (w *wire) device() *qdisc.Device {
	w.t.Helper()
	d, err := qdisc.Open(w.ns, w.index)
	must(w.t, err)
	w.t.Cleanup(func() { d.Close() })
	return d
}

// ours makes the root ours, with classes or without.
func (w *wire) ours(classes ...qdisc.Class) *qdisc.Device {
	w.t.Helper()
	must(w.t, qdisc.Root(w.ns, w.index).Write(qdisc.Ours(qdisc.KindHTB)))
	d := w.device()
	if len(classes) > 0 {
		_, err := d.Bring(qdisc.KindHTB, classes)
		must(w.t, err)
	}
	return d
}

// bring makes the classes of our root, which takes so many changes.
func bring(t *testing.T, d *qdisc.Device, want int, classes ...qdisc.Class) {
	t.Helper()
	if n, err := d.Bring(qdisc.KindHTB, classes); err != nil || n != want {
		t.Fatalf("%d changes, %v; want %d", n, err, want)
	}
}

func (w *wire) root() string {
	w.t.Helper()
	v, err := qdisc.Root(w.ns, w.index).Read()
	must(w.t, err)
	return v
}

const mbit = 1_000_000

func class(minor uint16, rate uint64) qdisc.Class {
	return qdisc.Class{Minor: minor, HTB: qdisc.HTB{Rate: rate, Ceil: 1000 * mbit, Burst: 10000, CBurst: 1000000, Quantum: 3000, Prio: 3}}
}

func TestBring(t *testing.T) {
	testkit.OnKernels(t)
	w := newWire(t)
	d := w.device()
	if _, err := d.Bring(qdisc.KindHTB, []qdisc.Class{class(qdisc.MinorTop, mbit)}); !errors.Is(err, qdisc.ErrNotOurs) {
		t.Fatalf("before the root is ours: %v, want ErrNotOurs", err)
	}
	must(t, qdisc.Root(w.ns, w.index).Write(qdisc.Ours(qdisc.KindHTB)))
	top, rest := class(qdisc.MinorTop, 1000*mbit), class(qdisc.MinorDefault, 1)
	rest.HTB.Rate = 100_000_000_000 // more than 32 bits of bytes
	rest.HTB.Ceil = 100_000_000_000
	bring(t, d, 3, top, rest, class(7, 5*mbit))
	bring(t, d, 0, top, rest, class(7, 5*mbit))
	bring(t, d, 1, top, rest, class(7, 6*mbit))
	bring(t, d, 2, top, rest, class(8, 6*mbit))
	bring(t, d, 0, top, rest, class(8, 6*mbit))

	var minors []string
	list, err := w.h.ClassList(w.u0, 0)
	must(t, err)
	for _, c := range list {
		h := c.(*netlink.HtbClass)
		minors = append(minors, fmt.Sprintf("%x<%x %d", h.Handle, h.Parent, h.Rate))
	}
	slices.Sort(minors)
	want := []string{"666c0008<666cfffe 750000", "666cfffe<ffffffff 125000000", "666cffff<666cfffe 12500000000"}
	testkit.Same(t, "classes", want, minors)
	testkit.Fails(t, "without a top", testkit.Err(d.Bring(qdisc.KindHTB, []qdisc.Class{rest})))
	must(t, w.h.LinkDel(w.u0))
	testkit.Is(t, "device that went", testkit.Err(d.Bring(qdisc.KindHTB, []qdisc.Class{top})), journal.ErrGone)
	testkit.Is(t, "root of a device that went", testkit.Err(qdisc.Root(w.ns, w.index).Read()), journal.ErrGone)
	testkit.Is(t, "queue length of a device that went", testkit.Err(qdisc.QueueLen(w.ns, w.index).Read()), journal.ErrGone)
}

// send sends packets with a priority, from a socket in the near namespace.
func (w *wire) send(priority uint32, n int) { w.sendSized(priority, n, 100) }

// sendSized sends packets with so many bytes of payload.
func (w *wire) sendSized(priority uint32, n, size int) {
	w.t.Helper()
	w.dial(func(c *net.UDPConn) error { return testkit.SendDatagrams(c, n, size) }, unix.SOL_SOCKET, unix.SO_PRIORITY, int(priority))
}

// dial calls fn with a socket of the near namespace, with options: level, name and value of each.
func (w *wire) dial(fn func(*net.UDPConn) error, options ...int) {
	w.t.Helper()
	must(w.t, w.near.Do(func() error {
		c, err := net.DialUDP("udp", nil, w.address)
		if err != nil {
			return err
		}
		defer c.Close()
		if err := testkit.SetSockopts(c, options...); err != nil {
			return err
		}
		return fn(c)
	}))
}

// A packet goes into the class that its priority names, or into the default class if there is no
// such class.
func TestClassByPriority(t *testing.T) {
	testkit.OnKernels(t)
	w := newWire(t)
	d := w.ours(class(qdisc.MinorTop, 1000*mbit), class(qdisc.MinorDefault, mbit), class(5, mbit))
	before, err := d.Stats(qdisc.KindHTB)
	must(t, err)
	w.send(qdisc.Handle|5, 3)
	w.send(qdisc.Handle|6, 4)
	w.send(0x10005, 8)
	w.send(5, 16)
	after, err := d.Stats(qdisc.KindHTB)
	must(t, err)
	testkit.Same(t, "packets of class 5", uint64(3), after[5].Packets-before[5].Packets)
	if n := after[qdisc.MinorDefault].Packets - before[qdisc.MinorDefault].Packets; n < 28 || n > 32 { // and those of the protocols
		t.Errorf("the default has sent %d packets, want 28", n)
	}
	if st, err := qdisc.RootStats(w.ns, w.index); err != nil || st.Packets < 31 || st.Backlog != 0 {
		t.Errorf("the root: %+v, %v; want 31 packets", st, err)
	}
	if after[5].Bytes-before[5].Bytes != 3*142 || after[5].Queued != 0 || after[5].Drops != 0 {
		t.Errorf("class 5: %+v", after[5])
	}
}

// Classes change while packets wait in them, and go with packets in them: all packets arrive.
func TestNothingIsLostByAChange(t *testing.T) {
	testkit.OnKernels(t)
	w := newWire(t)
	classes := []qdisc.Class{class(qdisc.MinorTop, 1000*mbit), class(qdisc.MinorDefault, mbit), class(5, mbit)}
	changing := &classes[2].HTB
	changing.Burst, changing.CBurst = 2000, 2000
	// 14 packets at once, then three in two seconds: they come faster than that on any machine.
	slow := func(i int) {
		changing.Rate, changing.Ceil, changing.Prio = 1600+uint64(i)*8, 1600+uint64(i)*8, uint32(i%8)
	}
	slow(0)
	d := w.ours(classes...)
	var server *net.UDPConn
	must(t, w.far.Do(func() (err error) {
		server, err = net.ListenUDP("udp", w.address)
		return err
	}))
	defer server.Close()
	w.send(0, 1)
	const packets = 40
	arrived := make(chan int)
	go func() {
		got, b := 0, make([]byte, 2000)
		for got < packets+1 {
			if _, err := server.Read(b); err != nil { // the deadline
				break
			}
			got++
		}
		arrived <- got
	}()
	for i := range 20 {
		w.send(qdisc.Handle|5, packets/20)
		slow(i + 1)
		bring(t, d, 1, classes...)
	}
	st, err := d.Stats(qdisc.KindHTB)
	must(t, err)
	if st[5].Queued <= packets/5 {
		t.Fatalf("%d packets wait of %d, too few to show anything", st[5].Queued, packets)
	}
	changing.Rate, changing.Ceil = 64_000, 64_000
	bring(t, d, 1, classes...)
	for { // no more than it sends in the time that a removed class gets
		st, err := d.Stats(qdisc.KindHTB)
		must(t, err)
		if st[5].Queued <= 2 { // which takes 35 ms of the 200
			break
		}
		time.Sleep(time.Millisecond)
	}
	bring(t, d, 1, classes[:2]...)
	must(t, server.SetReadDeadline(time.Now().Add(20*time.Second)))
	got := <-arrived
	testkit.Same(t, "packets arrived", packets+1, got)
}

func TestOpenKnob(t *testing.T) {
	testkit.OnKernels(t)
	w := newWire(t)
	find := netdev.NewFinder("/proc", time.Now)
	w.near.Bind(t)
	for _, k := range []journal.Knob{qdisc.Root(w.ns, w.index), qdisc.QueueLen(w.ns, w.index), qdisc.ForwardPriority("/proc", w.ns)} {
		again, err := qdisc.OpenKnob("/proc", find, k.Ref())
		must(t, err)
		a, err1 := k.Read()
		b, err2 := again.Read()
		if a != b || err1 != nil || err2 != nil || again.Ref() != k.Ref() {
			t.Errorf("%v: %q %v, opened again %q %v", k.Ref(), a, err1, b, err2)
		}
		must(t, again.(interface{ Close() error }).Close())
	}
	forward := qdisc.ForwardPriority("/proc", w.ns)
	must(t, forward.Write("0"))
	testkit.Gives(t, "forward priority", "0")(forward.Read())
	if v, err := os.ReadFile("/proc/sys/net/ipv4/ip_forward_update_priority"); err != nil || string(v) != "1\n" {
		t.Errorf("our own namespace: %q, %v", v, err)
	}
	for _, bad := range []string{"qdisc ", "qdisc 1/2/3", "other 1/2", "tc-filter 1/2", "tc-filter 1/2/ingress", "tc-filter 1/2/ingress/", "tc-filter 1/2/forward/a", "tc-filter 1/2/egress/a/b"} {
		kind, object, _ := strings.Cut(bad, " ")
		if k, err := qdisc.OpenKnob("/proc", find, journal.Ref{Kind: kind, Object: object}); err == nil || errors.Is(err, journal.ErrGone) {
			t.Errorf("open %s: %v, %v; want an error that is not ErrGone", bad, k, err)
		}
	}
	testkit.Fails(t, "write nonsense", qdisc.Root(w.ns, w.index).Write("nonsense"), "nonsense")
	testkit.Fails(t, "write of an empty tree", qdisc.Root(w.ns, w.index).Write("tree []"))
}
