package agent

import (
	"cmp"
	"context"
	"slices"
	"time"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/feature/netcpu"
	"github.com/fairlead-project/fairlead/kernel/sched"
	"github.com/fairlead-project/fairlead/policy"
)

const (
	autoKey = "fairlead.netcpu"
	// autoFor is for how long a decision counts, and with it what it has changed
	// on the host, if nobody renews it. Each renewal writes the journal's entries
	// of the container anew.
	autoFor = 5 * time.Minute
)

// autoLoop decides, at the agent's pace, about the containers whose policy is
// netcpu: auto, until ctx ends. Package netcpu has the rules.
func (a *Agent) autoLoop(ctx context.Context, autos *netcpu.Autos) {
	tick := time.NewTicker(a.pace.decide)
	defer tick.Stop()
	failed := ""
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		err := a.auto(autos)
		switch {
		case err == nil:
			failed = ""
		case err.Error() != failed:
			failed = err.Error()
			a.log.Warn("deciding about netcpu: auto", "err", err)
		}
	}
}

// auto makes the decisions of one moment.
func (a *Agent) auto(autos *netcpu.Autos) error {
	a.mu.Lock()
	complete := a.complete
	a.mu.Unlock()
	list := a.autoTargets() // after it, so as to be as complete as that
	if len(list) == 0 {
		return nil // reading the accounts costs something
	}
	r, err := a.accounts.read()
	if err != nil {
		return err
	}
	now := a.pace.now()
	for _, m := range autos.Next(r, list, complete, a.nameOf) {
		if m.Since.IsZero() {
			continue // nothing has been decided yet
		}
		d := policy.Decision{
			Container: m.Container, Key: autoKey, Value: string(m.Mode), Expiry: now.Add(autoFor),
			Instead: string(policy.NetCPUAuto), Reason: m.Reason, Since: m.Since.UTC(),
		}
		if old := a.decision(d); old.Value == d.Value && old.Since.Equal(d.Since) && old.Expiry.Sub(now) > autoFor/2 {
			continue
		}
		a.Decide(d)
	}
	return nil
}

// autoTargets lists those that policy leaves to auto.
func (a *Agent) autoTargets() (list []policy.Target) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, t := range a.resolved {
		if t.Settings.NetCPU == policy.NetCPUAuto {
			list = append(list, t)
		}
	}
	slices.SortFunc(list, func(x, y policy.Target) int { return cmp.Compare(x.Container.ID, y.Container.ID) })
	return list
}

func (a *Agent) nameOf(id container.ID) string {
	if c, ok := a.set.Lookup(id); ok && c.Name != "" {
		return c.Name
	}
	return id.String()
}

// decision gives the one that stands in the place of d.
func (a *Agent) decision(d policy.Decision) policy.Decision {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.decisions[choice{d.Container, d.Key}]
}

// adopt makes the decisions of an agent that was killed count on, before a round
// takes back what they have changed. They lapse, which tells that from what
// policy itself asked for.
func (a *Agent) adopt() *netcpu.Autos {
	const reason = "decided by an earlier agent, which was killed"
	autos := new(netcpu.Autos)
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, e := range a.journal.Entries() {
		id := container.ID(e.Owner.Container)
		if id == 0 || e.Expiry.IsZero() || e.Ref.Kind != sched.KindKthread || featureOf(autoKey) != e.Owner.Feature {
			continue
		}
		a.decisions[choice{id, autoKey}] = policy.Decision{
			Container: id, Key: autoKey, Value: string(policy.NetCPUIsolate), Expiry: e.Expiry,
			Instead: string(policy.NetCPUAuto), Reason: reason, Since: e.When,
		}
		autos.Adopt(id, reason, e.When)
	}
	return autos
}
