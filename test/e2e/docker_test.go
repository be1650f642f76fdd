package e2e

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/kernel/cgroup"
	"github.com/fairlead-project/fairlead/kernel/netdev"
)

const isolate, isolateKey = "fairlead.netcpu=isolate", "fairlead.netcpu = isolate"

// always also isolates a container whose packets take nothing from others.
const always = "fairlead.netcpu.steal=0%"

// host is a Docker Engine with an uplink, and an agent beside it.
type host struct {
	*testkit.Docker
	agent   *agent
	atStart footprint // of the agent
}

func newHost(t *testing.T, flags ...string) *host {
	t.Helper()
	d := testkit.StartDocker(t, flags...)
	// As on a real host, the uplink is a device that polls, and its packets get onto the bridge.
	outside := testkit.NetNS(t) // 10.213.255.1
	testkit.Veth(t, d.NS, "nic0", outside, "wire")
	outside.Address(t, "wire", "10.213.255.1/16")
	d.NS.Port(t, "nic0", "docker0")
	ns, nic := device(t, d.NS.Path, "nic0")
	must(t, ns.Offload(nic, netdev.GRO).Write(netdev.GRO.On()))
	far, wire := device(t, outside.Path, "wire")
	must(t, far.Offload(wire, netdev.TSO).Write(netdev.Off)) // else what it sends does not wait for a poll
	return &host{Docker: d, agent: newAgent(t, d.NS, "--docker-host", d.Host, "--uplink", "nic0=1gbit")}
}

// start runs the agent.
func (h *host) start() {
	h.agent.t.Helper()
	h.agent.start()
	h.atStart = h.agent.footprint()
}

// sleeper starts a container that sleeps.
func (h *host) sleeper(t *testing.T, name string, flags ...string) {
	t.Helper()
	args := append([]string{"run", "-d", "--name", name, "--label", always}, flags...)
	h.Must(t, append(args, h.Image, "sleep", "1000")...)
}

func (h *host) remove(t *testing.T, names ...string) {
	t.Helper()
	h.Must(t, append([]string{"rm", "-f"}, names...)...)
}

// state reads everything that fairlead might change for a container and its host ends.
func (h *host) state(t *testing.T, c api.Container) state {
	t.Helper()
	s := state{}
	s.readDevices(t, "inside", fmt.Sprintf("/proc/%d/ns/net", c.PID))
	all := state{}
	all.readDevices(t, "host", h.NS.Path)
	for k, v := range all {
		for _, i := range c.Interfaces {
			if i.Host != nil && strings.HasPrefix(k, "host "+i.Host.Name+" ") {
				s[k] = v
			}
		}
	}
	s.readCgroups(t, filepath.Join(h.CgroupParent, c.RuntimeID))
	return s
}

// vacates waits until the cgroups of an ended container have gone.
func (h *host) vacates(i isolation) {
	h.agent.t.Helper()
	await(h.agent.t, "the cgroups of "+i.Name+" to go", func() error {
		for _, dir := range h.cgroups() {
			if strings.Contains(dir, i.RuntimeID) {
				return fmt.Errorf("%s is left", dir)
			}
		}
		return nil
	})
}

// cgroups lists the cgroup directories of containers, in all hierarchies.
func (h *host) cgroups() (found []string) {
	for _, top := range hierarchies() {
		dirs, _ := filepath.Glob(filepath.Join(top, h.CgroupParent, "*", "cgroup.procs"))
		found = append(found, dirs...)
	}
	return found
}

// noComplaints checks the engine's log for the errors that it writes when another process's thread
// keeps it from removing a cgroup or a namespace.
func (h *host) noComplaints(t *testing.T) {
	t.Helper()
	log, err := os.ReadFile(filepath.Join(filepath.Dir(h.Socket), "dockerd.log"))
	must(t, err)
	for line := range strings.Lines(string(log)) {
		low := strings.ToLower(line)
		for _, bad := range []string{"failed to remove", "resource busy", "unable to remove", "failed to delete", "cgroup"} {
			if strings.Contains(low, bad) && !strings.Contains(low, "level=info") && !strings.Contains(low, "your kernel does not support") {
				t.Errorf("dockerd complains: %s", line)
			}
		}
	}
}

