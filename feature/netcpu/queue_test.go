package netcpu

import (
	"path/filepath"
	"testing"
	"time"

	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/kernel"
	"github.com/fairlead-project/fairlead/kernel/cgroup"
	"github.com/fairlead-project/fairlead/kernel/journal"
	"github.com/fairlead-project/fairlead/kernel/netdev"
	"github.com/fairlead-project/fairlead/kernel/sched"
)

// The thread of a queue that can be moved into the container's cpu group and not
// into its cpuset is nobody's, and in the group of the uplinks.
func TestQueueIsNotHalfGiven(t *testing.T) {
	testkit.OnKernels(t)
	group, shared := testkit.Cgroup(t).CPU, testkit.Cgroup(t).CPU
	n, ns, index, _ := bareNetcpu(t)
	n.host = &uplinks{group: shared}
	const slot = 3
	n.tenants = map[uint64]*tenant{1: {
		group: group, cpuset: filepath.Join(n.layout.CPUSet, "fairlead-none"), queues: true, early: &watched{slot: slot},
	}}
	if n.layout.CPUSet == n.layout.CPU { // one move, which fails
		n.tenants[1].group = filepath.Join(group, "fairlead-none")
	}
	if err := ns.Offload(index, netdev.GRO).Write(netdev.GRO.On()); err != nil {
		t.Fatal(err)
	}
	threads, err := n.threaded(ns, index, "fltb", 0)
	if err != nil || len(threads) != 1 {
		t.Fatalf("threads %v, %v", threads, err)
	}
	if err := n.place(threads[0], shared, "", 0); err != nil {
		t.Fatal(err)
	}
	q := &queue{thread: threads[0], control: newQueueControl()}
	w := queueWindow{length: time.Second, own: queueMin, slot: slot}
	for range 10 {
		err := n.assignQueue(&uplink{}, q, w)
		if q.control.owner != nobody {
			t.Fatalf("owner %d", q.control.owner)
		}
		got, rerr := sched.Group("/proc", n.layout, q.thread, n.layout.CPU).Read()
		if rerr != nil || got != shared {
			t.Fatalf("thread in %s (%v), want it in %s", got, rerr, shared)
		}
		if err != nil {
			return
		}
	}
	t.Error("it was never tried")
}

// bareNetcpu is as much of the feature as turns the knobs of one veth, which it
// makes.
func bareNetcpu(t *testing.T) (n *Netcpu, ns *netdev.NS, index int, path string) {
	t.Helper()
	testkit.NeedRoot(t)
	at := testkit.NetNS(t)
	testkit.Veth(t, at, "flta", at, "fltb")
	link, err := at.Handle(t).LinkByName("fltb")
	if err != nil {
		t.Fatal(err)
	}
	path = at.Bind(t) // by which a note is undone
	if ns, err = netdev.Open(path); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { ns.Close() })
	j, err := journal.Open(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	n = &Netcpu{cfg: Config{Roots: kernel.Default(), Journal: j}, find: netdev.NewFinder("/proc", time.Now)}
	if n.layout, err = cgroup.Detect("/proc", ""); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if _, err := j.Restore(kernel.Opener(n.cfg.Roots), nil); err != nil {
			t.Error(err)
		}
		j.Close()
	})
	return n, ns, link.Attrs().Index, path
}
