package discover

import (
	"errors"
	"fmt"
	"maps"
	"os"
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

// TestSetSharedNetwork has a pod: one network, several containers. What changes there has changed
// for all of them.
func TestSetSharedNetwork(t *testing.T) {
	cg, ns := testkit.Cgroup(t), testkit.NetNS(t)
	src := newFake("containerd")
	s := runSet(t, Config{}, src)
	var records []Record
	for i := range 5 {
		name := fmt.Sprintf("c%d", i)
		records = append(records, Record{PID: sleeper(t, ns, cg.Child(t, name)).Process.Pid, Name: name})
	}
	src.report(records...)
	all := func(devices int) func(Snapshot) bool {
		return func(snap Snapshot) bool {
			n := 0
			for _, c := range snap.Containers {
				if len(c.Interfaces) == devices && c.NetNS == ns.Inode {
					n++
				}
			}
			return n == len(records)
		}
	}
	await(t, s, "the pod", all(0))
	for i := range 3 {
		must(t, ns.Handle(t).LinkAdd(&netlink.Ifb{LinkAttrs: netlink.LinkAttrs{Name: fmt.Sprintf("fl%d", i)}}))
		await(t, s, "the next device", all(i+1))
	}
}

// A container that cannot be looked at without a panic is left out, and looked at again.
func TestSetPanics(t *testing.T) {
	cg, ns := testkit.Cgroup(t), testkit.NetNS(t)
	src := newFake("containerd")
	var bad, noted atomic.Uint64
	s := runSet(t, Config{Look: func(of container.ID, fn func() error) error {
		if of == 0 {
			noted.Add(1)
			return nil
		}
		if bad.Load() == uint64(of) {
			return errors.New("panic")
		}
		return fn()
	}}, src)
	var records []Record
	for _, name := range []string{"one", "two"} {
		records = append(records, Record{PID: sleeper(t, ns, cg.Child(t, name)).Process.Pid, Name: name})
	}
	id, err := cgroup.ID(filepath.Join(cg.V2, "one"))
	must(t, err)
	bad.Store(id)
	src.report(records...)
	if snap := awaitNames(t, s, "the other", "two"); snap.Complete {
		t.Error("the list is complete without one")
	}
	bad.Store(0)
	awaitNames(t, s, "both", "one", "two")
	torn := fmt.Errorf("look at container: %w", &netdev.Panic{})
	for range 3 {
		src.fail(torn)
	}
	testkit.Same(t, "notes of a panic in three reports", uint64(1), noted.Load())
}

// TestSetPods has two pods with containers of the same name, as a kubelet makes them: each has a
// name of its own, and what holds a pod's namespaces is none of them, though the cgroup tree knows
// it too.
func TestSetPods(t *testing.T) {
	cg := testkit.Cgroup(t)
	src, tree := newFake("containerd"), newFake(container.CgroupSource)
	s := runSet(t, Config{}, src, tree)
	var records, bare []Record
	for i := range 2 {
		ns, pod := testkit.NetNS(t), fmt.Sprint("web-", i)
		pause := cg.Child(t, "pause-"+pod)
		records = append(records,
			Record{PID: sleeper(t, ns, pause).Process.Pid, Name: "pause", Pod: pod, Namespace: "default", Sandbox: true},
			Record{PID: sleeper(t, ns, cg.Child(t, "a-"+pod)).Process.Pid, Name: "a", Pod: pod, Namespace: "default"})
		bare = append(bare, Record{CgroupV2: pause.V2})
	}
	src.report(records...)
	tree.report(bare...)
	snap := await(t, s, "all of them", func(snap Snapshot) bool { return snap.Complete && len(snap.Containers) >= 2 })
	for i := range 2 {
		pod := fmt.Sprint("web-", i)
		if c, ok := named(snap, "default/"+pod+"/a"); !ok || c.Short() != "a" || c.Pod != pod {
			t.Errorf("%s: %+v", pod, c)
		}
	}
	if len(snap.Containers) != 2 {
		t.Errorf("containers %+v", snap.Containers)
	}
}

// TestSetMoved moves the processes of a container to other cgroups, and renames a cgroup, without
// an event.
func TestSetMoved(t *testing.T) {
	cg, ns := testkit.Cgroup(t), testkit.NetNS(t)
	one, two := cg.Child(t, "one"), cg.Child(t, "two")
	pid := sleeper(t, ns, one).Process.Pid
	src := newFake("docker")
	s := runSet(t, Config{Refresh: 50 * time.Millisecond}, src)
	src.report(Record{PID: pid, Name: "mover"})
	if c := awaitName(t, s, "mover"); c.ID != idOf(t, one) {
		t.Fatalf("%+v, want it in %+v", c, one)
	}
	two.Add(t, pid)
	snap := await(t, s, "it is in the other cgroup", func(snap Snapshot) bool {
		c, ok := named(snap, "mover")
		return ok && c.ID == idOf(t, two) && c.Cgroup.V2 == two.V2 && c.Cgroup.CPU == two.CPU
	})
	if len(snap.Containers) != 1 {
		t.Errorf("%+v, want it once", snap.Containers)
	}
	if cg.CPU == cg.V2 || cg.CPU == "" {
		return // there is one hierarchy, and no cgroup of it can be renamed
	}
	at := func(what, dir string) {
		t.Helper()
		await(t, s, what, func(snap Snapshot) bool {
			c, ok := named(snap, "mover")
			return ok && c.ID == idOf(t, two) && c.Cgroup.CPU == dir
		})
	}
	testkit.CG{CPU: one.CPU}.Add(t, pid)
	at("it was moved in one hierarchy", one.CPU)
	must(t, os.Rename(one.CPU, one.CPU+"-renamed"))
	at("the cgroup was renamed", one.CPU+"-renamed")
}

// TestSetLatePID has a source that knows a cgroup, and says so once, at a moment when none of its
// processes can be found.
func TestSetLatePID(t *testing.T) {
	cg, ns := testkit.Cgroup(t), testkit.NetNS(t)
	src := newFake(container.CgroupSource)
	s := runSet(t, Config{Refresh: time.Hour}, src)
	src.report(Record{CgroupV2: cg.V2})
	await(t, s, "the report", func(snap Snapshot) bool { return snap.Sources[0].Records == 1 })
	first := sleeper(t, ns, cg)
	found := func(pid int) func(Snapshot) bool {
		return func(snap Snapshot) bool { return len(snap.Containers) == 1 && snap.Containers[0].PID == pid }
	}
	await(t, s, "its process", found(first.Process.Pid))

	first.Process.Kill()
	await(t, s, "its end", func(snap Snapshot) bool { return len(snap.Containers) == 0 })
	await(t, s, "the next process", found(sleeper(t, ns, cg).Process.Pid))
}

func TestBounded(t *testing.T) {
	small := Record{Name: "n", Labels: map[string]string{"a": "b"}}
	testkit.Same(t, "bounded", small, bounded(small))
	big := Record{Name: strings.Repeat("ä", maxName), Labels: map[string]string{"long": strings.Repeat("x", container.MaxLabel), "short": "y"}}
	for i := range 2 * container.MaxLabels {
		big.Labels[fmt.Sprintf("z%d", i)] = ""
	}
	got := bounded(big)
	if got.LeftOut["long"] != len("long")+container.MaxLabel || len(got.LeftOut) != maxLeftOut {
		t.Errorf("left out %v", got.LeftOut)
	}
	if len(got.Name) > maxName || len(got.Labels) != container.MaxLabels || got.Labels["short"] != "y" {
		t.Errorf("name of %d bytes, %d labels", len(got.Name), len(got.Labels))
	}
	if _, ok := got.Labels["long"]; ok {
		t.Error("kept a label that is too long")
	}
	heavy := Record{Labels: make(map[string]string)}
	for i := range container.MaxLabels {
		heavy.Labels[fmt.Sprintf("%04d", i)] = strings.Repeat("x", container.MaxLabel-4)
	}
	if got := bounded(heavy); len(got.Labels) != container.MaxAll/container.MaxLabel || len(got.LeftOut) != maxLeftOut {
		t.Errorf("of the largest labels: %d, left out %d", len(got.Labels), len(got.LeftOut))
	}
	big.Labels, big.ImageLabels = map[string]string{"own": "x"}, big.Labels
	if got := bounded(big); len(got.Labels) != 1 || len(got.ImageLabels) != container.MaxLabels || got.LeftOut["long"] == 0 {
		t.Errorf("with labels of an image: %v, %d of the image, left out %v", got.Labels, len(got.ImageLabels), got.LeftOut)
	}
	big.ImageNames = append(slices.Repeat([]string{"a:1"}, 2*maxImageNames), strings.Repeat("x", maxName+1))
	slices.Reverse(big.ImageNames)
	if got := bounded(big); !slices.Equal(got.ImageNames, slices.Repeat([]string{"a:1"}, maxImageNames)) {
		t.Errorf("names of the image: %.60q", got.ImageNames)
	}
	if len(big.ImageLabels) != 2*container.MaxLabels+2 || len(big.ImageNames) != 2*maxImageNames+1 {
		t.Error("changed the report that it was given")
	}
}

func TestOfRuntime(t *testing.T) {
	const id = "4f9e6d1c2b3a4f9e6d1c2b3a"
	for _, tc := range []struct{ dir, id, want string }{
		{"/cg/docker/" + id, id, "/cg/docker/" + id},
		{"/cg/docker/" + id + "/init.scope", id, "/cg/docker/" + id},
		{"/cg/system.slice/docker-" + id + ".scope/a/b", id, "/cg/system.slice/docker-" + id + ".scope"},
		{"/cg/libpod-" + id + ".scope/container", id, "/cg/libpod-" + id + ".scope"},
		{"/cg/default/web/sub", "web", "/cg/default/web"},
		{"/cg/websites/x", "web", "/cg/websites/x"},
		{"/cg/x/y", id, "/cg/x/y"},
		{"/cg/x/y", "", "/cg/x/y"},
		{"", id, ""},
	} {
		testkit.Same(t, fmt.Sprintf("ofRuntime(%q, %q)", tc.dir, tc.id), tc.want, ofRuntime(tc.dir, tc.id))
	}
}

// TestRefreshLooksAtAll has more networks than one round looks at, and changes at the host ends
// that the networks do not show: one refresh finds all.
func TestRefreshLooksAtAll(t *testing.T) {
	layout, err := cgroup.Detect("/proc", cgroup.DefaultRoot)
	must(t, err)
	cg, host := testkit.Cgroup(t), testkit.NetNS(t)
	r, err := newRounds(NewSet(Config{NetNS: host.Path}).cfg, layout, func() {})
	must(t, err)
	defer r.close()
	rep := []reported{{status: SourceStatus{Name: "docker", Listed: true}}}
	const n = perRound + 4
	for i := range n {
		ns, name := testkit.NetNS(t), fmt.Sprint("c", i)
		testkit.Veth(t, ns, "fl0", host, "flh"+name)
		rep[0].records = append(rep[0].records, Record{PID: sleeper(t, ns, cg.Child(t, name)).Process.Pid, Name: name, RuntimeID: name})
	}
	run := func(full bool) (ends map[string]int) {
		for r.run(rep, full); !r.settled || slices.ContainsFunc(slices.Collect(maps.Values(r.live)), func(e *entry) bool { return e.due }); full = false {
			r.run(rep, false)
		}
		ends = make(map[string]int)
		for _, c := range r.containers() {
			ends[c.Interfaces[0].Host.Name[:3]]++
		}
		return ends
	}
	if got := run(true); got["flh"] != n {
		t.Fatalf("host ends %v", got)
	}
	h := host.Handle(t)
	for i := range n {
		l, err := h.LinkByName(fmt.Sprint("flhc", i))
		if err == nil {
			err = h.LinkSetName(l, fmt.Sprint("flxc", i))
		}
		must(t, err)
	}
	if got := run(true); got["flx"] != n {
		t.Errorf("host ends after a refresh: %v", got)
	}
}
