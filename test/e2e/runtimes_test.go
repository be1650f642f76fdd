package e2e

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/kernel/netdev"
)

// listed waits until ps lists a container with its source, isolated. A moment earlier the agent may
// know the container by its cgroup alone.
func (a *agent) listed(name, source string) {
	a.t.Helper()
	await(a.t, "ps to list "+name, func() error {
		ps := a.run("ps", "--wide") // 80 columns may cut the state
		for line := range strings.Lines(ps.out) {
			fields := strings.Fields(line)
			if len(fields) > 1 && fields[0] == name && slices.Contains(fields[1:], source) && slices.Contains(fields, "isolate") && slices.Contains(fields, api.StateDone) {
				return nil
			}
		}
		return fmt.Errorf("isolated, by way of %s, it is not in\n%v", source, ps)
	})
}

// explained fails the test unless explain shows what was changed for a container, and the reason.
func (a *agent) explained(name, because string) {
	a.t.Helper()
	mustSay(a.t, a.run("explain", name), 0, isolateKey, because, "as policy says", "kernel thread", "threaded", "and so it is now")
}

// devicesOf reads what might be changed on the devices of a host.
func devicesOf(t *testing.T, ns *testkit.NS) state {
	t.Helper()
	s := state{}
	s.readDevices(t, "host", ns.Path)
	return s
}

// unchanged waits until the devices of a host are as before, and the cgroups of ended containers
// below parent are gone from all hierarchies.
func unchanged(t *testing.T, ns *testkit.NS, was state, parent string, gone ...isolation) {
	t.Helper()
	await(t, "all to be as before", func() error {
		if diff := devicesOf(t, ns).diff(was); diff != nil {
			return fmt.Errorf("devices:\n%s", diff)
		}
		for _, top := range hierarchies() {
			for _, i := range gone {
				dir := filepath.Join(top, parent, filepath.Base(i.Cgroup.V2))
				if _, err := os.Stat(dir); !errors.Is(err, fs.ErrNotExist) {
					return fmt.Errorf("%s is left: %v", dir, err)
				}
			}
		}
		return nil
	})
}

// TestPodman runs one container that asks for isolation by a label, and one that does not.
func TestPodman(t *testing.T) {
	p := testkit.StartPodman(t)
	sleeper := func(name string, flags ...string) {
		t.Helper()
		args := append([]string{"run", "-d", "--name", name, "--cgroup-parent", "/" + p.CgroupParent}, flags...)
		p.Must(t, append(args, p.Image, "sleep", "1000")...)
	}
	sleeper("plain") // also keeps the bridge there
	a := newAgent(t, p.NS, "--podman-host", p.Host)
	a.start()
	if c := a.stands("plain", "netcpu", api.StateDone); c.Source != "podman" {
		t.Errorf("plain is %+v", c)
	}
	atStart := a.footprint()
	before := devicesOf(t, p.NS)

	sleeper("lit", "--label", isolate, "--label", always)
	i := a.isolated("lit", 1)
	a.listed("lit", "podman")
	a.explained("lit", "by a label of the container")
	if end := i.Interfaces[0].Host; end == nil || end.Master != "podman0" {
		t.Errorf("interface %+v, want its end at podman0", i.Interfaces[0])
	}
	gateway := strings.TrimSpace(p.Must(t, "exec", "lit", "sh", "-c", "ip route | sed -n 's/default via \\([^ ]*\\).*/\\1/p'"))
	if out, err := p.Run("exec", "lit", "ping", "-c", "3", "-i", "0.1", "-W", "5", gateway); err != nil {
		t.Errorf("no packet gets through: %v\n%s", err, out)
	}

	p.Must(t, "rm", "-f", "lit")
	a.forgets(i)
	a.idles(atStart)
	unchanged(t, p.NS, before, p.CgroupParent, i)
	a.stop()
}

