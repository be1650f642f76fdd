package qdisc_test

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/kernel"
	"github.com/fairlead-project/fairlead/kernel/journal"
	"github.com/fairlead-project/fairlead/kernel/netdev"
	"github.com/fairlead-project/fairlead/kernel/qdisc"
)

func openJournal(t *testing.T, dir string) *journal.Journal {
	t.Helper()
	return testkit.JournalIn(t, dir, journal.Open)
}

// shape does what the feature does to a device.
func shape(j *journal.Journal, ns *netdev.NS, index int) error {
	by := journal.Owner{Feature: "traffic"}
	if n, err := qdisc.QueueLen(ns, index).Read(); err != nil {
		return err
	} else if n == "0" {
		if err := j.Turn(qdisc.QueueLen(ns, index), qdisc.DefaultQueueLen, by); err != nil {
			return err
		}
	}
	if err := j.Turn(qdisc.Root(ns, index), qdisc.Ours(qdisc.KindHTB), by); err != nil {
		return err
	}
	d, err := qdisc.Open(ns, index)
	if err != nil {
		return err
	}
	defer d.Close()
	_, err = d.Bring(qdisc.KindHTB, []qdisc.Class{class(qdisc.MinorTop, 1000*mbit), class(qdisc.MinorDefault, mbit), class(5, mbit)})
	return err
}

// shown is what the kernel shows of the device's qdiscs and classes: the bytes of their options.
func (w *wire) shown() string {
	w.t.Helper()
	var b strings.Builder
	for _, typ := range []int{unix.RTM_GETQDISC, unix.RTM_GETTCLASS} {
		must(w.t, w.near.Do(func() error {
			req := nl.NewNetlinkRequest(typ, unix.NLM_F_DUMP)
			req.AddData(&nl.TcMsg{Ifindex: int32(w.index)})
			list, err := req.Execute(unix.NETLINK_ROUTE, 0)
			if err != nil {
				return err
			}
			for _, m := range list {
				if int(nl.NativeEndian().Uint32(m[4:])) != w.index {
					continue
				}
				attrs, err := nl.ParseRouteAttr(m[nl.SizeofTcMsg:])
				if err != nil {
					return err
				}
				fmt.Fprintf(&b, "%x %x", m[8:12], m[12:16])
				for i, a := range attrs {
					if typ == unix.RTM_GETQDISC && i > 0 && string(attrs[0].Value) == "htb\x00" && a.Attr.Type == nl.TCA_OPTIONS {
						clear(a.Value[20:24]) // direct_pkts counts what the kernel sends by itself
					}
					if a.Attr.Type == nl.TCA_KIND || a.Attr.Type == nl.TCA_OPTIONS {
						fmt.Fprintf(&b, " %x", a.Value)
					}
				}
				b.WriteByte('\n')
			}
			return nil
		}))
	}
	return b.String()
}

// foreigners are root qdiscs that an operator may have set up.
func (w *wire) foreigners() map[string]func() {
	attrs := func(handle, parent uint32) netlink.QdiscAttrs {
		return netlink.QdiscAttrs{LinkIndex: w.index, Handle: handle, Parent: parent}
	}
	htb := func() {
		must(w.t, w.h.QdiscAdd(&netlink.Htb{QdiscAttrs: attrs(0x10000, netlink.HANDLE_ROOT), Version: 3, Rate2Quantum: 10, Defcls: 0x20}))
		for _, c := range []struct{ id, parent uint32 }{{0x10001, 0x10000}, {0x10010, 0x10001}, {0x10020, 0x10001}, {0x10021, 0x10010}} {
			must(w.t, w.h.ClassAdd(netlink.NewHtbClass(
				netlink.ClassAttrs{LinkIndex: w.index, Handle: c.id, Parent: c.parent},
				netlink.HtbClassAttrs{Rate: uint64(c.id) * 1000, Ceil: 40_000_000_000, Buffer: 5000, Quantum: 2000, Prio: c.id % 8})))
		}
		must(w.t, w.h.QdiscAdd(&netlink.Tbf{QdiscAttrs: attrs(0x800000, 0x10020), Rate: 1e6, Limit: 30000, Buffer: 20000}))
	}
	return map[string]func(){
		"none": func() {},
		"tbf": func() {
			must(w.t, w.h.QdiscAdd(&netlink.Tbf{QdiscAttrs: attrs(0x50000, netlink.HANDLE_ROOT), Rate: 1e6, Limit: 30000, Buffer: 20000}))
		},
		"pfifo": func() {
			must(w.t, w.h.QdiscAdd(&netlink.GenericQdisc{QdiscAttrs: attrs(0, netlink.HANDLE_ROOT), QdiscType: "pfifo"}))
		},
		"htb":        htb,
		"htb in use": func() { htb(); w.send(0x10021, 20); w.send(0x99, 5) },
	}
}