// TestDocker runs every test that needs only one engine.
func TestDocker(t *testing.T) {
	held := filepath.Join(t.TempDir(), "held")
	must(t, os.WriteFile(held, []byte(heldRuntime), 0o755))
	h := newHost(t, "--live-restore", "--add-runtime", "held="+held)
	h.sleeper(t, "plain")
	h.sleeper(t, "said-no", "--label", "fairlead.netcpu=observe")
	h.start()
	before := make(map[string]state)
	for _, name := range []string{"plain", "said-no"} {
		before[name] = h.state(t, h.agent.stands(name, "netcpu", api.StateDone))
	}
	h.agent.idles(h.atStart)

	t.Run("stranger's image", h.testStranger)
	t.Run("before its program", func(t *testing.T) { h.testBegins(t, held) })
	t.Run("isolate", h.testIsolate)
	t.Run("cpus", h.testCPUs)
	t.Run("updated", h.testUpdated)
	t.Run("ends", h.testEnds)
	t.Run("traffic", h.testTraffic)
	t.Run("agent killed", h.testAgentKilled)

	for name, was := range before {
		c, err := h.agent.find(name)
		must(t, err)
		testkit.Is(t, fmt.Sprintf("%s was touched", name), h.state(t, c).diff(was), nil)
	}
	h.agent.idles(h.atStart)
	for inode, paths := range netdev.Mounted("/proc", "self") {
		if strings.Contains(strings.Join(paths, " "), "fairlead") {
			t.Errorf("netns %d is kept by %s", inode, paths)
		}
	}
	h.remove(t, "plain", "said-no")
	h.atStart = h.agent.footprint()
	t.Run("killed without live-restore", h.testDockerEnds)
	h.agent.stop()
	if left := h.cgroups(); len(left) > 0 {
		t.Errorf("cgroups are left: %v", left)
	}
	h.noComplaints(t)
}

// with runs a part of a test on behalf of t.
func (h *host) with(t *testing.T) func() {
	was := h.agent.t
	h.agent.t = t
	return func() { h.agent.t = was }
}

// testStranger checks that labels of an image are not applied, and block nothing that the operator
// can set.
func (h *host) testStranger(t *testing.T) {
	defer h.with(t)()
	h.Import(t, "flstranger", "fairlead.net.rate=800mbit", isolate, always, "io.kubernetes.pod.name=x")
	h.Must(t, "run", "-d", "--name", "stranger", "flstranger", "sleep", "1000")
	h.Must(t, "run", "-d", "--name", "guaranteed", "--label", "fairlead.net.rate=100mbit", "flstranger", "sleep", "1000")
	c := h.agent.stands("guaranteed", "netcpu", api.StateDone)
	isDefault := func(s api.Setting) bool { return s.From == "default" }
	if given := slices.DeleteFunc(c.Policy, isDefault); len(given) != 1 || given[0].Value != "100mbit" {
		t.Errorf("policy %+v, want the rate that the operator gave", given)
	}
	c = h.agent.stands("stranger", "netcpu", api.StateDone)
	if given := slices.DeleteFunc(c.Policy, isDefault); len(given) != 0 || c.Pod != "" {
		t.Errorf("an image gave itself policy %+v, and pod %q", given, c.Pod)
	}
	mustSay(t, h.agent.run("explain", "stranger"), 0, `fairlead.net.rate: "800mbit": is ignored: it counts as its image's`, "Nothing was changed on the host for it")
	h.agent.policy("stranger.yaml", "labels: image\nmatch: {name: stranger}\n")
	if i := h.agent.isolated("stranger", 1); filepath.Base(i.Cgroup.CPU) != i.RuntimeID {
		t.Errorf("its thread is in %s", i.Cgroup.CPU)
	}
	mustSay(t, h.agent.run("explain", "stranger"), 0, isolateKey+", by a label of its image")
	h.agent.policy("stranger.yaml", "")
	h.remove(t, "stranger", "guaranteed")
}

func (h *host) testIsolate(t *testing.T) {
	defer h.with(t)()
	h.sleeper(t, "lit", "--label", isolate)
	i := h.agent.isolated("lit", 1)
	eth := i.Interfaces[0]
	if eth.Host == nil || eth.Host.Master != "docker0" {
		t.Fatalf("interface %+v, want its end at docker0", eth)
	}
	s := h.state(t, i.Container)
	for _, f := range []string{"tx-tcp-segmentation", "tx-tcp6-segmentation"} {
		if strings.Contains(s["host "+eth.Host.Name+" offloads"], f) {
			t.Errorf("host end: %s is on", f)
		}
	}
	for k, want := range map[string]string{
		"inside eth0 threaded":              "1",
		"inside eth0 napis":                 "1, 1 threads",
		"host " + eth.Host.Name + " egress": "1 programs",
	} {
		if s[k] != want {
			t.Errorf("%s: %q, want %q", k, s[k], want)
		}
	}
	if !strings.Contains(s["inside eth0 offloads"], "rx-gro") {
		t.Errorf("inside: %s, want rx-gro", s["inside eth0 offloads"])
	}
	uplink := state{}
	uplink.readDevices(t, "host", h.NS.Path)
	if uplink["host nic0 threaded"] != "1" || uplink["host nic0 ingress"] != "1 programs" || len(uplinkGroups(h.NS.Inode)) == 0 {
		t.Errorf("the uplink is not covered: %v, groups %v", uplink, uplinkGroups(h.NS.Inode))
	}
	if out, err := h.Run("exec", "lit", "ping", "-c", "3", "-i", "0.1", "-W", "5", "10.213.0.1"); err != nil {
		t.Errorf("no packet gets through: %v\n%s", err, out)
	}
	mustSay(t, h.agent.run("explain", "lit"), 0, isolateKey, "by a label of the container", "as policy says", "kernel thread", "and so it is now")
	mustSay(t, h.agent.run("ps"), 0, "lit", "isolate", "plain", "observe")

	// Restored, and then applied again.
	mustSay(t, h.agent.run("restore", "lit", "--state-dir", h.agent.path("state")), 0, "again, was")
	if c := h.agent.stands("lit", "netcpu", api.StateHeld); c.PID != i.PID {
		t.Errorf("container %+v, was %+v", c, i.Container)
	}
	h.agent.rests()
	mustSay(t, h.agent.run("policy", "reload"), 0)
	again := h.agent.isolated("lit", 1)
	h.remove(t, "lit")
	h.agent.forgets(i)
	h.agent.forgets(again)
	h.agent.rests()
}

