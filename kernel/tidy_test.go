package kernel

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/kernel/cgroup"
	"github.com/fairlead-project/fairlead/kernel/journal"
	"github.com/fairlead-project/fairlead/kernel/netdev"
	"github.com/fairlead-project/fairlead/kernel/qdisc"
	"github.com/fairlead-project/fairlead/kernel/sched"
)

func TestMain(m *testing.M) { testkit.Main(m) }

// Tidy removes only an empty cgroup of a container that has ended, and on v2 only a runtime's.
func TestTidy(t *testing.T) {
	testkit.OnKernels(t)
	cg := testkit.Cgroup(t)
	if cg.V2 == "" || cg.CPU == "" {
		testkit.Skip(t, "no cgroup v2 tree, or no cpu controller")
	}
	v2 := filepath.Dir(cg.V2) == filepath.Dir(cg.CPU)
	made := func(name string, lives bool) (dir string, id uint64) {
		t.Helper()
		both := cg.Child(t, name)
		id, err := cgroup.ID(both.V2)
		testkit.Must(t, err)
		switch {
		case lives && v2:
			id++ // another cgroup that has taken the name
		case !lives && !v2:
			testkit.Must(t, os.Remove(both.V2))
		}
		return both.CPU, id
	}
	runtimes := func(name string) string { return name + "-" + strings.Repeat("0123456789abcdef", 4) }
	ended, endedID := made(runtimes("ended"), false)
	lives, livesID := made(runtimes("lives"), true)
	busy, busyID := made(runtimes("busy"), false)
	users, usersID := made("users", !v2)
	testkit.CG{CPU: busy}.Sleeper(t)

	entry := func(kind, dir string, id uint64) journal.Outcome {
		if v2 && kind == sched.KindKthread {
			dir = filepath.Join(dir, "fairlead") // which has gone, or is empty
		}
		return journal.Outcome{Result: journal.Gone, Entry: journal.Entry{
			Ref: journal.Ref{Kind: kind, Object: "1:1:" + filepath.Dir(cg.CPU)}, Wrote: dir, Owner: journal.Owner{Container: id},
		}}
	}
	other, otherID := made(runtimes("other"), false)
	queue, _ := made(runtimes("queue"), false) // a thread that serves the whole host was in it
	if v2 {
		testkit.Must(t, os.Mkdir(filepath.Join(queue, "fairlead"), 0o755))
	}
	failed := entry(sched.KindKthread, other, otherID)
	failed.Err = errors.New("not restored")
	outside := t.TempDir()
	out := []journal.Outcome{
		entry(sched.KindKthread, ended, endedID), entry(sched.KindKthread, ended, endedID),
		entry(sched.KindKthread, lives, livesID), entry(sched.KindKthread, busy, busyID), entry(sched.KindKthread, users, usersID),
		entry(sched.KindKthread, queue, 0),
		entry(cgroup.KindFile, other, otherID), failed,
		entry(sched.KindKthread, outside, 0), entry(sched.KindKthread, filepath.Dir(cg.CPU), 0),
	}
	testkit.Check(t, Tidy(Default(), out))
	for _, dir := range []string{lives, busy, users, other, outside} {
		testkit.Is(t, "it removed "+dir, testkit.Err(os.Stat(dir)), nil)
	}
	for _, dir := range []string{ended, queue} {
		testkit.Is(t, dir, testkit.Err(os.Stat(dir)), os.ErrNotExist)
	}
}

