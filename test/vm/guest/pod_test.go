package guest

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/fairlead-project/fairlead/feature"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/discover"
	"github.com/fairlead-project/fairlead/feature/netcpu"
	"github.com/fairlead-project/fairlead/hook"
	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/kernel"
	"github.com/fairlead-project/fairlead/kernel/cgroup"
	"github.com/fairlead-project/fairlead/kernel/journal"
	"github.com/fairlead-project/fairlead/kernel/sched"
	"github.com/fairlead-project/fairlead/policy"
	"github.com/fairlead-project/fairlead/tenant/identity"
)

// TestPod lays out a pod as a kubelet does with systemd's cgroup driver: two
// containers in cgroups of their own below that of the pod, which hands its
// controllers down and so may hold no process, and one network namespace for
// both. The cgroup tree has to show the two, and isolation has to find a place
// for the pod's receive threads inside the pod.
func TestPod(t *testing.T) {
	testkit.OnKernels(t)
	if tooOld(version(t)) {
		testkit.Skip(t, "kernel is older than those that fairlead supports")
	}
	node, pod := testkit.NetNS(t), testkit.NetNS(t)
	hostEnd := node.Bind(t) // what has neither a name nor a process cannot be found
	testkit.Veth(t, node, "flveth0", pod, "eth0")

	scratch := testkit.Cgroup(t)
	slice := scratch.Child(t, "kubepods.slice")
	podGroup := slice.Child(t, "kubepods-pod0af1.slice")
	handDown(t, scratch.V2, slice.V2, podGroup.V2)
	names := []string{"cri-containerd-0a.scope", "cri-containerd-1b.scope"}
	for _, name := range names {
		podGroup.Child(t, name).Add(t, pod.Start(t, "sleep", "1000").Process.Pid)
	}

	found := findIn(t, hostEnd, podGroup.V2, len(names))
	for i, c := range found {
		if filepath.Base(c.Cgroup.V2) != names[i] || c.Cgroup.CPU != c.Cgroup.V2 {
			t.Errorf("container %d has the cgroups %+v, want %s", i, c.Cgroup, names[i])
		}
		if c.NetNS != pod.Inode || len(c.Interfaces) != 1 || c.Interfaces[0].Host.Name != "flveth0" {
			t.Errorf("container %d: namespace %d, interfaces %+v; want %d and eth0 with its end flveth0", i, c.NetNS, c.Interfaces, pod.Inode)
		}
	}
	if t.Failed() {
		return
	}

	t.Run("no cpu controller", func(t *testing.T) {
		j := testkit.Journal(t, journal.Open)
		n, err := newNetcpu(t, j, hostEnd)
		must(t, err)
		defer n.Close()
		c := found[0]
		c.Cgroup.V2 = testkit.Cgroup(t).Child(t, "plain").V2
		c.Cgroup.CPU, c.PodCgroup = c.Cgroup.V2, false
		err = n.Apply(t.Context(), policy.Target{Container: c, Settings: policy.Settings{NetCPU: policy.NetCPUIsolate, NetCPUSteal: new(float64)}})
		testkit.Fails(t, "isolate without a group to charge", err, "no cpu controller")
		must(t, n.Remove(t.Context(), c.ID))
		if left := j.Entries(); len(left) > 0 {
			t.Errorf("journal after that: %+v", left)
		}
	})

	for _, cri := range []string{"", "web"} { // without and with a word from the runtime
		t.Run("pod="+cri, func(t *testing.T) {
			j := testkit.Journal(t, journal.Open)
			n, err := newNetcpu(t, j, hostEnd)
			must(t, err)
			defer n.Close()
			for _, c := range found {
				c.Pod, c.PodCgroup = cri, cri != ""
				must(t, n.Apply(t.Context(), policy.Target{Container: c, Settings: policy.Settings{NetCPU: policy.NetCPUIsolate, NetCPUSteal: new(float64)}}))
			}
			threads := receivers(t, "eth0")
			if len(threads) == 0 {
				t.Error("eth0 has no receive thread")
			}
			for _, dir := range threads {
				if !strings.HasPrefix(dir, podGroup.V2+"/") {
					t.Errorf("a receive thread is in %s, outside of the pod", dir)
				}
			}
			for _, c := range found {
				must(t, n.Remove(t.Context(), c.ID))
			}
			if left := j.Entries(); len(left) != 0 {
				t.Errorf("left in the journal: %+v", left)
			}
			for _, dir := range receivers(t, "eth0") {
				if strings.HasPrefix(dir, podGroup.V2) {
					t.Errorf("after Remove a receive thread is in %s", dir)
				}
			}
			if left, _ := filepath.Glob(podGroup.V2 + "/fairlead*"); len(left) != 0 {
				t.Errorf("after Remove there is %v", left)
			}
		})
	}
}