// testCPUs changes the CPUs and the weight of an isolated container while it runs, as a kubelet's
// CPU manager does. The thread that polls for it must follow.
func (h *host) testCPUs(t *testing.T) {
	defer h.with(t)()
	h.sleeper(t, "moving", "--label", isolate, "--cpuset-cpus", "0", "--cpu-shares", "512")
	i := h.agent.isolated("moving", 1)
	for _, cpus := range []string{"0", "1", "0-1", "0"} {
		h.Must(t, "update", "--cpuset-cpus", cpus, "moving")
		await(t, "the thread to have CPUs "+cpus, func() error {
			status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", i.threads[0].TID))
			if err == nil && !strings.Contains(string(status), "Cpus_allowed_list:\t"+cpus+"\n") {
				err = fmt.Errorf("%s", status)
			}
			return err
		})
	}
	h.Must(t, "update", "--cpu-shares", "2048", "moving")
	given, err := cgroup.Weight(i.Cgroup.CPU)
	must(t, err)
	mustSay(t, h.agent.run("policy", "reload"), 0)
	i = h.agent.isolated("moving", 1)
	if w, err := cgroup.Weight(i.Cgroup.CPU); err != nil || w != given {
		t.Errorf("its weight is %d (%v), want that of its owner, %d", w, err, given)
	}
	h.remove(t, "moving")
	h.agent.forgets(i)
	h.agent.rests()
}

// testEnds ends a container in every possible way.
func (h *host) testEnds(t *testing.T) {
	defer h.with(t)()
	h.sleeper(t, "bystander", "--label", isolate)
	bystander := h.agent.isolated("bystander", 1)
	for _, end := range []struct {
		how string
		do  func(t *testing.T, i isolation)
	}{
		{"stop", func(t *testing.T, i isolation) { h.Must(t, "stop", "-t", "0", "mortal") }},
		{"kill", func(t *testing.T, i isolation) { h.Must(t, "kill", "mortal") }},
		{"init killed", func(t *testing.T, i isolation) { must(t, unix.Kill(i.PID, unix.SIGKILL)) }},
		{"rm", func(t *testing.T, i isolation) { h.remove(t, "mortal") }},
		{"restart", func(t *testing.T, i isolation) {
			h.Must(t, "restart", "-t", "0", "mortal")
			await(t, "the new one", func() error {
				c, err := h.agent.find("mortal")
				if err == nil && c.ID == i.ID {
					err = fmt.Errorf("it is still the old one")
				}
				return err
			})
			second := h.agent.isolated("mortal", 1)
			h.agent.forgets(i)
			h.remove(t, "mortal")
			h.agent.forgets(second)
		}},
		{"connect", func(t *testing.T, i isolation) {
			h.Must(t, "network", "create", "flsecond")
			defer h.Must(t, "network", "rm", "flsecond")
			h.Must(t, "network", "connect", "flsecond", "mortal")
			two := h.agent.isolated("mortal", 2)
			h.Must(t, "network", "disconnect", "flsecond", "mortal")
			one := h.agent.isolated("mortal", 1)
			if one.changes >= two.changes {
				t.Errorf("%d changes in the journal with one device, %d with two", one.changes, two.changes)
			}
			h.Must(t, "network", "disconnect", "bridge", "mortal")
			h.agent.isolated("mortal", 0)
			h.remove(t, "mortal")
			h.agent.forgets(two)
		}},
	} {
		t.Run(end.how, func(t *testing.T) {
			defer h.with(t)()
			h.sleeper(t, "mortal", "--label", isolate)
			defer h.Run("rm", "-f", "mortal") // gone already, if all went well
			i := h.agent.isolated("mortal", 1)
			end.do(t, i)
			h.agent.forgets(i)
			h.vacates(i)
			now := h.agent.isolated("bystander", 1)
			if !slices.Equal(now.threads, bystander.threads) || now.changes != bystander.changes {
				t.Errorf("bystander is %+v, was %+v", now, bystander)
			}
		})
	}
	h.remove(t, "bystander")
	h.agent.forgets(bystander)
	h.agent.rests()
}
