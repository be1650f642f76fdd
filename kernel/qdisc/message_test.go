package qdisc

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"reflect"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/kernel/journal"
	"github.com/fairlead-project/fairlead/kernel/netdev"
)

func FuzzMessage(f *testing.F) {
	b := make([]byte, 20)
	f.Add(b)
	f.Add(append(b, 8, 0, 1, 0, 'h', 't', 'b', 0))
	f.Add(append(b, 8, 0, 7, 0, 0xff, 0xff, 1, 0))
	f.Add(append(b, 5, 0, 12, 0, 1, 0, 0, 0))
	f.Fuzz(func(t *testing.T, b []byte) {
		m, _, err := parse(b)
		if err != nil {
			return
		}
		if m.kind == "htb" && m.options != nil {
			once := settled(m)
			m.options = once
			if !bytes.Equal(settled(m), once) {
				t.Errorf("settled twice: %x and %x", once, settled(m))
			}
		}
		node{What: aQdisc, Kind: m.kind, Options: m.options}.told()
		same(KindHTB, m.options, Class{}.options(KindHTB))
	})
}

func FuzzTree(f *testing.F) {
	f.Add(`tree [{"what":"qdisc","kind":"tbf","handle":327680,"parent":4294967295,"options":"KAAB"}]`)
	f.Add(`tree []`)
	f.Add(`tree [{"what":"class"}]`)
	f.Fuzz(func(t *testing.T, s string) {
		tr, err := parseTree(s)
		if err != nil {
			return
		}
		b, err := json.Marshal(tr)
		testkit.Must(t, err)
		again, err := parseTree(treePrefix + string(b))
		if err != nil || len(again) != len(tr) || !again.has(tr[0]) || !unfinished(s, s) {
			t.Errorf("%q: comes back as %+v, %v", s, again, err)
		}
	})
}

// The kernel shows what it was sent, as far as it is ours.
func TestSame(t *testing.T) {
	h := Class{HTB: HTB{Rate: 80e9, Ceil: 8e6, Burst: 1, CBurst: 1 << 31, Quantum: 2, Prio: 7}}
	s := Class{HFSC: HFSC{RealTime: Curve{8, time.Second, 16}, UpperLimit: Curve{24, 0, 24}}}
	for _, tt := range []struct {
		kind Kind
		a, b Class
		want bool
	}{
		{KindHTB, h, h, true},
		{KindHTB, h, Class{}, false},
		{KindHTB, h, Class{HTB: HTB{Rate: 88e9, Ceil: 8e6, Burst: 1, CBurst: 1 << 31, Quantum: 2, Prio: 7}}, false},
		{KindHTB, h, Class{HTB: HTB{Rate: 80e9, Ceil: 8e6, Burst: 1, CBurst: 1 << 31, Quantum: 2, Prio: 6}}, false},
		{KindHFSC, s, s, true},
		{KindHFSC, s, Class{HFSC: HFSC{RealTime: s.HFSC.RealTime}}, false},
	} {
		if got := same(tt.kind, tt.a.options(tt.kind), tt.b.options(tt.kind)); got != tt.want {
			t.Errorf("%s %+v, %+v: %v", tt.kind, tt.a, tt.b, got)
		}
	}
	// The kernel's additions do not count.
	shown := h.options(KindHTB)
	shown[4+1], shown[4+12+1], shown[4+36] = 1, 1, 5 // linklayers and level
	if !same(KindHTB, shown, h.options(KindHTB)) {
		t.Error("linklayer and level count")
	}
}

func TestUnfinished(t *testing.T) {
	value := func(ns ...node) string {
		b, err := json.Marshal(tree(ns))
		testkit.Must(t, err)
		return treePrefix + string(b)
	}
	root := node{aQdisc, "htb", 0x10000, rootParent, []byte{1}}
	rate := func(rate uint64) []byte { return Class{HTB: HTB{Rate: rate, Ceil: rate}}.options(KindHTB) }
	class := node{aClass, "htb", 0x10001, 0x10000, rate(8e6)}
	other := node{aClass, "htb", 0x10001, 0x10000, rate(9e6)}
	inner := node{aClass, "htb", 0x10001, 0x10000, bytes.Clone(class.Options)}
	inner.Options[4+htbOptLevel] = 6 // as the kernel shows it once a class is below
	dear := node{aClass, "htb", 0x10001, 0x10000, bytes.Clone(class.Options)}
	dear.Options[4+htbOptPrio] = 6
	below := node{aClass, "htb", 0x10002, 0x10001, rate(8e6)}
	for _, tt := range []struct {
		value, target string
		want          bool
	}{
		{value(root), value(root, class), true},
		{value(root, class), value(root, class), true},
		{value(root, other), value(root, class), false},
		{value(root, class), value(root, inner, below), true},
		{value(root, dear), value(root, inner, below), false},
		{value(root, class), value(root), false},
		{Default, value(root), false},
		{value(root), Default, false},
		{Ours(KindHTB), value(root), false},
	} {
		if got := unfinished(tt.value, tt.target); got != tt.want {
			t.Errorf("unfinished(%s, %s) = %v", tt.value, tt.target, got)
		}
	}
}

