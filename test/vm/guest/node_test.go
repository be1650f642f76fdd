package guest

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/kernel/netdev"
)

const (
	manifests = "/etc/kubernetes/manifests"
	slice     = "/sys/fs/cgroup/kubepods.slice"
	ceil      = 8_000_000 // bit/s, of what the pod web sends
)

// pods are the manifests of a pod of each class of service; kubelet gives each class a cgroup
// of its own. web sends to the wire all the time.
func pods() map[string]string {
	pod := func(name, annotations, resources, command string) string {
		return fmt.Sprintf(`apiVersion: v1
kind: Pod
metadata: {name: %s, namespace: shop, annotations: {%s}}
spec:
  terminationGracePeriodSeconds: 0
  containers:
  - {name: main, image: "docker.io/library/flbusybox:latest", imagePullPolicy: Never, resources: {%s}, command: [sh, -c, %q]}
`, name, annotations, resources, command)
	}
	const sleep = "trap exit TERM; while :; do sleep 1; done"
	return map[string]string{
		"web":   pod("web", "kubernetes.io/egress-bandwidth: 8M, fairlead.netcpu: isolate, fairlead.netcpu.steal: 0%", "limits: {cpu: 500m, memory: 64Mi}", "while :; do dd if=/dev/zero bs=64k count=32 2>/dev/null | nc 10.66.0.2 9000; sleep 1; done"),
		"db":    pod("db", "fairlead.netcpu: charge", "requests: {cpu: 250m}", sleep),
		"batch": pod("batch", "fairlead.netcpu: isolate, fairlead.netcpu.steal: 0%", "", sleep),
	}
}

// TestNode has the agent, as its package starts it, beside a real kubelet and containerd on cgroup v2
// where systemd makes the cgroups of pods (test/vm TestNode). Pods of each class of service are known
// by their names and classes, their annotations are in force, one that starts anew is followed, and
// after the agent's end the node is as before.
func TestNode(t *testing.T) {
	version(t)
	t.Cleanup(func() {
		if t.Failed() {
			for _, unit := range []string{"containerd", "kubelet", "fairlead"} {
				log, _ := exec.Command("journalctl", "--no-pager", "-o", "cat", "-n", "60", "-u", unit).CombinedOutput()
				t.Logf("log of %s:\n%s", unit, log)
			}
		}
	})
	wire := uplink(t)
	for name, manifest := range pods() {
		must(t, os.MkdirAll(manifests, 0o755))
		must(t, os.WriteFile(filepath.Join(manifests, name+".yaml"), []byte(manifest), 0o644))
	}
	began := time.Now()
	await(t, "kubelet to run all pods", func() error {
		if scopes, _ := filepath.Glob(slice + "/*/cri-containerd-*.scope"); len(scopes) != 2 { // a sandbox and a container
			return fmt.Errorf("%q", scopes)
		}
		if scopes, _ := filepath.Glob(slice + "/*/*/cri-containerd-*.scope"); len(scopes) != 4 {
			return fmt.Errorf("%q", scopes)
		}
		// The pod db is all that is burstable; kubelet looks each minute what that comes to.
		class, pod := weights(slice+"/kubepods-burstable.slice"), weights(slice+"/kubepods-burstable.slice/*.slice")
		if len(class) != 1 || !slices.Equal(class, pod) {
			return fmt.Errorf("the class has the weight %q, its pod %q", class, pod)
		}
		return nil
	})
	t.Logf("kubelet ran all pods after %v", time.Since(began).Round(time.Second))
	before := state(t)

	began = time.Now()
	systemctl(t, "start", "fairlead")
	defer exec.Command("systemctl", "stop", "fairlead").Run()
	agent := api.Dial(api.DefaultSocket)
	defer agent.Close()
	var found map[string]api.Container
	forced := func() (err error) {
		found, err = inForce(t, agent)
		return err
	}
	await(t, "policy of all pods to be in force", forced)
	t.Logf("the agent had all in force after %v", time.Since(began).Round(time.Second))
	for name, below := range map[string]string{"web": "", "db": "/kubepods-burstable.slice", "batch": "/kubepods-besteffort.slice"} {
		c := found["shop/"+name+"-node/main"]
		if pod := filepath.Dir(c.Cgroup.V2); filepath.Dir(pod) != slice+below || c.Source != "containerd" {
			t.Errorf("%s, by %s, is in %s, want a pod in %s", c.Name, c.Source, c.Cgroup.V2, slice+below)
		}
	}
	charged(t, found)
	bounded(t, wire, agent)

	old := found["shop/batch-node/main"]
	must(t, unix.Kill(old.PID, unix.SIGKILL))
	await(t, "the container to start anew, with its policy", func() error {
		if err := forced(); err != nil {
			return err
		}
		if found[old.Name].ID == old.ID {
			return fmt.Errorf("still %v", old.ID)
		}
		return nil
	})
	charged(t, found)
	systemctl(t, "daemon-reload") // systemd sets what it knows of cgroups anew
	await(t, "policy to be in force after systemd's reload", forced)
	charged(t, found)

	systemctl(t, "stop", "fairlead")
	await(t, "the node to be as before", func() error {
		if diff := cmp.Diff(before, state(t)); diff != "" {
			return fmt.Errorf("-before +now\n%s", diff)
		}
		return nil
	})

	// A pod whose thread is in its slice ends: that has to let go of the slice.
	systemctl(t, "start", "fairlead")
	await(t, "policy of all pods to be in force again", forced)
	pod := filepath.Dir(found["shop/batch-node/main"].Cgroup.V2)
	must(t, os.Remove(filepath.Join(manifests, "batch.yaml")))
	await(t, "the pod's cgroup to be gone", func() error {
		if _, err := os.Stat(pod); !errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("%s: %v", pod, err)
		}
		return nil
	})
	systemctl(t, "stop", "fairlead")
}