// TestContainerd runs tasks with a network that is set up as by a CNI plugin: in a namespace that
// exists before the task, and outlives it.
func TestContainerd(t *testing.T) {
	d := testkit.StartContainerd(t)
	d.Import(t, "default")
	a := newAgent(t, d.NS, "--containerd", d.Socket)
	a.policy("files.yaml", "match: {name: by-file}\nset: {netcpu: isolate, netcpu.steal: 0%}\n")
	a.start()
	atStart := a.footprint()

	tasks := []struct{ name, label, because string }{
		{"by-label", isolate, "by a label of the container"},
		{"by-file", "a=b", "files.yaml line "},
	}
	var boxes []*testkit.NS
	var inside []state
	for n := range tasks {
		box := testkit.NetNS(t)
		box.Bind(t)
		boxes = append(boxes, box)
		veth := fmt.Sprintf("veth%d", n)
		testkit.Veth(t, d.NS, veth, box, "eth0")
		box.Address(t, "eth0", fmt.Sprintf("10.217.%d.2/24", n))
		inside = append(inside, devicesOf(t, box))
	}
	before := devicesOf(t, d.NS)
	var running []isolation
	for n, c := range tasks {
		// With an address and no container behind it, this veth would be a way in that does not
		// poll.
		d.NS.Address(t, fmt.Sprintf("veth%d", n), fmt.Sprintf("10.217.%d.1/24", n))
		d.Start(t, "default", c.name, "--label", c.label, "--label", always, "--with-ns", "network:"+boxes[n].Path)
		i := a.isolated(c.name, 1)
		running = append(running, i)
		a.listed(c.name, "containerd")
		a.explained(c.name, c.because)
		if out, err := d.Run("default", "task", "exec", "--exec-id", "ping", c.name, "ping", "-c", "3", "-i", "0.1", "-W", "5", fmt.Sprintf("10.217.%d.1", n)); err != nil {
			t.Errorf("no packet gets through: %v\n%s", err, out)
		}
	}
	for n, i := range running {
		// The agent is too late: runc gives up on the cgroup that contains a thread.
		must(t, unix.Kill(a.pid, unix.SIGSTOP))
		must(t, d.Remove("default", i.Name))
		must(t, unix.Kill(a.pid, unix.SIGCONT))
		a.letsGo(i)
		await(t, "the network of "+i.Name+" to be as before", func() error { return devicesOf(t, boxes[n]).diff(inside[n]) })
	}
	a.idles(atStart)
	unchanged(t, d.NS, before, d.CgroupParent, running...)
	a.stop()
}

// TestSwarm runs an agent on each of two nodes of a Docker Swarm.
func TestSwarm(t *testing.T) {
	testkit.Later(t)
	nodes := testkit.StartSwarm(t)
	t.Run("containers", func(t *testing.T) { swarmContainers(t, nodes) })
	t.Run("overlay", func(t *testing.T) { swarmOverlay(t, nodes) }) // removes the network in the end
}

