package e2e

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/kernel/cgroup"
	"github.com/fairlead-project/fairlead/lab/sandbox"
)

// notice is how long the agent may take to notice a move that the kernel does not report: it looks
// every half a minute.
const notice = patience

// mover is a container that is moved, beside others of its rig.
type mover struct {
	*rig
	agent *agent
	box   *sandbox.Box
	mode  string
	quota time.Duration // of its current cgroup, as set by the owner
	api.Container
}

// moveTo moves all processes of the container into another cgroup, in some hierarchies, as `echo`
// in a loop does: with the container's kernel threads, or without.
func (m *mover) moveTo(cg testkit.CG, kthreads bool, hierarchies ...func(api.Cgroup, testkit.CG) (from, to string)) {
	m.t.Helper()
	for _, of := range hierarchies {
		from, to := of(m.Cgroup, cg)
		text, err := os.ReadFile(filepath.Join(from, "cgroup.procs"))
		must(m.t, err)
		for _, pid := range strings.Fields(string(text)) {
			n, err := strconv.Atoi(pid)
			must(m.t, err)
			if _, err := os.Readlink("/proc/" + pid + "/exe"); err == nil || kthreads {
				must(m.t, os.WriteFile(filepath.Join(to, "cgroup.procs"), []byte(strconv.Itoa(n)), 0))
			}
		}
	}
}

func inV2(c api.Cgroup, cg testkit.CG) (from, to string)  { return c.V2, cg.V2 }
func inCPU(c api.Cgroup, cg testkit.CG) (from, to string) { return c.CPU, cg.CPU }

// arrives waits until the agent knows the container in a cgroup, and its mode is in force there,
// for that cgroup's quota.
func (m *mover) arrives(cg testkit.CG, quota time.Duration) {
	m.t.Helper()
	m.quota = quota
	err := within(notice, func() error {
		c, err := m.agent.find(m.box.Name)
		if err == nil && (c.Cgroup.V2 != cg.V2 || c.Cgroup.CPU != cg.CPU) {
			err = fmt.Errorf("the agent has it in %+v, want %+v", c.Cgroup, cg)
		}
		m.Container = c
		return err
	})
	if err != nil {
		m.t.Fatal(err)
	}
	m.inForce()
}

// inForce waits until the mode of the container is in force at its current place, and the journal
// has entries for that place only.
func (m *mover) inForce() {
	m.t.Helper()
	elsewhere := func(c api.Change) bool {
		switch c.Kind {
		case cgroup.KindFile, cgroup.KindGroup:
			return !strings.HasPrefix(c.Object+"/", m.Cgroup.CPU+"/")
		case "kthread":
			return c.Wrote != m.Cgroup.CPU && c.Wrote != m.Cgroup.CPUSet
		}
		return false
	}
	await(m.t, m.mode+" in "+m.Cgroup.CPU, func() error {
		x, err := m.agent.api.Explain(m.t.Context(), m.ID.String())
		if err != nil {
			return err
		}
		if i := slices.IndexFunc(x.Changes, elsewhere); i >= 0 {
			return fmt.Errorf("the journal has %+v", x.Changes[i])
		}
		if m.mode == "isolate" {
			_, err := m.agent.isolation(m.t.Context(), m.box.Name, 1)
			return err
		}
		b, err := cgroup.ReadBandwidth(m.Cgroup.CPU)
		if err == nil && !(b.Quota < m.quota) {
			err = fmt.Errorf("the quota is %v, the owner's %v", b.Quota, m.quota)
		}
		if err == nil && !slices.ContainsFunc(x.Changes, func(c api.Change) bool { return c.Kind == cgroup.KindFile && c.State == api.ChangeInForce }) {
			err = fmt.Errorf("of the quota of %v the journal has %+v", b.Quota, x.Changes)
		}
		return err
	})
}

// pays waits until the account of the container has grown, and returns it.
func (m *mover) pays() (account api.NetCPUAccount) {
	m.t.Helper()
	from := m.account().Receive
	await(m.t, m.box.Name+" to be charged for its packets", func() error {
		if account = m.account(); account.Receive < from+0.05 {
			return fmt.Errorf("its account has %v s, had %v", account.Receive, from)
		}
		return nil
	})
	return account
}

// account returns the container's account under its last known ID.
func (m *mover) account() api.NetCPUAccount {
	m.t.Helper()
	n, err := m.agent.api.NetCPU(m.t.Context(), m.ID.String())
	must(m.t, err)
	return n.Accounts[0]
}

// left checks that nothing is left in the cgroups that the container was moved away from: their
// limits are as their owner set them, and they can be removed.
func (m *mover) left(before state, dirs ...string) {
	m.t.Helper()
	now := state{}
	for _, dir := range dirs {
		now.readCgroup(dir)
	}
	for k, v := range now {
		if before[k] != v {
			m.t.Errorf("%s was moved away: %s: %q, was %q", m.box.Name, k, v, before[k])
		}
	}
	for _, dir := range dirs {
		await(m.t, "nothing to be left in "+dir, func() error { return os.Remove(dir) })
	}
}

