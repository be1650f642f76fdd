package discover

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/fsnotify/fsnotify"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/kernel/netdev"
)

// awaitBelow waits until the Snapshot has exactly these directories of those below dir.
func awaitBelow(t *testing.T, s *Set, dir string, want ...string) {
	t.Helper()
	slices.Sort(want)
	await(t, s, strings.Join(want, ", "), func(snap Snapshot) bool {
		var found []string
		for _, c := range snap.Containers {
			if name, ok := strings.CutPrefix(c.Cgroup.V2, dir+"/"); ok {
				found = append(found, name)
			}
		}
		return slices.Equal(slices.Sorted(slices.Values(found)), want)
	})
}

func TestCgroupTree(t *testing.T) {
	testkit.OnKernels(t)
	cg := testkit.Cgroup(t)
	ns := testkit.NetNS(t)
	sleeper(t, ns, cg.Child(t, "before"))
	s := runSet(t, Config{}, CgroupTree("/proc", ""))
	awaitBelow(t, s, cg.V2, "before")

	// In a cgroup that comes later, in one deep down, in the host's network (which counts only in a
	// scope), and in none.
	sleeper(t, ns, cg.Child(t, "after"))
	deep := cg.Child(t, "kubepods").Child(t, "pod1").Child(t, "c1")
	sleeper(t, ns, deep)
	onHost(t, cg.Child(t, "plain"), "sleep", "1000")
	scope := cg.Child(t, "fl.scope")
	inScope, _ := onHost(t, scope, "sleep", "1000")
	cg.Child(t, "empty")
	onHost(t, cg.Child(t, "crio-conmon-"+strings.Repeat("0a", 32)+".scope"), "sleep", "1000") // watches a container, and is none
	awaitBelow(t, s, cg.V2, "before", "after", "kubepods/pod1/c1", "fl.scope")
	c := awaitName(t, s, "c1")
	if c.Source != container.CgroupSource || c.ID != idOf(t, deep) || c.NetNS != ns.Inode || c.RuntimeID != "" || c.HostNetwork {
		t.Errorf("c1: %+v", c)
	}
	if c := awaitName(t, s, "fl.scope"); !c.HostNetwork || c.PID != inScope.Process.Pid {
		t.Errorf("fl.scope: %+v", c)
	}

	// A container's own cgroups are not containers.
	nested := cg.Child(t, "nested")
	sleeper(t, ns, nested)
	sleeper(t, ns, nested.Child(t, "inner"))
	awaitBelow(t, s, cg.V2, "before", "after", "kubepods/pod1/c1", "fl.scope", "nested")

	// A process that gets its network only once it is in there, as a runtime's first process does.
	late := cg.Child(t, "late")
	_, in := onHost(t, late, "sh", "-c", "read x; exec unshare --net sleep 1000")
	must(t, testkit.Err(io.WriteString(in, "now\n")))
	awaitBelow(t, s, cg.V2, "before", "after", "kubepods/pod1/c1", "fl.scope", "nested", "late")

	inScope.Process.Kill()
	awaitBelow(t, s, cg.V2, "before", "after", "kubepods/pod1/c1", "nested", "late")
}

// onHost starts a process in a cgroup and in our own network namespace.
func onHost(t *testing.T, cg testkit.CG, name string, arg ...string) (*exec.Cmd, io.Writer) {
	t.Helper()
	cmd := exec.Command(name, arg...)
	in, err := cmd.StdinPipe()
	must(t, err)
	must(t, cmd.Start())
	t.Cleanup(func() { cmd.Process.Kill(); cmd.Wait() })
	cg.Add(t, cmd.Process.Pid)
	return cmd, in
}

// newTree makes a tree that watches nothing.
func newTree(top string) *tree {
	return &tree{proc: "/proc", top: top, nodes: make(map[string]*node), due: make(map[string]*node)}
}

// populate says of a cgroup whether it has processes.
func populate(t *testing.T, dir, value string) {
	t.Helper()
	testkit.Write(t, filepath.Join(dir, "cgroup.events"), "populated "+value+"\n")
}

// finish walks a tree, and looks until nothing is due.
func finish(tr *tree) {
	tr.walk()
	for now, wait := time.Now(), time.Duration(0); wait >= 0; now = now.Add(max(wait, time.Millisecond)) {
		wait = tr.look(now)
	}
}