// What was there before comes back, byte for byte as the kernel shows it.
func TestForeignRootComesBack(t *testing.T) {
	testkit.OnKernels(t)
	testkit.NeedRoot(t)
	for name := range (&wire{}).foreigners() {
		t.Run(name, func(t *testing.T) {
			w := newWire(t)
			w.near.Bind(t) // so that the restore finds it by its inode
			w.foreigners()[name]()
			w.send(0, 1)
			before, value := w.shown(), w.root()
			dir := t.TempDir()
			j := openJournal(t, dir)
			must(t, shape(j, w.ns, w.index))
			if r := w.root(); r != qdisc.Ours(qdisc.KindHTB) {
				t.Fatalf("shaped: %s", r)
			}
			must(t, shape(j, w.ns, w.index)) // again: nothing more to undo
			if n := len(j.Entries()); n != 1 {
				t.Errorf("%d entries: %+v", n, j.Entries())
			}
			must(t, j.Close()) // the agent is killed

			j = openJournal(t, dir)
			out, err := j.Restore(kernel.Opener(kernel.Default()), nil)
			must(t, err)
			if len(out) != 1 || out[0].Result != journal.Restored {
				t.Errorf("outcome %+v", out)
			}
			if after := w.shown(); after != before {
				t.Errorf("before:\n%safter:\n%s", before, after)
			}
			testkit.Same(t, "root", value, w.root())
			w.send(0, 1) // and it works
		})
	}
}

// A foreign replacement of ours is left alone.
func TestChangedMeanwhile(t *testing.T) {
	testkit.OnKernels(t)
	w := newWire(t)
	w.near.Bind(t)
	j := openJournal(t, t.TempDir())
	must(t, shape(j, w.ns, w.index))
	must(t, w.h.QdiscReplace(&netlink.Tbf{QdiscAttrs: netlink.QdiscAttrs{LinkIndex: w.index, Handle: 0x50000, Parent: netlink.HANDLE_ROOT}, Rate: 1e6, Limit: 30000, Buffer: 20000}))
	theirs := w.shown()
	d := w.device()
	if _, err := d.Bring(qdisc.KindHTB, []qdisc.Class{class(qdisc.MinorTop, mbit)}); !errors.Is(err, qdisc.ErrNotOurs) {
		t.Errorf("classes below somebody's root: %v, want ErrNotOurs", err)
	}
	out, err := j.Restore(kernel.Opener(kernel.Default()), nil)
	must(t, err)
	if len(out) != 1 || out[0].Result != journal.Foreign {
		t.Errorf("outcome %+v, want foreign", out)
	}
	testkit.Same(t, "theirs", theirs, w.shown())
}

