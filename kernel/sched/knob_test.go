package sched

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/kernel/cgroup"
	"github.com/fairlead-project/fairlead/kernel/journal"
	"github.com/fairlead-project/fairlead/kernel/netdev"
)

// napi makes a veth pair and has its end "fltb" poll in a kernel thread. remove deletes the pair,
// and the thread with it.
func napi(t *testing.T) (thread Named, remove func()) {
	t.Helper()
	ns := testkit.NetNS(t)
	testkit.Veth(t, ns, "flta", ns, "fltb")
	h := ns.Handle(t)
	link, err := h.LinkByName("fltb")
	must(t, err)
	dev := testkit.Opened(netdev.Open(ns.Path))(t)
	must(t, dev.Offload(link.Attrs().Index, netdev.GRO).Write(netdev.GRO.On()))
	threads := func() []Named {
		list, err := Threads("/proc", "napi/fltb-")
		must(t, err)
		return list
	}
	before := threads() // a stopped one may still be there for a moment
	must(t, dev.Threaded(link.Attrs().Index).Write("1"))
	var list []Named
	testkit.AwaitNone(t, func() string { // a thread may set its own name when it first runs
		list = slices.DeleteFunc(threads(), func(th Named) bool { return slices.Contains(before, th) })
		if len(list) != 1 {
			return fmt.Sprintf("threads of fltb: %v, before %v", list, before)
		}
		return ""
	})
	return list[0], func() {
		must(t, h.LinkDel(link))
	}
}

func TestKnobsInKernel(t *testing.T) {
	testkit.OnKernels(t)
	cg := testkit.Cgroup(t)
	l, err := cgroup.Detect("/proc", "")
	must(t, err)
	th, remove := napi(t)
	j := testkit.Journal(t, journal.Open)
	owner := journal.Owner{Feature: "test"}

	type move struct{ hierarchy, dir string }
	moves := []move{{l.V2, cg.V2}}
	if l.CPU != l.V2 {
		moves = append(moves, move{l.CPU, cg.CPU})
	}
	for _, m := range moves {
		if m.dir == "" {
			continue
		}
		k := Group("/proc", l, th.Thread, m.hierarchy)
		if got, err := k.Read(); err != nil || got != m.hierarchy {
			t.Errorf("before: %q, %v", got, err)
		}
		must(t, j.Turn(k, m.dir, owner))
		testkit.Gives(t, "after", m.dir)(k.Read())
		if err := k.Write(filepath.Join(m.dir, "none")); !errors.Is(err, fs.ErrNotExist) || errors.Is(err, journal.ErrGone) {
			t.Errorf("no such cgroup: %v", err)
		}
	}
	a := Affinity("/proc", th.Thread)
	all, err := a.Read()
	must(t, err)
	must(t, j.Turn(a, "0", owner))
	for _, bad := range []string{"", "x", "1024", "1023"} {
		testkit.Fails(t, "affinity "+bad, a.Write(bad))
	}

	open := func(r journal.Ref) (journal.Knob, error) { return OpenKnob("/proc", l, r) }
	out, err := j.Restore(open, nil)
	if err != nil || len(out) < 2 {
		t.Errorf("restore: %v, %v", out, err)
	}
	for _, o := range out {
		testkit.Same(t, fmt.Sprintf("%v", o.Entry.Ref), journal.Restored, o.Result)
	}
	testkit.Gives(t, "affinity after restore", all)(a.Read())
	for _, m := range moves {
		testkit.Gives(t, "cgroup after restore", m.hierarchy)(Group("/proc", l, th.Thread, m.hierarchy).Read())
	}

	// Deleting a device takes its thread out of the cgroup.
	group := Group("/proc", l, th.Thread, l.V2)
	must(t, j.Turn(group, cg.V2, owner))
	must(t, j.Turn(a, "0", owner))
	remove()
	for _, k := range []journal.Knob{group, a} {
		testkit.AwaitNone(t, func() string {
			if v, err := k.Read(); !errors.Is(err, journal.ErrGone) {
				return fmt.Sprintf("%v reads %q, %v", k.Ref(), v, err)
			}
			return ""
		})
	}
	testkit.Is(t, "move of an ended thread", group.Write(cg.V2), journal.ErrGone)
	testkit.Is(t, "affinity of an ended thread", a.Write("0"), journal.ErrGone)
	out, err = j.Restore(open, nil)
	if err != nil || len(out) != 2 || out[0].Result != journal.Gone || out[1].Result != journal.Gone {
		t.Errorf("restore after the end: %v, %v", out, err)
	}
}

func TestRefusesProcesses(t *testing.T) {
	testkit.OnKernels(t)
	cg := testkit.Cgroup(t)
	l, err := cgroup.Detect("/proc", "")
	must(t, err)
	s, err := readStat("/proc", os.Getpid())
	if !errors.Is(err, errNotKernel) {
		t.Fatalf("this process: %v", err)
	}
	self := Thread{TID: os.Getpid(), Start: s.Start}
	before, err := os.ReadFile("/proc/self/cgroup")
	must(t, err)
	for name, err := range map[string]error{
		"move":     Group("/proc", l, self, l.V2).Write(cg.V2),
		"affinity": Affinity("/proc", self).Write("0"),
	} {
		testkit.Is(t, name, err, errNotKernel)
	}
	if after, _ := os.ReadFile("/proc/self/cgroup"); string(after) != string(before) {
		t.Errorf("moved:\n%s", after)
	}
}
