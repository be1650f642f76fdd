package discover

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/kernel/cgroup"
	"github.com/fairlead-project/fairlead/kernel/netdev"
)

var must = testkit.Must

func TestMain(m *testing.M) { testkit.Main(m) }

// fake is a source that reports what the test says.
type fake struct {
	name    string
	publish func(Report)
	ready   chan struct{}
}

func newFake(name string) *fake { return &fake{name: name, ready: make(chan struct{})} }

func (f *fake) Name() string { return f.name }

func (f *fake) Run(ctx context.Context, publish func(Report)) error {
	f.publish = publish
	close(f.ready)
	<-ctx.Done()
	return nil
}

func (f *fake) report(records ...Record) {
	<-f.ready
	f.publish(Report{Records: records})
}

func (f *fake) fail(err error) {
	<-f.ready
	f.publish(Report{Err: err})
}

// runSet runs a Set until t ends.
func runSet(t *testing.T, cfg Config, sources ...Source) *Set {
	t.Helper()
	s := NewSet(cfg, sources...)
	stop := testkit.Background(t, s.Run)
	t.Cleanup(func() { testkit.Check(t, stop()) })
	return s
}

// await waits until the Snapshot satisfies ok, and returns it.
func await(t *testing.T, s *Set, what string, ok func(Snapshot) bool) Snapshot {
	t.Helper()
	timeout := time.After(90 * time.Second)
	for {
		changed := s.Changed()
		snap := s.Snapshot()
		if ok(snap) {
			return snap
		}
		select {
		case <-changed:
		case <-timeout:
			t.Fatalf("%s: not within 90 s; sources %+v, containers %+v", what, snap.Sources, snap.Containers)
		}
	}
}

func named(snap Snapshot, name string) (container.Container, bool) {
	i := slices.IndexFunc(snap.Containers, func(c container.Container) bool { return c.Name == name })
	if i < 0 {
		return container.Container{}, false
	}
	return snap.Containers[i], true
}

func awaitName(t *testing.T, s *Set, name string) container.Container {
	t.Helper()
	snap := await(t, s, "container "+name, func(snap Snapshot) bool { _, ok := named(snap, name); return ok })
	c, _ := named(snap, name)
	return c
}

func awaitGone(t *testing.T, s *Set, name string) {
	t.Helper()
	await(t, s, "end of container "+name, func(snap Snapshot) bool { _, ok := named(snap, name); return !ok })
}

// sleeper starts a process in a network namespace and a cgroup.
func sleeper(t *testing.T, ns *testkit.NS, cg testkit.CG) *exec.Cmd {
	t.Helper()
	cmd := ns.Start(t, "sleep", "1000")
	cg.Add(t, cmd.Process.Pid)
	return cmd
}

func idOf(t *testing.T, cg testkit.CG) container.ID {
	t.Helper()
	id, err := cgroup.ID(cg.V2)
	must(t, err)
	return container.ID(id)
}

func TestSetDescribes(t *testing.T) {
	testkit.OnKernels(t)
	ns, host := testkit.NetNS(t), testkit.NetNS(t)
	testkit.Veth(t, ns, "fl0", host, "flh0")
	h := host.Handle(t)
	host.Port(t, "flh0", "flbr0")
	outer, err := h.LinkByName("flh0")
	must(t, err)
	path := host.Bind(t)
	cg := testkit.Cgroup(t)
	before := time.Now().Add(-50 * time.Millisecond)
	cmd := sleeper(t, ns, cg)

	src := newFake("docker")
	s := runSet(t, Config{}, src)
	if snap := s.Snapshot(); snap.Complete || len(snap.Sources) != 1 || snap.Sources[0].Listed {
		t.Errorf("before the first report: %+v", snap)
	}
	rec := Record{PID: cmd.Process.Pid, Name: "one", RuntimeID: "abc", Image: "img", Labels: map[string]string{"k": "v"}, Pod: "p", Namespace: "n"}
	src.report(rec)
	c := awaitName(t, s, "n/p/one")
	inner, err := ns.Handle(t).LinkByName("fl0")
	must(t, err)
	if c.Started.Before(before) || c.Started.After(time.Now()) {
		t.Errorf("started %v, the test did at %v", c.Started, before)
	}
	want := container.Container{
		ID: idOf(t, cg), Name: "n/p/one", Source: "docker", RuntimeID: "abc", Image: "img", Labels: rec.Labels, Pod: "p", Namespace: "n",
		PID: cmd.Process.Pid, Started: c.Started, NetNS: ns.Inode, Cgroup: c.Cgroup,
		Interfaces: []container.Interface{{
			Name: "fl0", Index: inner.Attrs().Index, Kind: "veth", MAC: inner.Attrs().HardwareAddr.String(), Addrs: c.Interfaces[0].Addrs,
			Host: container.HostEnd{NetNS: host.Inode, NSPath: path, Name: "flh0", Index: outer.Attrs().Index, Master: "flbr0", Trusted: true},
		}},
	}
	testkit.Same(t, "container", want, c)
	if c.Cgroup.V2 != cg.V2 || cg.CPU != "" && c.Cgroup.CPU != cg.CPU {
		t.Errorf("cgroup %+v, want %+v", c.Cgroup, cg)
	}
	if !s.Snapshot().Complete {
		t.Error("not complete")
	}

	// A device that comes later is seen without the source saying anything.
	must(t, ns.Handle(t).LinkAdd(&netlink.Ifb{LinkAttrs: netlink.LinkAttrs{Name: "fl1"}}))
	await(t, s, "second device", func(snap Snapshot) bool {
		c, ok := named(snap, "n/p/one")
		return ok && len(c.Interfaces) == 2 && c.Interfaces[1].Name == "fl1" && c.Interfaces[1].Host == container.HostEnd{}
	})

	rec.Name = "renamed"
	src.report(rec)
	awaitName(t, s, "n/p/renamed")
}