// TestDelegation isolates a container in which a systemd starts only then: it moves
// itself into a group of its own and hands controllers down, which a group with
// threads in it could not.
func TestDelegation(t *testing.T) {
	testkit.OnKernels(t)
	if tooOld(version(t)) {
		testkit.Skip(t, "kernel is older than those that fairlead supports")
	}
	node, box := testkit.NetNS(t), testkit.NetNS(t)
	hostEnd := node.Bind(t)
	testkit.Veth(t, node, "flveth0", box, "eth0")
	plug(t, node, "nic0")
	scratch := testkit.Cgroup(t)
	handDown(t, scratch.V2)
	scope := scratch.Child(t, "docker-0a.scope")
	process := box.Start(t, "sleep", "1000").Process.Pid
	scope.Add(t, process)
	c := findIn(t, hostEnd, scope.V2, 1)[0]

	j := testkit.Journal(t, journal.Open)
	n, err := newNetcpu(t, j, hostEnd)
	must(t, err)
	defer n.Close()
	must(t, n.Apply(t.Context(), policy.Target{Container: c, Settings: policy.Settings{NetCPU: policy.NetCPUIsolate, NetCPUSteal: new(float64)}}))
	scope.Child(t, "init.scope").Add(t, process)
	handDown(t, scope.V2)
	for _, x := range []struct {
		device, in string
		least      int
	}{{"eth0", scope.V2 + "/fairlead", 1}, {"nic0", "/sys/fs/cgroup/fairlead-uplink", 2}} { // a NIC's NAPI receives, another one sends
		threads := receivers(t, x.device)
		for _, dir := range threads {
			if !strings.HasPrefix(dir, x.in) {
				t.Errorf("a thread of %s is in %s", x.device, dir)
			}
		}
		if len(threads) < x.least {
			t.Errorf("%s has %d threads", x.device, len(threads))
		}
	}
	must(t, n.Remove(t.Context(), c.ID))
	if left, _ := filepath.Glob(scope.V2 + "/fairlead*"); len(left) != 0 || len(j.Entries()) != 0 {
		t.Errorf("after Remove there is %v, and in the journal %+v", left, j.Entries())
	}
}

// plug moves the guest's virtio NIC to a namespace, which gives it back at its end.
func plug(t *testing.T, to *testkit.NS, name string) {
	t.Helper()
	links, err := netlink.LinkList()
	must(t, err)
	i := slices.IndexFunc(links, func(l netlink.Link) bool { return l.Type() == "device" && l.Attrs().Name != "lo" })
	must(t, netlink.LinkSetName(links[i], name))
	must(t, netlink.LinkSetNsFd(links[i], to.FD()))
	there, err := to.Handle(t).LinkByName(name)
	must(t, err)
	must(t, to.Handle(t).LinkSetUp(there))
}

// handDown makes each cgroup give its controllers to its children.
func handDown(t *testing.T, dirs ...string) {
	t.Helper()
	for _, dir := range dirs {
		must(t, os.WriteFile(filepath.Join(dir, "cgroup.subtree_control"), []byte("+cpu +cpuset"), 0))
	}
}

// findIn waits until the cgroup tree shows n containers below dir, on the host whose
// network namespace is at a path.
func findIn(t *testing.T, host, dir string, n int) []container.Container {
	t.Helper()
	set := discover.NewSet(discover.Config{NetNS: host}, discover.CgroupTree("/proc", ""))
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	ended := make(chan error, 1)
	go func() { ended <- set.Run(ctx) }()
	defer func() {
		cancel()
		must(t, <-ended)
	}()
	for {
		changed := set.Changed()
		var below []container.Container
		for _, c := range set.Snapshot().Containers { // in order of ID, that is, of creation
			if strings.HasPrefix(c.Cgroup.V2, dir) && len(c.Interfaces) > 0 {
				below = append(below, c)
			}
		}
		if len(below) == n {
			return below
		}
		select {
		case <-changed:
		case <-ctx.Done():
			t.Fatalf("below %s the set shows %+v, want %d containers", dir, below, n)
		}
	}
}

// receivers gives the cgroup of each kernel thread that polls a device of this name.
func receivers(t *testing.T, device string) map[int]string {
	t.Helper()
	layout, err := cgroup.Detect("/proc", "")
	must(t, err)
	threads, err := sched.Threads("/proc", "napi/"+device+"-")
	must(t, err)
	where := map[int]string{}
	for _, th := range threads {
		paths, err := layout.OfPID("/proc", th.TID)
		if errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ESRCH) {
			continue // the kernel lets go of one that it has stopped a moment later
		}
		must(t, err)
		where[th.TID] = paths.V2
	}
	return where
}

// newNetcpu makes the feature as the agent does, for a host with its uplinks in netns.
func newNetcpu(t *testing.T, j *journal.Journal, netns string) (*netcpu.Netcpu, error) {
	t.Helper()
	who := testkit.Opened(identity.Open("/proc"))(t)
	return netcpu.New(netcpu.Config{Host: feature.Host{Roots: kernel.Default(), Journal: j, Identity: who, Ends: hook.Open("/proc", j), NetNS: netns}})
}

var must = testkit.Must
