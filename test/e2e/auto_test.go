package e2e

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/lab/sandbox"
)

const autoAll = "match: {name: \"e2e-*\"}\nset: {netcpu: auto, netcpu.steal: 2.5%}\n---\nmatch: {name: e2e-flood}\nset: {netcpu: isolate}\n"

// onOne keeps the computing and the flooded containers on one CPU. The weight of a group on a CPU
// keeps changing if the group has work on several. Linux 6.18 may then let the kernel's own workers
// wait while the group keeps a CPU busy: it reports a workqueue lockup, and processes that wait for
// RCU, or have watched a file, cannot end.
var onOne = sandbox.CPU{Set: "0"}

// TestAuto floods a container with the mode isolate, and then with the mode auto. In auto the agent
// does nothing until the container robs another. Then it isolates it, which stops the theft, and
// reports why. After the flood, everything is as before.
func TestAuto(t *testing.T) {
	r := newRig(t)
	flood := r.add(sandbox.Spec{Name: "e2e-flood", CPU: onOne})
	victim := r.add(sandbox.Spec{Name: "e2e-victim", CPU: onOne})
	must(t, r.host.SetQueues("nic0", "rx", "rps_cpus", func(int) string { return "1" }))
	before := r.state()
	a := r.agent()
	a.policy("auto.yaml", autoAll)
	a.start()
	a.stands("e2e-flood", "netcpu", api.StateDone)
	a.stands("e2e-victim", "netcpu", api.StateDone)
	if _, err := a.api.NetCPU(t.Context(), ""); err != nil {
		t.Fatal(err)
	}
	observed := r.state() // the accounts have programs of their own
	mustSay(t, a.run("explain", "e2e-flood"), 0, "fairlead.netcpu = isolate", "auto.yaml line 5", "Nothing was changed")

	generate(t, flood, 0, "udp-recv")
	rest := generate(t, victim, 0, "burn")
	end := generate(t, r.wire, 1, "udp-send", "--to", "10.66.1.1:9000", "--rate", "60000")
	began := time.Now()
	a.isolated("e2e-flood", 1)
	t.Logf("isolated after %v", time.Since(began).Round(100*time.Millisecond))
	o := a.run("explain", "e2e-flood")
	mustSay(t, o, 0, "fairlead.netcpu = isolate, by controller for fairlead.netcpu=isolate (", "auto.yaml:5), since ", "of a CPU from others (", "more than 2.5 %", "until ")
	mustSay(t, a.run("explain", "e2e-victim"), 0, "fairlead.netcpu = auto", "Nothing was changed")
	a.spares(victim, flood)
	t.Logf("its victim is spared after %v", time.Since(began).Round(100*time.Millisecond))

	rest()
	end()
	await(t, "it is let go of", func() error {
		if o := a.run("explain", "e2e-flood"); !strings.Contains(o.out, "fairlead.netcpu = observe, by controller") || !strings.Contains(o.out, "Nothing was changed") {
			return fmt.Errorf("%v", o)
		}
		return nil
	})
	mustSay(t, a.run("explain", "e2e-flood"), 0, "for 10s its packets cost at most 1.25 % of a CPU")
	r.sameAs(observed, "after the flood")

	// Killed while it only observes, with no agent after it: there is nothing to undo.
	a.kill()
	r.sameAs(before, "after the kill")
	mustSay(t, a.run("restore", "--state-dir", a.path("state")), 0, "nothing to undo")
}

// spares waits until culprit takes almost nothing of victim's time.
func (a *agent) spares(victim, culprit *sandbox.Box) {
	a.t.Helper()
	stolen := func() (sum float64, at time.Time) {
		n, err := a.api.NetCPU(a.t.Context(), "")
		must(a.t, err)
		for _, x := range n.Matrix {
			if x.VictimName == victim.Name && x.CulpritName == culprit.Name {
				sum += x.Seconds
			}
		}
		return sum, n.Taken
	}
	await(a.t, victim.Name+" to be robbed no more", func() error {
		was, from := stolen()
		time.Sleep(time.Second)
		now, to := stolen()
		if share := (now - was) / to.Sub(from).Seconds(); share > 0.03 {
			return fmt.Errorf("%.1f %% of a CPU are taken from it", 100*share)
		}
		return nil
	})
}