// TestSetEnds is about the end of a container that its source says nothing of.
func TestSetEnds(t *testing.T) {
	var ahead atomic.Int64
	now := func() time.Time { return time.Now().Add(time.Duration(ahead.Load())) }
	cg := testkit.Cgroup(t)
	cmd := sleeper(t, testkit.NetNS(t), cg)
	src := newFake("docker")
	s := runSet(t, Config{Now: now, Keep: time.Minute}, src)
	src.report(Record{PID: cmd.Process.Pid, Name: "mortal", RuntimeID: "abc"})
	c := awaitName(t, s, "mortal")
	src.fail(errors.New("engine is down"))
	await(t, s, "failure", func(snap Snapshot) bool { return snap.Sources[0].Err != nil })
	if _, ok := named(s.Snapshot(), "mortal"); !ok {
		t.Error("a container went with its engine")
	}

	cmd.Process.Kill()
	awaitGone(t, s, "mortal")
	if !s.Snapshot().Complete {
		t.Error("the list is not complete any more")
	}
	dead, ok := s.Lookup(c.ID)
	if want := c; !ok {
		t.Error("the name of a container that has just ended is not known")
	} else {
		want.PID, want.NetNS = 0, 0
		testkit.Same(t, "ended container", want, dead)
	}
	// A source that is behind must not bring it back.
	src.report(Record{PID: cmd.Process.Pid, Name: "mortal", RuntimeID: "abc"})
	await(t, s, "recovery", func(snap Snapshot) bool { return snap.Sources[0].Err == nil })
	if c, ok := named(s.Snapshot(), "mortal"); ok {
		t.Errorf("came back: %+v", c)
	}
	ahead.Store(int64(time.Minute + time.Second))
	if c, ok := s.Lookup(c.ID); ok {
		t.Errorf("still known after its time: %+v", c)
	}
	if _, ok := s.Lookup(1 << 60); ok {
		t.Error("found a container that never was")
	}

	// A new process in the same cgroup is the same container, started again.
	again := sleeper(t, testkit.NetNS(t), cg)
	src.report(Record{PID: again.Process.Pid, Name: "mortal", RuntimeID: "abc"})
	if back := awaitName(t, s, "mortal"); back.PID != again.Process.Pid || back.ID != c.ID {
		t.Errorf("restarted: %+v", back)
	}
}