// TestTreeIsBounded has a tree that is deeper than is looked at.
func TestTreeIsBounded(t *testing.T) {
	top := t.TempDir()
	must(t, os.MkdirAll(filepath.Join(top, strings.Repeat("d/", treeDepth+5)), 0o755))
	tr := newTree(top)
	tr.walk()
	if want := treeDepth + 1; len(tr.nodes) != want { // and top
		t.Errorf("%d cgroups, want %d", len(tr.nodes), want)
	}
	for i := range treeSize {
		tr.nodes[fmt.Sprintf("%s/x%d", top, i)] = &node{}
	}
	before := len(tr.nodes)
	tr.add(t.TempDir(), true)
	testkit.Same(t, "took more than the limit", before, len(tr.nodes))
	tr.walk()
	testkit.Same(t, "cgroups after those that are gone were forgotten", treeDepth+1, len(tr.nodes))
}

// TestTreeBlind has no inotify: what lists alone find.
func TestTreeBlind(t *testing.T) {
	cg := testkit.Cgroup(t)
	own, err := netdev.InodeOf("/proc", os.Getpid())
	must(t, err)
	tr := newTree(cg.V2)
	tr.host = own
	list := func() string {
		tr.walk()
		tr.look(time.Now())
		var names []string
		for _, rec := range tr.records() {
			names = append(names, rec.Name)
		}
		return strings.Join(names, " ")
	}
	if got := list(); got != "" || !tr.blind {
		t.Errorf("empty tree: %q, blind %v", got, tr.blind)
	}
	cmd := sleeper(t, testkit.NetNS(t), cg.Child(t, "one"))
	onHost(t, cg.Child(t, "two.scope"), "sleep", "1000")
	onHost(t, cg.Child(t, "three"), "sleep", "1000")
	testkit.Same(t, "found", "one two.scope", list())
	cmd.Process.Kill()
	cmd.Wait()
	testkit.Same(t, "found", "two.scope", list())
}

// A user may make any number of cgroups, all at once: a few are added, and none in place of root's.
func TestTreeOfOthers(t *testing.T) {
	testkit.NeedRoot(t)
	top := t.TempDir()
	user := filepath.Join(top, "user.slice")
	for i := range 2 * treeOthers {
		dir := filepath.Join(user, fmt.Sprintf("web-%d", i))
		must(t, errors.Join(os.MkdirAll(dir, 0o755), os.Chown(dir, 1000, 1000)))
	}
	tr := newTree(top)
	tr.walk()
	if want := treeOthers + 2; len(tr.nodes) != want || !tr.over { // and the two above
		t.Errorf("%d cgroups, want %d; that some were left out: %v", len(tr.nodes), want, tr.over)
	}
	late := filepath.Join(top, "system.slice")
	must(t, os.MkdirAll(late, 0o755))
	if tr.event(fsnotify.Event{Name: late, Op: fsnotify.Create}); tr.nodes[late] == nil {
		t.Error("one of root's has no room")
	}
	must(t, os.RemoveAll(user))
	tr.walk()
	if len(tr.nodes) != 2 || tr.others != 0 || tr.over {
		t.Errorf("%d cgroups, %d of others, left out %v, after those have gone", len(tr.nodes), tr.others, tr.over)
	}
	for i := range 2 * treeEvents { // one after the other
		dir := filepath.Join(top, "x")
		must(t, errors.Join(os.Mkdir(dir, 0o755), os.Chown(dir, 1000, 1000)))
		tr.event(fsnotify.Event{Name: dir, Op: fsnotify.Create})
		if took := tr.nodes[dir] != nil; took != (i < treeEvents) {
			t.Fatalf("number %d was taken up: %v", i, took)
		}
		must(t, os.Remove(dir))
		tr.event(fsnotify.Event{Name: dir, Op: fsnotify.Remove})
	}
	if !tr.over || tr.others != 0 {
		t.Errorf("left out %v, %d of others", tr.over, tr.others)
	}
}

