package isolate

import (
	"path/filepath"
	"testing"
	"time"

	"github.com/fairlead-project/fairlead/feature/netcpu/drop"
	"github.com/fairlead-project/fairlead/feature/netcpu/law"
	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/kernel"
	"github.com/fairlead-project/fairlead/kernel/cgroup"
	"github.com/fairlead-project/fairlead/kernel/journal"
	"github.com/fairlead-project/fairlead/kernel/netdev"
	"github.com/fairlead-project/fairlead/kernel/sched"
	"github.com/fairlead-project/fairlead/tenant"
)

func TestMain(m *testing.M) { testkit.Main(m) }

var must = testkit.Must

// The thread of a queue that can be moved into the container's cpu group but not into its cpuset
// gets no owner, and stays in the group of the uplinks.
func TestQueueIsNotHalfGiven(t *testing.T) {
	testkit.OnKernels(t)
	group, shared := testkit.Cgroup(t).CPU, testkit.Cgroup(t).CPU
	is, ns, index, _ := bare(t)
	other, err := ns.Index("flta")
	must(t, err)
	const slot = 0
	isolated := &isolation{
		at: place{group: group, cpuset: filepath.Join(is.cfg.Layout.CPUSet, "fairlead-none")}, queues: true, drops: new(drop.Drops),
	}
	is.isolated[tenant.Key{NetNS: 1}] = isolated
	if is.cfg.Layout.CPUSet == is.cfg.Layout.CPU { // one move, which fails
		isolated.at.group = filepath.Join(group, "fairlead-none")
	}
	must(t, ns.Offload(index, netdev.GRO).Write(netdev.GRO.On()))
	threads, err := is.threads(device{ns: ns, index: index, name: "fltb"}, is.owns(0))
	if err != nil || len(threads) != 1 {
		t.Fatalf("threads %v, %v", threads, err)
	}
	// A device may have threads of NAPIs that only send, which no list of NAPIs has.
	must(t, ns.Offload(other, netdev.GRO).Write(netdev.GRO.On()))
	more, err := is.threads(device{ns: ns, index: other, name: "flta"}, is.owns(0))
	must(t, err)
	placed := []thread{{threads[0], "fltb"}, {more[0], "fltb"}}
	for i, list := range [][]thread{placed, placed[:1], nil, {{sched.Thread{TID: threads[0].TID, Start: 1}, "fltb"}}} { // a number that is another's
		if same, err := is.stillPoll(ns, index, list); same != (i < 2) || err != nil {
			t.Errorf("with the threads %v the device is polled: %t, %v", list, same, err)
		}
	}
	must(t, is.move(threads[0], place{group: shared}, is.owns(0)))
	u := &uplinkDevice{at: place{group: shared}}
	q := &queue{thread: threads[0], control: newQueueControl()}
	w := queueWindow{time.Second, drop.Queue{Own: law.Rate, Slot: slot}}
	for range 10 {
		err := is.assignQueue(u, q, w)
		if q.control.owner != nobody {
			t.Fatalf("owner %d", q.control.owner)
		}
		got, rerr := sched.Group("/proc", is.cfg.Layout, q.thread, is.cfg.Layout.CPU).Read()
		if rerr != nil || got != shared {
			t.Fatalf("thread in %s (%v), want it in %s", got, rerr, shared)
		}
		if err != nil {
			return
		}
	}
	t.Error("it was never tried")
}

// bare makes the part of an Isolator that turns the knobs of one veth, and the veth.
func bare(t *testing.T) (is *Isolator, ns *netdev.NS, index int, path string) {
	t.Helper()
	testkit.NeedRoot(t)
	at := testkit.NetNS(t)
	testkit.Veth(t, at, "flta", at, "fltb")
	link, err := at.Handle(t).LinkByName("fltb")
	must(t, err)
	path = at.Bind(t) // for the restore
	ns, err = netdev.Open(path)
	must(t, err)
	t.Cleanup(func() { ns.Close() })
	j := testkit.Journal(t, journal.Open)
	layout, err := cgroup.Detect("/proc", "")
	must(t, err)
	is = New(Config{Feature: "netcpu", Tenants: tenant.New("/proc", tenant.Network), Roots: kernel.Default(), Layout: layout, Journal: j, Find: netdev.NewFinder("/proc", time.Now)})
	t.Cleanup(func() {
		if _, err := j.Restore(kernel.Opener(is.cfg.Roots), nil); err != nil {
			t.Error(err)
		}
		j.Close()
	})
	return is, ns, link.Attrs().Index, path
}