// uplink gives the node a device to the outside that polls, as a NIC does, and returns the namespace
// that is there.
func uplink(t *testing.T) *testkit.NS {
	wire := testkit.NetNS(t)
	must(t, netlink.LinkAdd(&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "eth0"}, PeerName: "wire0", PeerNamespace: netlink.NsFd(wire.FD())}))
	link, err := netlink.LinkByName("eth0")
	must(t, err)
	t.Cleanup(func() { netlink.LinkDel(link) })
	addr, err := netlink.ParseAddr("10.66.0.1/24")
	must(t, err)
	must(t, netlink.AddrAdd(link, addr))
	must(t, netlink.LinkSetUp(link))
	node, err := netdev.Open("/proc/self/ns/net")
	must(t, err)
	defer node.Close()
	must(t, node.Offload(link.Attrs().Index, netdev.GRO).Write(netdev.GRO.On()))
	wire.Address(t, "wire0", "10.66.0.2/24")
	h := wire.Handle(t)
	end, err := h.LinkByName("wire0")
	must(t, err)
	must(t, h.LinkSetUp(end))
	must(t, h.RouteAdd(&netlink.Route{Gw: net.IPv4(10, 66, 0, 1)})) // to the pods
	must(t, netlink.RouteAdd(&netlink.Route{Gw: net.IPv4(10, 66, 0, 2)}))
	return wire
}

// older is what the agent says of a ceil where the kernel cannot hold it between pods of one host.
const older = "possible with: Linux 6.6 or later"

// inForce returns the containers of the pods by name, and an error until they are all of them with
// their policy in force, as far as the kernel can.
func inForce(t *testing.T, agent *api.Client) (map[string]api.Container, error) {
	list, err := agent.Containers(t.Context())
	if err != nil {
		return nil, err
	}
	found, names := map[string]api.Container{}, []string{}
	for _, c := range list {
		if !strings.HasPrefix(c.Cgroup.V2, slice) {
			continue
		}
		found[c.Name], names = c, append(names, c.Name)
		asked := 0
		for _, f := range c.Features {
			if !f.Asked {
				continue
			}
			if f.State != api.StateDone && !(f.State == api.StatePartly && strings.HasSuffix(f.Error, older)) {
				return nil, fmt.Errorf("%s: %+v", c.Name, f)
			}
			asked++
		}
		if asked == 0 {
			return nil, fmt.Errorf("%s has no policy: %+v", c.Name, c.Policy)
		}
	}
	if want := []string{"shop/batch-node/main", "shop/db-node/main", "shop/web-node/main"}; !slices.Equal(slices.Sorted(slices.Values(names)), want) {
		return nil, fmt.Errorf("containers are %q, want %q", names, want)
	}
	return found, nil
}

// charged checks that a thread polls for each isolated pod, in the cgroup of that pod.
func charged(t *testing.T, found map[string]api.Container) {
	t.Helper()
	threads := receivers(t, "eth0")
	for _, name := range []string{"web", "batch"} {
		pod := filepath.Dir(found["shop/"+name+"-node/main"].Cgroup.V2)
		of := 0
		for _, dir := range threads {
			if strings.HasPrefix(dir, pod+"/") {
				of++
			}
		}
		if of == 0 {
			t.Errorf("no thread polls in the pod %s, %s; threads are in %v", name, pod, threads)
		}
	}
}

