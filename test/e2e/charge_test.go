package e2e

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/kernel/cgroup"
	"github.com/fairlead-project/fairlead/lab/sandbox"
)

// quotaOf returns the quota in force for a container.
func quotaOf(t *testing.T, c api.Container) time.Duration {
	t.Helper()
	b, err := cgroup.ReadBandwidth(c.Cgroup.CPU)
	must(t, err)
	return b.Quota
}

// value returns a container's number on the metrics page, 0 if there is none.
func (a *agent) value(name string, c api.Container) float64 {
	a.t.Helper()
	for _, m := range a.metrics()[name].GetMetric() {
		for _, l := range m.GetLabel() {
			if l.GetName() == "id" && l.GetValue() == c.ID.String() {
				return m.GetCounter().GetValue() + m.GetGauge().GetValue()
			}
		}
	}
	return 0
}

// TestChargeKilled kills the agent while one container is in debt, so that its packets are dropped,
// and another has credit. From then on nothing is dropped, and the limits become what their owners
// have set. The next agent and `fairlead restore` both do that, also where an owner has changed a
// limit in between.
func TestChargeKilled(t *testing.T) {
	r := newRig(t)
	const period = 100 * time.Millisecond
	owners := map[string]time.Duration{"e2e-debtor": 8 * time.Millisecond, "e2e-robbed": 40 * time.Millisecond}
	limit := func(name string) sandbox.CPU { return sandbox.CPU{Quota: owners[name], Period: period, Set: "0"} }
	debtor := r.add(sandbox.Spec{Name: "e2e-debtor", CPU: limit("e2e-debtor")})
	robbed := r.add(sandbox.Spec{Name: "e2e-robbed", CPU: limit("e2e-robbed")})
	thief := r.add(sandbox.Spec{Name: "e2e-thief", CPU: onOne})
	must(t, r.host.SetQueues("nic0", "rx", "rps_cpus", func(int) string { return "1" }))
	before := r.state()
	a := r.agent()
	a.policy("charge.yaml", "match: {name: [e2e-debtor, e2e-robbed]}\nset: {netcpu: charge, netcpu.reserve: 40%}\n")
	loads := []func(){
		generate(t, debtor, 0, "udp-recv"),
		generate(t, thief, 0, "udp-recv"),
		generate(t, robbed, 0, "burn"),
		generate(t, r.wire, 1, "udp-send", "--to", "10.66.1.1:9000"), // as fast as a busy CPU can: what waits and the budget let some 5,000 a second through
		generate(t, r.wire, 1, "udp-send", "--to", "10.66.1.3:9000", "--rate", "20000"),
	}

	// inForce waits until all of this holds at one moment.
	var d, c api.Container
	inForce := func() {
		t.Helper()
		a.start()
		d, c = a.reaches("e2e-debtor", api.StateDone), a.reaches("e2e-robbed", api.StateDone)
		dropped := a.quotaDropped(d)
		await(t, "debt, drops and credit", func() error {
			if now := a.quotaDropped(d); now <= dropped {
				return fmt.Errorf("%v packets were dropped", now)
			}
			if q := quotaOf(t, d); q >= owners[d.Name] {
				return fmt.Errorf("the debtor has %v of %v", q, owners[d.Name])
			}
			if q := quotaOf(t, c); q <= owners[c.Name] {
				return fmt.Errorf("the one that is robbed has %v of %v", q, owners[c.Name])
			}
			return nil
		})
		for _, c := range []api.Container{d, c} {
			x, err := a.api.Explain(t.Context(), c.ID.String())
			must(t, err)
			i := slices.IndexFunc(x.Changes, func(c api.Change) bool { return c.Kind == cgroup.KindFile })
			if i < 0 || x.Changes[i].Expiry.IsZero() || time.Until(x.Changes[i].Expiry) > 61*time.Second {
				t.Errorf("the journal has %+v of %s, want its quota for a minute", x.Changes, c.Name)
			}
		}
	}
	dropping := func() error {
		now := state{}
		now.readDevices(t, "host", r.host.NetNS())
		for _, dev := range []string{"h1 egress", "nic0 ingress"} {
			if k := "host " + dev; now[k] != before[k] {
				return fmt.Errorf("%s: %s", k, now[k])
			}
		}
		return nil
	}
	killed := func() {
		t.Helper()
		if dropping() == nil {
			t.Error("nothing can have been dropped")
		}
		a.kill()
		await(t, "no program to be left", dropping)
		r.reachable("with the agent killed")
	}

	inForce()
	mustSay(t, a.run("netcpu", "--total"), 0, "ENFORCED", "DROPPED")
	if testing.Verbose() {
		t.Log(a.run("netcpu"))
	}
	n, err := a.api.NetCPU(t.Context(), d.ID.String())
	must(t, err)
	if x := n.Accounts[0]; x.Dropped == 0 || x.Ledger == nil || x.Ledger.Factor >= 1 || x.Ledger.Charged == 0 {
		t.Errorf("of what is done about it the account has %+v, %+v", x, x.Ledger)
	}
	killed()
	mustSay(t, a.run("restore", "--expired", "--state-dir", a.path("state")), 0, "nothing to undo")
	if r.state().diff(before) == "" {
		t.Error("nothing was in force")
	}
	// The owner of one of the limits does not wait for an agent.
	owners["e2e-debtor"] = 9 * time.Millisecond
	must(t, debtor.Limit(limit("e2e-debtor")))
	inForce()
	killed()
	mustSay(t, a.run("restore", "--state-dir", a.path("state")), 0)
	if q := quotaOf(t, d); q != owners[d.Name] {
		t.Errorf("the debtor is left with %v, its owner's is %v", q, owners[d.Name])
	}
	owners["e2e-debtor"] = 8 * time.Millisecond
	must(t, debtor.Limit(limit("e2e-debtor")))
	r.sameAs(before, "restored, and with the first limit again")
	for _, end := range loads {
		end()
	}
}

// quotaDropped returns how many packets were dropped for a container's quota.
func (a *agent) quotaDropped(c api.Container) uint64 {
	a.t.Helper()
	n, err := a.api.NetCPU(a.t.Context(), c.ID.String())
	if err != nil || len(n.Accounts) == 0 {
		return 0 // not yet
	}
	return n.Accounts[0].QuotaDropped
}
