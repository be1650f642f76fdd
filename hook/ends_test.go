package hook_test

import (
	"errors"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/vishvananda/netlink"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/hook"
	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/kernel/journal"
	"github.com/fairlead-project/fairlead/kernel/netdev"
)

func TestMain(m *testing.M) { testkit.Main(m) }

var must = testkit.Must

// The stages of others' programs lie between the two halves of ours, and each stage
// has a number that the hook takes.
func TestStages(t *testing.T) {
	if !(hook.Stamp < hook.Identify && hook.Identify < hook.Drop && hook.Drop < hook.Learn && hook.Learn < hook.Count &&
		hook.Count < hook.Observe && hook.Observe < hook.Ceil && hook.Ceil < hook.Redirect) {
		t.Error("stages are not in the order of the table")
	}
}

// A program stays in place, follows a rename, comes back after removal, and moves to a new device with
// the index of a removed one.
func TestSet(t *testing.T) {
	testkit.OnKernels(t)
	j := testkit.Journal(t, journal.Open)
	at := hook.Open("/proc", j)
	must(t, at.Err())
	ns := testkit.NetNS(t)
	h := ns.Handle(t)
	path := ns.Bind(t) // where a filter is held it is looked for
	open, err := netdev.Open(path)
	must(t, err)
	defer open.Close()
	const index = 77
	device := func(name string) netlink.Link {
		l := &netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: name, Index: index}, PeerName: "peer"}
		must(t, h.LinkAdd(l))
		return l
	}
	first := device("d0")
	loads := 0
	load := func() (*ebpf.Program, error) {
		loads++
		return testkit.Verdict(ebpf.SchedCLS, "fl_test", -1)
	}
	var set hook.Set
	t.Cleanup(func() { set.Close() })
	place := hook.Place{Device: container.Device{NetNS: open.Inode(), Index: index}, Path: path, Egress: true, Stage: hook.Count, Name: "a"}
	put := func(when string, want int) {
		t.Helper()
		must(t, set.Put(at, place, load))
		if loads != want || set.Len() != 1 {
			t.Errorf("%s: loaded %d times and attached %d, want %d and 1", when, loads, set.Len(), want)
		}
	}
	put("first", 1)
	put("again", 1)
	must(t, h.LinkSetName(first, "d1"))
	put("after a rename", 1)
	must(t, h.LinkDel(first))
	if err := set.Put(at, place, load); !errors.Is(err, journal.ErrGone) || set.Len() != 0 {
		t.Errorf("device that has gone: %v, %d attached; want ErrGone and none", err, set.Len())
	}
	loads = 0
	device("d2")
	put("at a new device of the number", 1)
	second := hook.Place{Device: place.Device, Path: path, Stage: hook.Stamp, Name: "b"}
	must(t, set.Put(at, second, load))
	must(t, set.Drop(func(d container.Device, egress bool, name string) bool {
		return d == place.Device && egress && name == "a"
	}))
	if set.Len() != 1 {
		t.Errorf("%d left of two, one of which was dropped", set.Len())
	}
	must(t, set.Close())
	if set.Len() != 0 || len(j.Entries()) != 0 {
		t.Errorf("left: %d programs, %+v", set.Len(), j.Entries())
	}
}