// TestMoved moves containers under a flood to other cgroups. First it moves them wholly, which
// makes each a different container. Then, in the tier full, it moves one in the cpu hierarchy
// alone, which keeps its identity and which the kernel does not report to the agent. What is in
// force moves along, as do accounts and journal, and nothing stays behind. In the end the agent is
// killed, and the undo covers what is in force at the last place.
func TestMoved(t *testing.T) {
	r := newRig(t)
	cg := testkit.Cgroup(t)
	place := func(name string, quota time.Duration) testkit.CG {
		c := cg.Child(t, name)
		k, value := cgroup.Quota(c.CPU, c.CPU == c.V2, quota, 100*time.Millisecond)
		must(t, k.Write(value))
		return c
	}
	a := r.agent()
	var movers []*mover
	for _, m := range []mover{{mode: "isolate", quota: 25 * time.Millisecond}, {mode: "charge", quota: 7 * time.Millisecond}} {
		m.rig, m.agent = r, a
		m.box = r.add(sandbox.Spec{Name: "e2e-" + m.mode, CPU: sandbox.CPU{Quota: m.quota, Period: 100 * time.Millisecond, Set: "0"}})
		a.policy(m.mode+".yaml", fmt.Sprintf("match: {name: %s}\nset: {netcpu: %s}\n", m.box.Name, m.mode))
		movers = append(movers, &m)
	}
	must(t, r.host.SetQueues("nic0", "rx", "rps_cpus", func(int) string { return "1" }))
	second, third := make(map[*mover]testkit.CG), make(map[*mover]testkit.CG)
	for _, m := range movers {
		second[m], third[m] = place(m.mode+"-2", m.quota+time.Millisecond), place(m.mode+"-3", m.quota+2*time.Millisecond)
	}
	limits := func() state {
		s := state{}
		s.readCgroups(t, filepath.Base(cg.CPU), sandbox.Parent)
		return s
	}
	before := limits()

	a.start()
	var loads []func()
	for i, m := range movers {
		loads = append(loads,
			generate(t, m.box, 0, "udp-recv"),
			generate(t, r.wire, 1, "udp-send", "--to", fmt.Sprintf("10.66.1.%d:9000", i+1), "--rate", "20000"))
		m.Container = a.reaches(m.box.Name, api.StateDone)
		m.inForce()
		m.pays()
	}

	was := make(map[*mover]mover)
	for _, m := range movers {
		was[m] = *m
		// The kernel reports moves in the v2 hierarchy, so that hierarchy comes last.
		if m.Cgroup.CPU != m.Cgroup.V2 {
			m.moveTo(second[m], false, inCPU)
		}
		m.moveTo(second[m], false, inV2)
	}
	for _, m := range movers {
		m.arrives(second[m], m.quota+time.Millisecond)
		old := was[m]
		if m.ID == old.ID {
			t.Fatalf("%+v is not another container", m.Container)
		}
		from := old.account()
		m.pays()
		// The ended account is shown only for a moment.
		if to := old.account(); !to.Ended || to.Receive > from.Receive || to.Tasks > from.Tasks {
			t.Errorf("moved away its account is %+v, was %+v", to, from)
		}
		if x, err := a.api.Explain(t.Context(), old.ID.String()); err != nil || len(x.Changes) > 0 || !x.Ended {
			t.Errorf("moved away it is %+v, %v", x, err)
		}
		old.left(before, old.Cgroup.V2, old.Cgroup.CPU)
	}
	for name, f := range a.metrics() {
		for _, m := range movers {
			if n := series(f, m.box.Name, was[m].ID.String()); n != 0 {
				t.Errorf("%s: %d series of %s where it was", name, n, m.box.Name)
			}
		}
	}

	// The agent learns of this only with its next look, half a minute later. The feature's own
	// tests cover what follows from it.
	if c := movers[0].Cgroup; c.CPU != c.V2 && testkit.Scale(t, 0, 1) == 1 {
		for _, m := range movers {
			was[m] = *m
			m.moveTo(third[m], true, inCPU)
		}
		for _, m := range movers {
			old := was[m]
			from := old.account()
			m.arrives(testkit.CG{V2: second[m].V2, CPU: third[m].CPU}, m.quota+time.Millisecond)
			if m.ID != old.ID {
				t.Fatalf("%+v is another container, was %+v", m.Container, old.Container)
			}
			if to := m.pays(); to.Tasks < from.Tasks || to.Receive < from.Receive {
				t.Errorf("its account is %+v, was %+v", to, from)
			}
			old.left(before, old.Cgroup.CPU)
		}
	}

	a.kill()
	r.reachable("with the agent killed")
	mustSay(t, a.run("restore", "--state-dir", a.path("state")), 0)
	mustSay(t, a.run("restore", "--state-dir", a.path("state")), 0, "nothing to undo")
	for k, v := range limits() {
		if before[k] != v {
			t.Errorf("restored, %s: %q, was %q", k, v, before[k])
		}
	}
	for _, m := range movers {
		procs, err := os.ReadFile(filepath.Join(m.Cgroup.CPU, "cgroup.procs"))
		must(t, err)
		for _, pid := range strings.Fields(string(procs)) {
			if comm, _ := os.ReadFile("/proc/" + pid + "/comm"); strings.HasPrefix(string(comm), "napi/") {
				t.Errorf("restored, %s is in %s", strings.TrimSpace(string(comm)), m.Cgroup.CPU)
			}
		}
	}
	for _, end := range loads {
		end()
	}
}