// Who makes and removes cgroups without end makes no more work than so many steps, and lists that
// come now and then; what is there when they do is found.
func TestTreeFlooded(t *testing.T) {
	top := t.TempDir()
	const most = 100
	tr := newTree(top)
	tr.most, tr.relist, tr.blindly = most, time.Hour, 20*time.Millisecond
	ctx, cancel := context.WithCancel(t.Context())
	reports, ended := make(chan Report), make(chan error)
	go func() { ended <- tr.session(ctx, into(ctx, reports)) }()
	next := func() Report {
		t.Helper()
		select {
		case r := <-reports:
			return r
		case <-time.After(90 * time.Second):
			t.Fatal("no report within 90 s")
			return Report{}
		}
	}
	if r := next(); r.Partial || len(r.Records) != 0 {
		t.Errorf("before: %+v", r)
	}
	flood := func() {
		for range 10 * most {
			dir := filepath.Join(top, "x")
			must(t, errors.Join(os.Mkdir(dir, 0o755), os.Remove(dir)))
		}
	}
	flood()
	if r := next(); !r.Partial {
		t.Errorf("flooded: %+v", r)
	}
	flood()
	populate(t, filepath.Join(top, "one.scope"), "1")
	for r := next(); len(r.Records) != 1; r = next() {
		if !r.Partial {
			t.Errorf("without a watch: %+v", r)
		}
	}
	cancel()
	testkit.Check(t, <-ended)
	if tr.watch != nil || tr.steps > most+1 || !tr.flooded {
		t.Errorf("watches %v, %d steps, flooded %v", tr.watch != nil, tr.steps, tr.flooded)
	}

	// It watches again later, and is believed once it could follow for as long.
	tr.relist = 20 * time.Millisecond
	ctx, cancel = context.WithCancel(t.Context())
	go func() { ended <- tr.session(ctx, func(r Report) { reports <- r }) }()
	if r := next(); !r.Partial || len(r.Records) != 1 {
		t.Errorf("watching again: %+v", r)
	}
	if r := next(); r.Partial || len(r.Records) != 1 {
		t.Errorf("after a calm time: %+v", r)
	}
	cancel()
	testkit.Check(t, <-ended)
}

// Of many cgroups, a change makes those be looked at that have changed.
func TestTreeLooksAtChanges(t *testing.T) {
	top := t.TempDir()
	for i := range 100 {
		populate(t, filepath.Join(top, fmt.Sprintf("%d.scope", i)), "1")
	}
	tr := newTree(top)
	finish(tr)
	if len(tr.due) != 0 || tr.steps != 0 || len(tr.records()) != 100 {
		t.Fatalf("%d are due, %d steps, %d containers", len(tr.due), tr.steps, len(tr.records()))
	}
	// Whichever is looked at now is no container any more.
	for i := range 100 {
		must(t, os.Remove(filepath.Join(top, fmt.Sprintf("%d.scope", i), "cgroup.events")))
	}
	tr.event(fsnotify.Event{Name: filepath.Join(top, "7.scope", "cgroup.events"), Op: fsnotify.Write})
	if tr.look(time.Now().Add(time.Second)); len(tr.records()) != 99 || tr.steps != 0 {
		t.Errorf("%d containers, %d steps", len(tr.records()), tr.steps)
	}
}

// TestTreeWrites writes to the files of one cgroup without end: events of that one are ignored, and
// those of all others are not.
func TestTreeWrites(t *testing.T) {
	top := t.TempDir()
	noisy, quiet := filepath.Join(top, "noisy.scope"), filepath.Join(top, "quiet.scope")
	populate(t, noisy, "0")
	populate(t, quiet, "0")
	tr := newTree(top)
	tr.most, tr.blindly = treeWrites, treeBlind
	finish(tr)
	for range treeWrites {
		for _, file := range []string{"cgroup.freeze", "cgroup.procs"} {
			tr.event(fsnotify.Event{Name: filepath.Join(noisy, file), Op: fsnotify.Write})
		}
		tr.event(fsnotify.Event{Name: noisy, Op: fsnotify.Chmod})
	}
	if tr.steps != 0 || !tr.nodes[noisy].deaf {
		t.Errorf("%d steps, %+v", tr.steps, tr.nodes[noisy])
	}
	populate(t, noisy, "1")
	populate(t, quiet, "1")
	tr.event(fsnotify.Event{Name: filepath.Join(quiet, "cgroup.events"), Op: fsnotify.Write})
	now := time.Now()
	if tr.look(now.Add(time.Second)); len(tr.records()) != 1 || tr.records()[0].Name != "quiet.scope" {
		t.Errorf("at once: %+v", tr.records())
	}
	if wait := tr.look(now.Add(treeBlind + time.Second)); len(tr.records()) != 2 || wait > treeBlind {
		t.Errorf("in the end: %+v, the next look in %v", tr.records(), wait)
	}
	tr.walk()
	if n := tr.nodes[noisy]; n.deaf || n.writes != 0 {
		t.Fatalf("after a walk: %+v", n)
	}
	finish(tr)
}
