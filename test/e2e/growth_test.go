package e2e

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/lab/sandbox"
)

// onlyFull leaves trials with a figure as their result to the tier full. Each fails only if the
// agent does not finish the work at all.
func onlyFull(t *testing.T) {
	t.Helper()
	if testkit.Scale(t, 0, 1) == 0 {
		testkit.Skip(t, "a figure: only in the tier full")
	}
}

// TestGrowth starts a thousand containers with policy in bursts of 50, and logs what each burst
// costs the agent. A step that looks at all containers for each one shows as bursts of growing
// cost.
func TestGrowth(t *testing.T) {
	onlyFull(t)
	const burst, bursts = 50, 20
	r := newRig(t)
	a := newAgent(t, r.host, "--sandbox-dir", r.sandboxes.Dir(), "--uplink", "nic0=10gbit")
	a.policy("all.yaml", "match: {name: \"e2e-*\"}\nset: {net.weight: 1, net.ceil: 1gbit, netcpu: isolate}\n")
	a.start()
	for n := range bursts {
		cpu := testkit.CPUTime(t, a.pid)
		began := time.Now()
		for i := range burst {
			nth := n*burst + i
			b := r.create(sandbox.Spec{Name: fmt.Sprintf("e2e-%d", nth)})
			must(t, sandbox.Wire(
				sandbox.End{Box: r.host, Name: fmt.Sprintf("h%d", nth), Bridge: "br0"},
				sandbox.End{Box: b, Name: "eth0", Addr: netip.PrefixFrom(netip.AddrFrom4([4]byte{10, 66, byte(1 + nth/250), byte(1 + nth%250)}), 16)}))
		}
		made := time.Since(began)
		want := (n + 1) * burst
		await(t, fmt.Sprintf("policy of %d containers to be in force", want), func() error {
			time.Sleep(100 * time.Millisecond) // each answer costs the agent something too
			list, err := a.api.Containers(t.Context())
			if err != nil {
				return err
			}
			done := 0
			for _, c := range list {
				if forced(c) {
					done++
				}
			}
			if done != want {
				return fmt.Errorf("that of %d is", done)
			}
			return nil
		})
		t.Logf("%4d containers: %5.1f s to start %d, policy in force %5.1f s later; agent: CPU %6.3f s, memory %5.1f MB",
			want, made.Seconds(), burst, (time.Since(began) - made).Seconds(), (testkit.CPUTime(t, a.pid) - cpu).Seconds(), testkit.Resident(t, a.pid)/1e6)
	}
	cpu := testkit.CPUTime(t, a.pid)
	time.Sleep(10 * time.Second)
	t.Logf("at rest: CPU %.2f %%", 10*(testkit.CPUTime(t, a.pid)-cpu).Seconds())
	a.kill() // a stop has half a minute, too little for so many; the end of the test restores
}

// forced reports whether traffic and netcpu have finished with a container.
func forced(c api.Container) bool {
	done := 0
	for _, f := range c.Features {
		if (f.Feature == "traffic" || f.Feature == "netcpu") && f.State == api.StateDone {
			done++
		}
	}
	return done == 2
}

// attackVerb makes the test binary do one of attacks on its argument, until it is killed.
const attackVerb = "e2e-attack"

var attacks = map[string]func(path string) error{
	// Connects to the socket and hangs up.
	"connects": func(path string) error {
		for {
			c, err := net.Dial("unix", path)
			if err == nil {
				c.Close()
			} else if !errors.Is(err, unix.EAGAIN) {
				return err
			}
		}
	},
	// Creates and removes a thousand cgroups a second, each with a process.
	"cgroups": func(path string) error {
		for n := 0; ; n++ {
			next := time.Now().Add(time.Millisecond)
			dir := filepath.Join(path, fmt.Sprint("g", n))
			if err := os.Mkdir(dir, 0o755); err != nil {
				return err
			}
			if err := os.WriteFile(filepath.Join(dir, "cgroup.procs"), []byte("0"), 0); err != nil {
				return err
			}
			if err := os.WriteFile(filepath.Join(path, "cgroup.procs"), []byte("0"), 0); err != nil {
				return err
			}
			if err := os.Remove(dir); err != nil {
				return err
			}
			time.Sleep(time.Until(next))
		}
	},
}

// attack runs the attack that the arguments of the test binary name.
func attack(name, path string) int {
	fmt.Fprintln(os.Stderr, name, attacks[name](path))
	return 1
}

// TestWorkOfAttackers measures how much work a container, or a user with a cgroup of his own,
// causes the agent, compared with the attacker's own cost.
func TestWorkOfAttackers(t *testing.T) {
	onlyFull(t)
	const window = 10 * time.Second
	measure := func(a *agent, name string, attacker int) {
		t.Helper()
		time.Sleep(time.Second) // until the attack is at full speed
		was, his := testkit.CPUTime(t, a.pid), testkit.CPUTime(t, attacker)
		time.Sleep(window)
		was, his = testkit.CPUTime(t, a.pid)-was, testkit.CPUTime(t, attacker)-his
		t.Logf("%-10s attacker: %5.1f %% of a CPU, agent: %5.1f %%, %.1f MB", name, 100*his.Seconds()/window.Seconds(),
			100*was.Seconds()/window.Seconds(), testkit.Resident(t, a.pid)/1e6)
		if his == 0 {
			t.Errorf("%s: the attacker did nothing", name)
		}
	}
	r := newRig(t)
	box := r.add(sandbox.Spec{Name: "e2e-attacker"})
	a := r.agent()
	a.start()
	a.reaches("e2e-attacker", api.StateDone)
	measure(a, "nothing", os.Getpid())

	p, err := box.Start(exec.Command("/proc/self/exe", attackVerb, "connects", a.path("self.sock")))
	must(t, err)
	measure(a, "connects", p.PID)
	must(t, unix.Kill(p.PID, unix.SIGKILL))
	ends(t, p.PID, p.Done())

	cg := testkit.Cgroup(t)
	cmd := exec.Command("/proc/self/exe", attackVerb, "cgroups", cg.V2)
	must(t, cmd.Start())
	measure(a, "cgroups", cmd.Process.Pid)
	must(t, cmd.Process.Kill())
	cmd.Wait() // it was killed

	// 4 MB of labels for each container, one after another.
	labels := make(map[string]string)
	for i := range 1024 {
		labels[fmt.Sprintf("fairlead.label-%04d", i)] = string(make([]byte, 4080))
	}
	was, began := testkit.CPUTime(t, a.pid), time.Now()
	var his time.Duration
	for i := range 10 {
		name := fmt.Sprintf("e2e-labels-%d", i)
		mine := testkit.CPUTime(t, os.Getpid())
		r.create(sandbox.Spec{Name: name, Labels: labels})
		his += testkit.CPUTime(t, os.Getpid()) - mine
		a.reaches(name, api.StateDone)
	}
	t.Logf("labels     10 containers with 4 MB each in %v: attacker: %.3f s of CPU, agent: %.3f s, %.1f MB",
		time.Since(began).Round(time.Millisecond), his.Seconds(), (testkit.CPUTime(t, a.pid) - was).Seconds(), testkit.Resident(t, a.pid)/1e6)
	a.stop()
}