// bounded receives what the pod web sends in one connection, which must take as long as its ceil
// demands, and go through its class.
func bounded(t *testing.T, wire *testkit.NS, agent *api.Client) {
	t.Helper()
	var server *net.TCPListener
	must(t, wire.Do(func() (err error) {
		server, err = net.ListenTCP("tcp", &net.TCPAddr{IP: net.IPv4(10, 66, 0, 2), Port: 9000})
		return err
	}))
	defer server.Close()
	must(t, server.SetDeadline(time.Now().Add(patience)))
	conn, err := server.Accept()
	must(t, err)
	defer conn.Close()
	must(t, conn.SetDeadline(time.Now().Add(patience)))
	began := time.Now()
	n, err := io.Copy(io.Discard, conn)
	took := time.Since(began)
	if err != nil || n != 32*64<<10 {
		t.Fatalf("received %d bytes: %v", n, err)
	}
	const burst = 256 << 10 // what may pass at once, and more
	if least := time.Duration(float64(n-burst) * 8 / ceil * float64(time.Second)); took < least {
		t.Errorf("%d bytes took %v, want %v at least", n, took, least)
	}
	t.Logf("%d bytes in %v", n, took)
	r, err := agent.Traffic(t.Context(), "shop/web-node", 0)
	must(t, err)
	if !slices.ContainsFunc(r.Classes, func(c api.TrafficClass) bool {
		return c.Uplink == "eth0" && c.Direction == "egress" && c.Ceil == ceil && c.Bytes >= uint64(n)
	}) {
		t.Errorf("classes are %+v, want one of eth0 with the bytes", r.Classes)
	}
}

// weights are those for the CPU of cgroups.
func weights(pattern string) (all []string) {
	files, _ := filepath.Glob(pattern + "/cpu.weight")
	for _, file := range files {
		weight, _ := os.ReadFile(file)
		all = append(all, strings.TrimSpace(string(weight)))
	}
	return all
}

// state is what the agent might change on the node and has to put back: the writable files of all
// cgroups of pods and the groups that there are, and devices with their qdiscs.
func state(t *testing.T) map[string]string {
	t.Helper()
	s, values := map[string]string{}, map[string][]string{}
	must(t, filepath.WalkDir(slice, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return nil // a container that has just ended
		}
		name, _, _ := strings.Cut(path, "/cri-containerd-") // one that starts anew has another id
		if d.IsDir() {
			s[name] = "there"
			return nil
		}
		if info, err := d.Info(); err != nil || info.Mode()&0o200 == 0 || strings.HasSuffix(path, ".pressure") || strings.HasSuffix(path, ".procs") || strings.HasSuffix(path, ".threads") || strings.HasSuffix(path, ".peak") {
			return nil
		}
		if d.Name() == "memory.oom.group" {
			return nil // containerd sets it, and systemd's reload sets it back
		}
		value, _ := os.ReadFile(path)
		file := filepath.Join(name, filepath.Base(path))
		values[file] = append(values[file], strings.TrimSpace(string(value)))
		return nil
	}))
	for file, of := range values {
		slices.Sort(of)
		s[file] = fmt.Sprintf("%q", of)
	}
	if top, _ := filepath.Glob("/sys/fs/cgroup/fairlead*"); len(top) > 0 {
		s["cgroups"] = strings.Join(top, ",")
	}
	links, err := netlink.LinkList()
	must(t, err)
	for _, l := range links {
		qdiscs, err := netlink.QdiscList(l)
		must(t, err)
		for _, q := range qdiscs {
			s[l.Attrs().Name+" "+q.Type()] = fmt.Sprintf("%x %x", q.Attrs().Handle, q.Attrs().Parent)
		}
		for _, file := range []string{"threaded", "flags", "queues/rx-0/rps_cpus"} {
			value, _ := os.ReadFile(filepath.Join("/sys/class/net", l.Attrs().Name, file))
			s[l.Attrs().Name+" "+file] = strings.TrimSpace(string(value))
		}
	}
	for _, dir := range receivers(t, "eth0") { // older kernels keep idle ones, in the root
		if strings.HasPrefix(dir, slice) {
			s["a thread"] = dir
		}
	}
	return s
}

func systemctl(t *testing.T, args ...string) {
	t.Helper()
	if out, err := exec.Command("systemctl", args...).CombinedOutput(); err != nil {
		t.Fatalf("systemctl %q: %v: %s", args, err, out)
	}
}

// patience is how long an emulated CPU may take for what takes seconds.
const patience = 4 * time.Minute

// await waits for a state of the node.
func await(t *testing.T, what string, try func() error) {
	t.Helper()
	for deadline := time.Now().Add(patience); ; time.Sleep(time.Second) {
		err := try()
		if err == nil {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("%s: %v", what, err)
		}
	}
}