// A root that could not be restored is not replaced.
func TestKept(t *testing.T) {
	testkit.OnKernels(t)
	w := newWire(t)
	w.foreigners()["htb"]()
	must(t, w.h.FilterAdd(&netlink.U32{FilterAttrs: netlink.FilterAttrs{LinkIndex: w.index, Parent: 0x10000, Priority: 1, Protocol: unix.ETH_P_IP}, ClassId: 0x10010}))
	before := w.shown()
	j := openJournal(t, t.TempDir())
	err := shape(j, w.ns, w.index)
	if !errors.Is(err, qdisc.ErrKept) || !strings.Contains(err.Error(), "filters") {
		t.Errorf("%v, want ErrKept with its reason", err)
	}
	if after := w.shown(); after != before || len(j.Entries()) != 0 {
		t.Errorf("before:\n%safter:\n%s%+v", before, after, j.Entries())
	}
}

// turnerDir in the environment makes the test binary the process that is killed.
const turnerDir = "FAIRLEAD_QDISC_TURNER"

// workplace returns a process that is to be killed the device that the file "where" in dir names,
// by the path of its namespace and its index, and a journal.
func workplace(dir string) (*netdev.NS, int, *journal.Journal, error) {
	b, err := os.ReadFile(filepath.Join(dir, "where"))
	if err != nil {
		return nil, 0, nil, err
	}
	path, number, _ := strings.Cut(string(b), " ")
	index, err := strconv.Atoi(number)
	if err != nil {
		return nil, 0, nil, err
	}
	ns, err := netdev.Open(path)
	if err != nil {
		return nil, 0, nil, err
	}
	j, err := journal.Open(filepath.Join(dir, "state"), "")
	return ns, index, j, err
}

// turnForever shapes and restores a device until it is killed.
func turnForever(dir string) error {
	ns, index, j, err := workplace(dir)
	if err != nil {
		return err
	}
	for first := true; ; first = false {
		if err := shape(j, ns, index); err != nil {
			return err
		}
		if first { // from now on there is sometimes something to restore
			fmt.Println("go")
		}
		if _, err := j.Restore(kernel.Opener(kernel.Default()), nil); err != nil {
			return err
		}
	}
}

func TestKilledAtAnyPoint(t *testing.T) {
	w := newWire(t)
	path := w.near.Bind(t)
	must(t, w.h.LinkSetTxQLen(w.u0, 0))
	results := map[journal.Result]int{}
	for round := range testkit.Scale(t, 8, 40) {
		name := "none"
		if round%2 == 1 {
			name = "htb"
		}
		w.foreigners()[name]()
		if name == "htb" { // it has made 1000 of the length
			must(t, w.h.LinkSetTxQLen(w.u0, 500))
		}
		before, length := w.shown(), w.queueLen()
		dir := t.TempDir()
		must(t, os.WriteFile(filepath.Join(dir, "where"), fmt.Appendf(nil, "%s %d", path, w.index), 0o600))
		_, kill := testkit.Again(t, turnerDir+"="+dir)
		if round > 1 { // in the first two it is in force, with and without what was there before
			time.Sleep(time.Duration(rand.IntN(60_000)) * time.Microsecond)
		}
		kill()
		list, err := openJournal(t, filepath.Join(dir, "state")).Restore(kernel.Opener(kernel.Default()), nil)
		must(t, err)
		for _, o := range list {
			results[o.Result]++
		}
		if after := w.shown(); after != before || w.queueLen() != length {
			t.Fatalf("round %d: before:\n%s%s\nafter:\n%s%s\n%+v", round, before, length, after, w.queueLen(), list)
		}
		if name == "htb" {
			must(t, qdisc.Root(w.ns, w.index).Write(qdisc.Default))
			must(t, w.h.LinkSetTxQLen(w.u0, 0))
		}
	}
	t.Log(results)
	if results[journal.Restored] == 0 {
		t.Error("nothing was ever in force when it was killed")
	}
}

func (w *wire) queueLen() string {
	w.t.Helper()
	n, err := qdisc.QueueLen(w.ns, w.index).Read()
	must(w.t, err)
	return n
}
