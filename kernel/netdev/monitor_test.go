package netdev

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"slices"
	"sync"
	"syscall"
	"testing"
	"time"
	"unsafe"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/fairlead-project/fairlead/internal/testkit"
)

// All watches of a namespace share its sockets. Each is told what it is interested in, and what the
// last of them has used is closed.
func TestMonitorShares(t *testing.T) {
	testkit.InFull(t)
	kit := testkit.NetNS(t)
	ns := open(t, kit.Bind(t))
	h := kit.Handle(t)
	must(t, ns.IFB(77, false).Write(OurIFB))
	index, err := ns.Index(IFBName(77, false))
	must(t, err)
	m := NewMonitor()
	watch := func(causes ...Cause) (<-chan Change, func() error) {
		return watching(t, m, ns, Interest{Causes: causes})
	}
	links, stopDevices := watch(LinkChanged)
	qdiscs, stopQdiscs := watch(LinkChanged, QdiscChanged)
	_, stopPaths := watch(paths...)
	if n := len(m.space(ns.inode).sockets); n > 6 {
		t.Errorf("there are %d sockets, want one for each feed", n)
	}
	if n := unsafe.Sizeof(*m.space(ns.inode)); n > 1024 { // each container has one
		t.Errorf("a watched namespace takes %d bytes", n)
	}
	tbf := &netlink.Tbf{QdiscAttrs: netlink.QdiscAttrs{LinkIndex: index, Handle: 0x10000, Parent: netlink.HANDLE_ROOT}, Rate: 1e6, Limit: 30000, Buffer: 20000}
	must(t, h.QdiscAdd(tbf))
	hears(t, qdiscs, "a qdisc", Change{QdiscChanged, index})
	l, err := h.LinkByIndex(index)
	must(t, err)
	must(t, h.LinkSetDown(l))
	for _, c := range hears(t, links, "a device", Change{LinkChanged, index}) {
		if c.Cause != LinkChanged {
			t.Errorf("who is interested in devices is told %v", c)
		}
	}
	must(t, ns.RaiseIFB(77, false))
	if l, err = h.LinkByIndex(index); err != nil || l.Attrs().Flags&net.FlagUp == 0 {
		t.Errorf("it is not up again: %v", err)
	}
	testkit.Fails(t, "there is no IFB for 78", ns.RaiseIFB(78, false))

	must(t, stopPaths())
	s := m.space(ns.inode)
	if len(s.sockets) != 2 || s.sockets[tc] == nil || s.known.now != nil {
		t.Errorf("what only one watch has used is not closed: %d sockets", len(s.sockets))
	}
	must(t, errors.Join(stopQdiscs(), stopQdiscs()))
	if len(s.sockets) != 1 || s.sockets[devices] == nil || s.qdiscs != nil {
		t.Error("devices are not heard, or qdiscs are")
	}
	must(t, stopDevices())
	if len(m.spaces) > 0 || len(s.sockets) > 0 || m.Open(ns.inode) != nil {
		t.Error("it is still watched")
	}
	if links, err := m.Links(ns, MostLinks); err != nil || len(links) < 2 {
		t.Errorf("nobody watches: %v, %v", links, err)
	}
}

