package qdisc_test

import (
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/kernel"
	"github.com/fairlead-project/fairlead/kernel/journal"
	"github.com/fairlead-project/fairlead/kernel/netdev"
	"github.com/fairlead-project/fairlead/kernel/qdisc"
)

// Verdicts of programs at these hooks.
const (
	next = -1
	pass = 0
	drop = 2
)

// program loads a program with the same verdict for all packets.
func program(t *testing.T, verdict int32) *ebpf.Program {
	t.Helper()
	p := testkit.Opened(testkit.Verdict(ebpf.SchedCLS, "fl_test", verdict))(t)
	return p
}

// hooked is a wire with programs at u0.
type hooked struct {
	*wire
	server  *net.UDPConn
	journal *journal.Journal
	hooks   *qdisc.Hooks
}

func newHooked(t *testing.T, filters bool) *hooked {
	t.Helper()
	h := &hooked{wire: newWire(t), journal: openJournal(t, t.TempDir())}
	h.near.Bind(t)
	find := netdev.NewFinder("/proc", time.Now)
	if h.hooks = qdisc.FilterHooks(find, h.journal); !filters {
		var err error
		if h.hooks, err = qdisc.OpenHooks(find, h.journal); err != nil {
			t.Fatal(err)
		}
	}
	must(t, h.far.Do(func() (err error) {
		h.server, err = net.ListenUDP("udp", h.address)
		return err
	}))
	t.Cleanup(func() { h.server.Close() })
	return h
}

func (h *hooked) attach(name string, verdict int32, egress bool, stage qdisc.Stage) *qdisc.Attachment {
	h.t.Helper()
	p := program(h.t, verdict)
	a, err := h.hooks.Attach(qdisc.Hook{NS: h.ns, Index: h.index, Egress: egress, Stage: stage, Name: name}, p, journal.Owner{Feature: "test"})
	must(h.t, err)
	h.t.Cleanup(func() { a.Close() }) // also keeps it alive: its finalizer would close it
	return a
}

// arrives reports whether a packet from u0 reaches the far end, where waiting for one more would be
// useless.
func (h *hooked) arrives() bool {
	h.t.Helper()
	h.wire.send(0, 1)
	must(h.t, h.server.SetReadDeadline(time.Now().Add(50*time.Millisecond)))
	_, err := h.server.Read(make([]byte, 2000))
	if err != nil && !errors.Is(err, os.ErrDeadlineExceeded) {
		h.t.Fatal(err)
	}
	return err == nil
}

func (h *hooked) want(when string, arrives bool) {
	h.t.Helper()
	for end := time.Now().Add(20 * time.Second); time.Now().Before(end); { // one may be late
		if h.arrives() == arrives {
			return
		}
	}
	h.t.Errorf("%s: packets arrive: %v", when, !arrives)
}

// forget causes a new neighbour request: the answer is a packet that comes in.
func (h *hooked) forget() {
	h.t.Helper()
	neighbours, err := h.wire.h.NeighList(h.index, netlink.FAMILY_V4)
	must(h.t, err)
	for _, n := range neighbours {
		must(h.t, h.wire.h.NeighDel(&n))
	}
}

// filters lists both hooks, the qdisc first.
func (h *hooked) filters() string {
	h.t.Helper()
	var b strings.Builder
	list, err := h.wire.h.QdiscList(h.u0)
	must(h.t, err)
	for _, q := range list {
		if q.Attrs().Parent == netlink.HANDLE_CLSACT {
			b.WriteString(q.Type())
		}
	}
	for hook, parent := range map[string]uint32{"ingress": netlink.HANDLE_MIN_INGRESS, "egress": netlink.HANDLE_MIN_EGRESS} {
		list, err := h.wire.h.FilterList(h.u0, parent)
		must(h.t, err)
		for _, f := range list {
			name := ""
			if p, ok := f.(*netlink.BpfFilter); ok {
				name = p.Name
			}
			fmt.Fprintf(&b, "; %s %s %d %q", hook, f.Type(), f.Attrs().Priority, name)
		}
	}
	return b.String()
}

func (h *hooked) clsact() {
	h.t.Helper()
	must(h.t, h.wire.h.QdiscAdd(&netlink.Clsact{QdiscAttrs: netlink.QdiscAttrs{
		LinkIndex: h.index, Handle: netlink.MakeHandle(0xffff, 0), Parent: netlink.HANDLE_CLSACT,
	}}))
}

// theirs adds a foreign filter, at egress, which lets packets bypass all that follow.
func (h *hooked) theirs(protocol, preference uint16, name string) {
	h.t.Helper()
	p := program(h.t, pass)
	must(h.t, h.wire.h.FilterAdd(&netlink.BpfFilter{
		FilterAttrs: netlink.FilterAttrs{LinkIndex: h.index, Parent: netlink.HANDLE_MIN_EGRESS, Priority: preference, Handle: 1, Protocol: protocol},
		Fd:          p.FD(), Name: name, DirectAction: true,
	}))
}