// TestSetAwaitsTheRuntime has three cgroups that are new. Two have an engine's names: it reports one,
// and the other counts only after a time.
func TestSetAwaitsTheRuntime(t *testing.T) {
	cg, ns := testkit.Cgroup(t), testkit.NetNS(t)
	var records []Record
	var pids []int
	for i, name := range []string{"old", "told", "late", "bare"} {
		dir := name
		if name != "bare" {
			dir = fmt.Sprintf("%064x", i)
		}
		at := cg.Child(t, dir)
		records, pids = append(records, Record{CgroupV2: at.V2, Name: name}), append(pids, sleeper(t, ns, at).Process.Pid)
	}
	var ahead atomic.Int64
	start := time.Now()
	runtime, tree := newFake("docker"), newFake(container.CgroupSource)
	s := runSet(t, Config{Now: func() time.Time { return start.Add(time.Duration(ahead.Load())) }}, runtime, tree)
	runtime.report()
	tree.report(records[0])
	await(t, s, "one that was there before", func(snap Snapshot) bool { return snap.Complete && len(snap.Containers) == 1 })
	tree.report(records...)
	runtime.report(Record{PID: pids[1], Name: "web"})
	await(t, s, "others", func(snap Snapshot) bool { return len(snap.Containers) == 3 })
	snap := s.Snapshot()
	if _, ok := named(snap, "late"); ok || !snap.Complete {
		t.Errorf("containers %+v", snap.Containers)
	}
	ahead.Store(int64(youth))
	runtime.report(Record{PID: pids[1], Name: "renamed"})
	awaitName(t, s, "late")
}

// TestSetMerges has two sources that know the same cgroup.
func TestSetMerges(t *testing.T) {
	cg := testkit.Cgroup(t)
	leaf := cg.Child(t, "0123456789abcdef")
	sub := leaf.Child(t, "init.scope")
	ns := testkit.NetNS(t)
	first, second := sleeper(t, ns, sub), sleeper(t, ns, cg.Child(t, "other"))

	tree, runtime := newFake(container.CgroupSource), newFake("containerd")
	s := runSet(t, Config{}, runtime, tree)
	tree.report(
		Record{CgroupV2: leaf.V2, Name: "0123456789abcdef"},
		Record{CgroupV2: sub.V2, Name: "init.scope"},
		Record{CgroupV2: filepath.Join(cg.V2, "other"), Name: "other"},
		Record{CgroupV2: filepath.Dir(cg.V2), Name: "root"},
		Record{CgroupV2: "/etc", Name: "elsewhere"},
		Record{CgroupV2: cg.V2 + "/../..", Name: "tricky"},
		Record{CgroupV2: cg.V2 + "/absent", Name: "absent"},
	)
	await(t, s, "the tree's containers", func(snap Snapshot) bool { return len(snap.Containers) == 3 })
	if s.Snapshot().Complete {
		t.Error("complete without a report of the runtime")
	}
	runtime.report(Record{PID: first.Process.Pid, Name: "named", RuntimeID: "0123456789abcdef"})
	snap := await(t, s, "the runtime's word", func(snap Snapshot) bool { return snap.Complete && len(snap.Containers) == 2 })
	c, ok := named(snap, "named")
	if !ok || c.Source != "containerd" || c.ID != idOf(t, leaf) || c.Cgroup.V2 != leaf.V2 || c.PID != first.Process.Pid {
		t.Errorf("named: %+v", c)
	}
	if leaf.CPU != "" && c.Cgroup.CPU != leaf.CPU {
		t.Errorf("cpu cgroup %s, want %s", c.Cgroup.CPU, leaf.CPU)
	}
	o, ok := named(snap, "other")
	if !ok || o.Source != container.CgroupSource || o.PID != second.Process.Pid || o.NetNS != c.NetNS || o.NetNS != ns.Inode {
		t.Errorf("other: %+v", o)
	}
	if !slices.IsSortedFunc(snap.Containers, func(a, b container.Container) int { return int(a.ID) - int(b.ID) }) {
		t.Error("not in order of id")
	}
	// The runtime forgets it, and the tree's word counts again.
	runtime.report()
	await(t, s, "the tree's word", func(snap Snapshot) bool {
		c, ok := named(snap, "0123456789abcdef")
		return ok && c.Source == container.CgroupSource && c.ID == idOf(t, leaf)
	})

	// The process that stands for a cgroup ends, another one takes over.
	third := sleeper(t, ns, sub)
	first.Process.Kill()
	await(t, s, "the next process", func(snap Snapshot) bool {
		c, ok := named(snap, "0123456789abcdef")
		return ok && c.PID == third.Process.Pid
	})
	third.Process.Kill()
	awaitGone(t, s, "0123456789abcdef")
}