// Without its journal, an agent knows what an earlier one has made by its mark, and takes none of it
// for the owner's.
func TestReclaim(t *testing.T) {
	testkit.OnKernels(t)
	at := testkit.NetNS(t)
	at.Bind(t)
	testkit.Veth(t, at, "u0", testkit.NetNS(t), "u1")
	testkit.Veth(t, at, "u2", testkit.NetNS(t), "u3")
	ns, err := netdev.Open(at.Path)
	testkit.Must(t, err)
	defer ns.Close()
	index, err := ns.Index("u0")
	testkit.Must(t, err)
	layout, err := cgroup.Detect("/proc", "")
	testkit.Must(t, err)
	r := Default()
	r.Proc = t.TempDir()
	testkit.Must(t, os.MkdirAll(filepath.Join(r.Proc, "self/ns"), 0o700))
	show := func(target, name string) { testkit.Must(t, os.Symlink(target, filepath.Join(r.Proc, name))) }
	show(at.Path, "self/ns/net")
	show("/proc/self/mountinfo", "self/mountinfo")
	show("/proc/sys", "sys")
	read := func(k journal.Knob) string {
		t.Helper()
		v, err := k.Read()
		testkit.Must(t, err)
		return v
	}
	before := make(map[journal.Ref]string)
	var written []journal.Knob
	write := func(k journal.Knob, value string) {
		before[k.Ref()], written = read(k), append(written, k)
		testkit.Must(t, k.Write(value))
	}
	write(ns.IFB(index, true), netdev.OurIFB)
	write(qdisc.Root(ns, index), qdisc.Ours(qdisc.KindHTB))
	write(qdisc.ForwardPriority("/proc", ns), "0")
	filter, err := Opener(Default())(journal.Ref{Kind: qdisc.KindFilter, Object: fmt.Sprintf("%d/%d/egress/x", ns.Inode(), index)})
	testkit.Must(t, err)
	before[filter.Ref()], written = read(filter), append(written, filter)
	program, err := testkit.Verdict(ebpf.SchedCLS, "fl_test", -1)
	testkit.Must(t, err)
	defer program.Close()
	testkit.Must(t, ns.Do(func() error {
		clsact := netlink.QdiscAttrs{LinkIndex: index, Handle: netlink.MakeHandle(0xffff, 0), Parent: netlink.HANDLE_CLSACT}
		return errors.Join(netlink.QdiscAdd(&netlink.Clsact{QdiscAttrs: clsact}), netlink.FilterAdd(&netlink.BpfFilter{
			FilterAttrs: netlink.FilterAttrs{LinkIndex: index, Parent: netlink.HANDLE_MIN_EGRESS, Priority: 1, Handle: qdisc.Handle, Protocol: unix.ETH_P_ALL},
			Fd:          program.FD(), Name: "fairlead, clsact: x", DirectAction: true,
		}))
	}))
	want := 4
	if _, err := ns.NAPIs(index); !errors.Is(err, netdev.ErrNoNAPIList) {
		group := UplinkGroup(layout, ns.Inode())
		write(cgroup.Group(group), cgroup.Present)
		before[cgroup.Group(group).Ref()] = cgroup.Absent // a killed test may have left one
		testkit.Must(t, ns.Offload(index, netdev.GRO).Write(netdev.GRO.On()))
		write(ns.Threaded(index), "1")
		napis, err := ns.NAPIs(index)
		testkit.Must(t, err)
		want += 2 + len(napis)
		for _, n := range napis {
			th, err := sched.Find("/proc", n.Thread)
			testkit.Must(t, err)
			show(fmt.Sprint("/proc/", th.TID), fmt.Sprint(th.TID))
			testkit.Must(t, sched.Group("/proc", layout, th, layout.CPU).Write(group))
		}
	}
	j := testkit.Journal(t, journal.Open)
	for range 2 {
		testkit.Must(t, Reclaim(r, j, "traffic", "netcpu"))
	}
	if n := len(j.Entries()); n != want {
		t.Errorf("%d entries, want %d: %+v", n, want, j.Entries())
	}
	_, err = j.Restore(Opener(Default()), nil)
	testkit.Must(t, err)
	for _, k := range written {
		if now, was := read(k), before[k.Ref()]; now != was {
			t.Errorf("%+v is %s, was %s", k.Ref(), now, was)
		}
	}
}