// The wait for an answer that never comes ends: this one was not asked for.
func TestPatience(t *testing.T) {
	d, done, err := bench(1)
	testkit.Must(t, err)
	defer done()
	if got := time.Duration(reflect.ValueOf(d.socket.Socket).Elem().FieldByName("receiveTimeout").Int()); got != netdev.Patience {
		t.Errorf("an answer is waited for %v, want %v", got, netdev.Patience)
	}
	// A shorter wait makes the test shorter.
	testkit.Must(t, d.socket.Socket.SetReceiveTimeout(&unix.Timeval{Usec: 50_000}))
	m := message{handle: Handle, parent: rootParent, kind: "htb", options: rootOptions(KindHTB)}
	req := d.request(unix.RTM_NEWQDISC, unix.NLM_F_CREATE, m)
	_, err = req.Execute(unix.NETLINK_ROUTE, 0)
	testkit.Is(t, "without an answer", err, unix.EAGAIN)
	if q, err := d.root(); err != nil || q.handle != Handle {
		t.Errorf("the next request: %+v, %v", q, err)
	}
}

// The root qdisc is the same by itself and in the list of all.
func TestRootAlone(t *testing.T) {
	testkit.NeedRoot(t)
	d, done, err := bench(1)
	testkit.Must(t, err)
	defer done()
	testkit.Must(t, d.ns.Do(func() error { return netlink.LinkSetUp(&netlink.Device{LinkAttrs: netlink.LinkAttrs{Index: d.index}}) }))
	for range 2 { // first the kernel's own
		alone, ok := d.rootAlone()
		list, err := d.qdiscs()
		if err != nil || len(list) != 1 || !ok || !reflect.DeepEqual(alone, list[0]) {
			t.Errorf("alone %+v, %v; in the list %+v, %v", alone, ok, list, err)
		}
		if err := d.claim(message{}, KindHTB); err != nil && alone.kind != string(KindHTB) {
			t.Fatal(err)
		}
	}
	gone := &Device{ns: d.ns, index: 1 << 20, socket: d.socket}
	if m, ok := gone.rootAlone(); ok {
		t.Errorf("a device that is not there has %+v", m)
	}
}

// FilterHooks returns Hooks of a kernel without tcx.
func FilterHooks(find *netdev.Finder, j *journal.Journal) *Hooks {
	return &Hooks{journal: j, find: find, filters: true, held: make(map[journal.Ref]*Attachment)}
}

// Die closes the link as the end of the process would.
func (a *Attachment) Die() error { return a.link.Close() }

// Count returns the counters of a class that splits its packets, or not, with drops below it.
func Count(class Stats, split int, drops uint64) Stats {
	return leaf{split: split, drops: drops}.count(class)
}

// Ceiling is what a class of HTB may send beyond its rate.
type Ceiling struct {
	Minor   uint16
	Ceil    uint64        // bit/s
	Burst   time.Duration // how long it may save up its ceil,
	Saved   time.Duration // and how much it has
	Packets uint64        // sent
}

// ParseCeiling reads a message about a class.
func ParseCeiling(b []byte) (Ceiling, error) {
	m, _, err := parse(b)
	if err != nil {
		return Ceiling{}, err
	}
	const tick = 64 * time.Nanosecond
	c := Ceiling{Minor: uint16(m.handle), Packets: m.stats.Packets}
	ceil, _ := htbWord(m.options, htbOptCeil)
	burst, _ := htbWord(m.options, htbOptCBuffer)
	c.Ceil, c.Burst = 8*uint64(ceil), time.Duration(burst)*tick
	err = netdev.EachAttr(b[nl.SizeofTcMsg:], func(typ uint16, v []byte) error {
		if typ == nl.TCA_XSTATS && len(v) >= 20 { // struct tc_htb_xstats: lends, borrows, giants, tokens, ctokens
			c.Saved = time.Duration(int32(binary.NativeEndian.Uint32(v[16:]))) * tick
		}
		return nil
	})
	return c, err
}