func TestSetHostNetwork(t *testing.T) {
	cg := testkit.Cgroup(t)
	cmd, _ := onHost(t, cg, "sleep", "1000")
	src := newFake("docker")
	s := runSet(t, Config{}, src)
	src.report(Record{PID: cmd.Process.Pid, Name: "open"}, Record{PID: 1 << 22, Name: "no such process"}, Record{PID: -5}, Record{})
	c := awaitName(t, s, "open")
	own, err := netdev.InodeOf("/proc", os.Getpid())
	must(t, err)
	if !c.HostNetwork || c.NetNS != own || c.Interfaces != nil {
		t.Errorf("container %+v", c)
	}
	testkit.Same(t, "containers", 1, len(s.Snapshot().Containers))
}

// TestSetLeavesNothing starts and ends many short lives, and counts what the
// process holds open before and after.
func TestSetLeavesNothing(t *testing.T) {
	testkit.NeedRoot(t)
	src := newFake("docker")
	s := runSet(t, Config{}, src)
	src.report()
	await(t, s, "the empty list", func(snap Snapshot) bool { return snap.Complete })
	before := openFiles(t)
	t.Run("lives", func(t *testing.T) {
		cg := testkit.Cgroup(t)
		var records []Record
		for i := range 40 {
			name := fmt.Sprintf("c%d", i)
			cmd := sleeper(t, testkit.NetNS(t), cg.Child(t, name))
			records = append(records, Record{PID: cmd.Process.Pid, Name: name, RuntimeID: name})
			src.report(records...)
			if i%2 == 0 {
				cmd.Process.Kill() // some of them before anybody has looked
			}
		}
		await(t, s, "those that live", func(snap Snapshot) bool { return len(snap.Containers) == 20 && snap.Complete })
	})
	await(t, s, "the end of all", func(snap Snapshot) bool { return len(snap.Containers) == 0 })
	src.report()
	testkit.AwaitNone(t, func() string {
		after := openFiles(t)
		if len(after) <= len(before) {
			return ""
		}
		return fmt.Sprintf("open before: %v\nopen after: %v", before, after)
	})
}

func openFiles(t *testing.T) []string {
	t.Helper()
	names, err := filepath.Glob("/proc/self/fd/*")
	must(t, err)
	var open []string
	for _, name := range names {
		if target, err := os.Readlink(name); err == nil {
			open = append(open, target)
		}
	}
	return open
}

func TestSetNeedsV2(t *testing.T) {
	proc := testkit.Tree(t, map[string]string{"self/mountinfo": "32 31 0:29 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n"})
	if err := NewSet(Config{Proc: proc}).Run(t.Context()); !errors.Is(err, cgroup.ErrNone) || !strings.Contains(err.Error(), "v2") {
		t.Errorf("v1 host: %v, want an error about v2 that is ErrNone", err)
	}
	testkit.Is(t, "no proc", NewSet(Config{Proc: proc + "/absent"}).Run(t.Context()), fs.ErrNotExist)
}

// TestNoSource has no runtime and no container: a normal state.
func TestNoSource(t *testing.T) {
	dir := t.TempDir()
	s := runSet(t, Config{}, Docker("unix://"+dir+"/d.sock"), Podman("unix://"+dir+"/p.sock"), Containerd(dir+"/c.sock"))
	snap := await(t, s, "complete", func(snap Snapshot) bool { return snap.Complete })
	for _, src := range snap.Sources {
		if src.Err != nil || !src.Listed || src.Records != 0 {
			t.Errorf("source %+v", src)
		}
	}
}

func TestTombstonesAreBounded(t *testing.T) {
	s := NewSet(Config{})
	now := time.Now()
	for i := range maxEnded + 10 {
		s.bury(container.Container{ID: container.ID(i + 1)}, now.Add(time.Duration(i)*time.Millisecond))
	}
	testkit.Same(t, "tombstones", maxEnded, len(s.ended))
	if _, ok := s.ended[1]; ok {
		t.Error("the oldest was kept")
	}
}

// A Set that does not come to the end of a look says since when.
func TestBusy(t *testing.T) {
	var asked atomic.Int64
	hangs, release := make(chan struct{}), make(chan struct{})
	began := time.Unix(1_000_000, 0)
	s := runSet(t, Config{Now: func() time.Time {
		if asked.Add(1) == 3 { // the time of boot, the beginning of a look, and within it
			close(hangs)
			<-release
		}
		return began
	}})
	<-hangs
	if got := s.Busy(); !got.Equal(began) {
		t.Errorf("while it hangs it is busy since %v, want %v", got, began)
	}
	close(release)
	await(t, s, "the end of the look", func(snap Snapshot) bool { return snap.Complete })
	testkit.Await(t, "it is not busy", func() bool { return s.Busy().IsZero() })
}