// swarmContainers tests containers under policy. The host end of an overlay network's veth is in a
// separate namespace of the engine, as is the device by which its packets arrive.
func swarmContainers(t *testing.T, nodes [2]*testkit.Docker) {
	for _, d := range nodes { // a NIC polls; else a part would not be covered
		ns, wire := device(t, d.NS.Path, "flwire")
		must(t, ns.Offload(wire, netdev.GRO).Write(netdev.GRO.On()))
	}
	var agents [2]*agent
	var atStart [2]footprint
	var before [2]state
	var running [2]isolation
	var addrs [2]string
	for n, d := range nodes {
		a := newAgent(t, d.NS, "--docker-host", d.Host, "--uplink", "flwire=1gbit")
		agents[n] = a
		// The plain container keeps the overlay network on this node. Without it there would be
		// nothing left to look at.
		plain := func() {
			d.Must(t, "run", "-d", "--name", "plain", "--network", testkit.SwarmNetwork, d.Image, "sleep", "1000")
		}
		// If the engine's namespace for the overlay is created after the agent started, the agent
		// may find it half a minute later.
		if late := testkit.Scale(t, 0, 1) == 1; late {
			a.start()
			plain()
		} else {
			plain()
			a.start()
		}
		await(t, "both host ends of plain", func() error {
			c, err := a.find("plain")
			if err == nil && (len(c.Interfaces) != 2 || c.Interfaces[0].Host == nil || c.Interfaces[1].Host == nil) {
				err = fmt.Errorf("it is %+v", c)
			}
			return err
		})
		a.stands("plain", "netcpu", api.StateDone)
	}
	// Each agent finds the containers of the other node, too, by their cgroups, and keeps accounts
	// for them.
	for n, a := range agents {
		await(t, "both containers, with their host ends", func() error {
			list, err := a.api.Containers(t.Context())
			if err != nil {
				return err
			}
			seen := 0
			for _, c := range list {
				if len(c.Interfaces) == 2 && c.Interfaces[0].Host != nil && c.Interfaces[1].Host != nil {
					seen++
				}
			}
			if seen != len(nodes) {
				return fmt.Errorf("%d are seen so: %+v", seen, list)
			}
			return nil
		})
		atStart[n] = a.footprint()
		before[n] = devicesOf(t, nodes[n].NS)
	}
	overlay := func(c api.Container) *api.HostEnd {
		t.Helper()
		for _, i := range c.Interfaces {
			if len(i.Addrs) > 0 && strings.HasPrefix(i.Addrs[0], "10.216.0.") {
				return i.Host
			}
		}
		t.Fatalf("interfaces %+v, want one in %s", c.Interfaces, testkit.SwarmSubnet)
		return nil
	}
	var under [2]state
	for n, a := range agents {
		d := nodes[n]
		end := overlay(a.stands("plain", "netcpu", api.StateDone))
		if end == nil || end.NetNS == d.NS.Inode {
			t.Fatalf("host end %+v, want one in a namespace of its own", end)
		}
		path, err := netdev.NewGlance("/proc", nil).Find(end.NetNS)
		must(t, err)
		under[n] = state{}
		under[n].readDevices(t, "overlay", path)

		name := fmt.Sprintf("node%d", n)
		d.Must(t, "run", "-d", "--name", name, "--label", isolate, "--label", always, "--label", "fairlead.net.weight=2", "--network", testkit.SwarmNetwork, d.Image, "sleep", "1000")
		i := a.isolated(name, 2) // the other one is the way out
		running[n] = i
		a.listed(name, "docker")
		a.explained(name, "by a label of the container")
		if at := overlay(i.Container); at.NetNS != end.NetNS || at.Master == "" {
			t.Errorf("host end %+v, want it beside %+v", at, end)
		}
		for _, dev := range i.Interfaces {
			if strings.HasPrefix(dev.Addrs[0], "10.216.0.") {
				addrs[n] = strings.TrimSuffix(dev.Addrs[0], "/24")
			}
		}
	}
	for n, d := range nodes {
		a, name := agents[n], running[n].Name
		a.stands(name, "traffic", api.StateDone)
		was, err := a.classOf(name, "flwire")
		must(t, err)
		if out, err := d.Run("exec", name, "ping", "-c", "20", "-i", "0.02", "-W", "5", addrs[1-n]); err != nil {
			t.Errorf("no way from node to node: %v\n%s", err, out)
		}
		a.counts(was, name, 20) // in its class, tunnel or not
	}
	for n, d := range nodes {
		d.Must(t, "rm", "-f", running[n].Name)
	}
	for n, a := range agents {
		d, i := nodes[n], running[n]
		a.forgets(i)
		a.idles(atStart[n])
		unchanged(t, d.NS, before[n], d.CgroupParent, i)
		path, err := netdev.NewGlance("/proc", nil).Find(overlay(a.stands("plain", "netcpu", api.StateDone)).NetNS)
		must(t, err)
		now := state{}
		now.readDevices(t, "overlay", path)
		testkit.Is(t, fmt.Sprintf("the overlay of node %d is not as before", n), now.diff(under[n]), nil)
	}
	for n, a := range agents {
		a.stop()
		nodes[n].Must(t, "rm", "-f", "plain")
	}
}