// The first change is told at once, and those that follow within the pause are told together, each
// once. One call is made at a time, and none is lost.
func TestWatchPause(t *testing.T) {
	kit := testkit.NetNS(t)
	h := kit.Handle(t)
	var mu sync.Mutex
	var calls [][]Change
	enter, leave := make(chan bool), make(chan bool)
	stop, err := NewMonitor().Watch(open(t, kit.Path), Interest{Causes: []Cause{LinkChanged}, Pause: 10 * time.Millisecond}, func(changes []Change) {
		mu.Lock()
		calls = append(calls, slices.Clone(changes))
		mu.Unlock()
		enter <- true
		<-leave
	})
	must(t, err)
	defer stop()
	add := func(i int) int {
		ifb := &netlink.Ifb{LinkAttrs: netlink.LinkAttrs{Name: fmt.Sprint("fl", i)}}
		must(t, h.LinkAdd(ifb))
		return ifb.Index
	}
	want := map[int]bool{add(0): true}
	<-enter
	for i := range 10 { // while the first call is under way
		want[add(1+i)] = true
	}
	last := add(11)
	want[last] = true
	leave <- true
	for !func() bool {
		mu.Lock()
		defer mu.Unlock()
		return slices.ContainsFunc(calls, func(c []Change) bool { return Concern(c, last) })
	}() {
		<-enter
		leave <- true
	}
	mu.Lock()
	defer mu.Unlock()
	for _, c := range calls {
		for i, change := range c {
			if delete(want, change.Device); slices.Contains(c[:i], change) {
				t.Errorf("%v is told twice in %v", change, c)
			}
		}
	}
	if len(want) > 0 {
		t.Errorf("the devices %v are not told of", want)
	}
}

// A watch with more changes than it takes is told that anything may have changed.
func TestWatchOfMany(t *testing.T) {
	w := &watch{about: Interest{Causes: []Cause{LinkChanged}}, wake: make(chan struct{}, 1)}
	for i := range mostChanges + 2 {
		w.tell(Change{LinkChanged, i})
		w.tell(Change{RouteChanged, i})
	}
	if got := w.take(); !slices.Equal(got, []Change{{Cause: Overrun}}) || !Concern(got, 7) {
		t.Errorf("%v", got)
	}
	if got := w.take(); len(got) > 0 {
		t.Errorf("and again: %v", got)
	}
}

// A watch ends while messages come.
func TestMonitorEnds(t *testing.T) {
	kit := testkit.NetNS(t)
	ns := open(t, kit.Path)
	h := kit.Handle(t)
	must(t, ns.IFB(77, false).Write(OurIFB))
	link, err := h.LinkByName(IFBName(77, false))
	must(t, err)
	m := NewMonitor()
	for i := range 300 {
		stop, err := m.Watch(ns, Interest{Causes: []Cause{LinkChanged, QdiscChanged}}, func([]Change) {})
		must(t, err)
		must(t, errors.Join(h.LinkSetMTU(link, 1400+i%2), stop()))
	}
}

// The kernel also notifies of a qdisc that is only asked for: no change.
func TestQdiscAskedFor(t *testing.T) {
	var q qdiscs
	message := func(typ uint16, handle uint32, kind string) syscall.NetlinkMessage {
		b := make([]byte, 20)
		binary.NativeEndian.PutUint32(b[4:], 7)
		binary.NativeEndian.PutUint32(b[8:], handle)
		binary.NativeEndian.PutUint32(b[12:], 0xffffffff)
		b = binary.NativeEndian.AppendUint16(b, uint16(4+len(kind)+1))
		b = binary.NativeEndian.AppendUint16(b, unix.TCA_KIND)
		b = append(append(b, kind...), 0)
		return syscall.NetlinkMessage{Header: syscall.NlMsghdr{Type: typ}, Data: b}
	}
	for i, c := range []struct {
		message syscall.NetlinkMessage
		want    bool
	}{
		{message(unix.RTM_NEWQDISC, 0, "noqueue"), true},
		{message(unix.RTM_NEWQDISC, 0, "noqueue"), false},
		{message(unix.RTM_NEWQDISC, 0x10000, "htb"), true},
		{message(unix.RTM_NEWQDISC, 0x10000, "htb"), false},
		{message(unix.RTM_NEWQDISC, 0x20000, "htb"), true},
		{message(unix.RTM_DELQDISC, 0x20000, "htb"), true},
		{message(unix.RTM_NEWQDISC, 0x20000, "htb"), true},
		{syscall.NetlinkMessage{Header: syscall.NlMsghdr{Type: unix.RTM_NEWQDISC}, Data: make([]byte, 8)}, true},
	} {
		testkit.Same(t, fmt.Sprintf("message %d: change", i), c.want, q.hear(c.message))
	}
}