// Both ways do the same to packets.
func TestHooks(t *testing.T) {
	testkit.OnKernels(t)
	for _, filters := range []bool{false, true} {
		t.Run(fmt.Sprintf("filters=%v", filters), func(t *testing.T) {
			h := newHooked(t, filters)
			h.want("in the beginning", true)
			before := h.filters()
			last := h.attach("four", drop, true, qdisc.Others)
			h.want("with a program that drops", false)
			first := h.attach("two", pass, true, 1)
			h.want("with one before it that lets them by", true)
			must(t, first.Close())
			h.want("without that", false)
			other := h.attach("five", drop, false, 0)
			must(t, last.Close())
			h.forget()
			h.want("with one that drops what is received", false)
			must(t, other.Hold())
			open, err := qdisc.Inherit(h.hooks.Left()) // as bpftool has links open while it lists them
			must(t, err)
			defer open.Close()
			must(t, other.Close())
			must(t, other.Close())
			h.want("in the end", true)
			testkit.Same(t, "left", before, h.filters())
			testkit.None(t, "journal", h.journal.Entries())
			must(t, h.wire.h.LinkDel(h.u0))
			p := program(t, next)
			if _, err := h.hooks.Attach(qdisc.Hook{NS: h.ns, Index: h.index, Name: "six"}, p, journal.Owner{}); !errors.Is(err, journal.ErrGone) {
				t.Errorf("device that went: %v, want ErrGone", err)
			}
		})
	}
}

// Foreign filters at the hooks stay, and decide whether the qdisc does.
func TestFiltersOfOthers(t *testing.T) {
	testkit.OnKernels(t)
	for _, c := range []struct {
		name string
		do   func(h *hooked) (want string)
	}{
		{"empty clsact of theirs", func(h *hooked) string {
			h.clsact()
			must(h.t, h.attach("a", drop, true, 0).Close())
			return "clsact"
		}},
		{"program of theirs", func(h *hooked) string {
			h.clsact()
			h.theirs(unix.ETH_P_ALL, 1, "theirs")
			a := h.attach("a", drop, true, 0)
			h.want("before theirs", false)
			b := h.attach("b", drop, true, qdisc.Others)
			must(h.t, a.Close())
			h.want("behind theirs", true)
			must(h.t, b.Close())
			return `clsact; egress bpf 1 "theirs"`
		}},
		{"their filter where ours cannot be", func(h *hooked) string {
			h.clsact()
			h.theirs(unix.ETH_P_IPV6, 1, "theirs") // a preference has one protocol
			a := h.attach("a", drop, true, 0)
			h.want("next to it", false)
			must(h.t, a.Close())
			return `clsact; egress bpf 1 "theirs"`
		}},
		{"filter of theirs in our clsact", func(h *hooked) string {
			a := h.attach("a", drop, true, 0)
			h.theirs(unix.ETH_P_ALL, 1, "theirs")
			must(h.t, a.Close())
			return `clsact; egress bpf 1 "theirs"`
		}},
		{"two of ours, the first one first", func(h *hooked) string {
			a, b := h.attach("a", drop, true, 0), h.attach("b", drop, false, 0)
			must(h.t, a.Close())
			must(h.t, b.Close())
			return ""
		}},
		{"their name, not our handle", func(h *hooked) string {
			h.clsact()
			h.theirs(unix.ETH_P_ALL, 7, "fairlead: a")
			must(h.t, h.attach("a", drop, true, 0).Close())
			return `clsact; egress bpf 7 "fairlead: a"`
		}},
		{"all filters removed by somebody", func(h *hooked) string {
			a := h.attach("a", drop, true, 0)
			list, err := h.wire.h.FilterList(h.u0, netlink.HANDLE_MIN_EGRESS)
			must(h.t, err)
			for _, f := range list {
				must(h.t, h.wire.h.FilterDel(f))
			}
			h.want("without it", true)
			must(h.t, a.Hold())
			h.want("with it again", false)
			for _, f := range list { // as if killed between the two steps
				must(h.t, h.wire.h.FilterDel(f))
			}
			must(h.t, a.Close())
			return ""
		}},
		{"clsact removed by somebody", func(h *hooked) string {
			a := h.attach("a", drop, true, 0)
			list, err := h.wire.h.QdiscList(h.u0)
			must(h.t, err)
			for _, q := range list {
				if q.Type() == "clsact" {
					must(h.t, h.wire.h.QdiscDel(q))
				}
			}
			must(h.t, a.Hold())
			h.want("made again", false)
			must(h.t, a.Close())
			return ""
		}},
		{"a later one of the same name", func(h *hooked) string {
			a := h.attach("a", drop, true, 0)
			b := h.attach("a", pass, true, 0)
			h.want("the later one", true)
			must(h.t, a.Close())
			if got := h.filters(); !strings.Contains(got, `"fairlead, clsact: a"`) {
				h.t.Errorf("closing the first removed the second: %q", got)
			}
			must(h.t, b.Close())
			return ""
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			h := newHooked(t, true)
			h.want("in the beginning", true)
			testkit.Same(t, "left", c.do(h), h.filters())
			testkit.None(t, "journal", h.journal.Entries())
		})
	}
}

// The older qdisc ingress has no hook for what is sent.
func TestIngressQdisc(t *testing.T) {
	testkit.OnKernels(t)
	h := newHooked(t, true)
	must(t, h.wire.h.QdiscAdd(&netlink.Ingress{QdiscAttrs: netlink.QdiscAttrs{LinkIndex: h.index, Parent: netlink.HANDLE_INGRESS}}))
	p := program(t, drop)
	testkit.Fails(t, "at egress", testkit.Err(h.hooks.Attach(qdisc.Hook{NS: h.ns, Index: h.index, Egress: true, Name: "a"}, p, journal.Owner{})), "qdisc ingress")
	a := h.attach("b", drop, false, 0)
	h.forget()
	h.want("at ingress", false)
	must(t, a.Close())
	h.want("in the end", true)
}

// A process that drops packets is killed: they pass at once. A restore then removes the rest, or
// the next process replaces it.
func TestHookOfAKilledProcess(t *testing.T) {
	testkit.OnKernels(t)
	for _, adopt := range []bool{false, true} {
		t.Run(fmt.Sprintf("adopt=%v", adopt), func(t *testing.T) {
			h := newHooked(t, true)
			h.want("in the beginning", true)
			before, dir := h.filters(), t.TempDir()
			must(t, os.WriteFile(filepath.Join(dir, "where"), fmt.Appendf(nil, "%s %d", h.near.Path, h.index), 0o600))
			_, kill := testkit.Again(t, dropperDir+"="+dir)
			h.want("while it lives", false)
			kill()
			h.want("once it is dead", true)
			if h.filters() == before {
				t.Fatal("its filter has gone by itself: there is nothing to restore")
			}
			j := openJournal(t, filepath.Join(dir, "state"))
			if adopt {
				h.journal = j
				h.hooks = qdisc.FilterHooks(netdev.NewFinder("/proc", time.Now), j)
				a := h.attach("dropper", drop, true, 0)
				h.want("adopted", false)
				if n := strings.Count(h.filters(), ";"); n != 1 {
					t.Errorf("%d filters: %s", n, h.filters())
				}
				must(t, a.Close())
			} else {
				must(t, testkit.Err(j.Restore(kernel.Opener(kernel.Default()), nil)))
			}
			if got := h.filters(); got != before || len(j.Entries()) != 0 {
				t.Errorf("left: %q, journal %+v", got, j.Entries())
			}
		})
	}
}

const dropperDir = "FAIRLEAD_TEST_DROPPER"

// dropForever drops what a device sends until it is killed.
func dropForever(dir string) error {
	ns, index, j, err := workplace(dir)
	if err != nil {
		return err
	}
	p, err := testkit.Verdict(ebpf.SchedCLS, "fl_test", drop)
	if err != nil {
		return err
	}
	a, err := qdisc.FilterHooks(netdev.NewFinder("/proc", time.Now), j).
		Attach(qdisc.Hook{NS: ns, Index: index, Egress: true, Name: "dropper"}, p, journal.Owner{Feature: "test"})
	if err != nil {
		return err
	}
	defer a.Close()
	fmt.Println("go")
	time.Sleep(time.Hour)
	return nil
}

func TestOpenFilter(t *testing.T) {
	h := newHooked(t, true)
	ref := journal.Ref{Kind: qdisc.KindFilter, Object: fmt.Sprintf("%d/%d/egress/a", h.ns.Inode(), h.index)}
	k, err := qdisc.OpenKnob("/proc", netdev.NewFinder("/proc", time.Now), ref)
	must(t, err)
	defer k.(interface{ Close() error }).Close()
	testkit.Same(t, "opened again", ref, k.Ref())
	testkit.Fails(t, "write of a program that is not at hand", k.Write("program 1"), "went with its process")
}

// The kernel changes a queue length of 0 to 1000 when clsact comes: if the process is killed before
// it is 0 again, the journal has it.
func TestQueueLenUnderClsact(t *testing.T) {
	testkit.OnKernels(t)
	h := newHooked(t, true)
	must(t, h.h.LinkSetTxQLen(h.u0, 0))
	var noted []string
	h.journal.Attribute(func(uint64) string { // called before each note
		for _, e := range h.journal.Entries() {
			noted = append(noted, e.Ref.Kind+" "+e.Before)
		}
		return ""
	})
	p := program(t, pass)
	a, err := h.hooks.Attach(qdisc.Hook{NS: h.ns, Index: h.index, Name: "one", Egress: true}, p, journal.Owner{Feature: "test", Container: 1})
	must(t, err)
	testkit.Same(t, "noted before the filter", []string{qdisc.KindQueueLen + " 0"}, noted)
	if list := h.journal.Entries(); len(list) != 1 || list[0].Ref.Kind != qdisc.KindFilter || h.queueLen() != "0" {
		t.Errorf("behind it: %+v, length %s", list, h.queueLen())
	}
	must(t, a.Close())
	testkit.Same(t, "without it: length", "0", h.queueLen())
}
