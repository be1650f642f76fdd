package overlay

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/feature"
	"github.com/fairlead-project/fairlead/kernel/netdev"
	"github.com/fairlead-project/fairlead/kernel/probe"
)

// Plan implements feature.Planner: what "overlay: on" would change for a container. Only a pair of
// devices is a change; most networks need none.
func (f *Overlay) Plan(_ context.Context, c container.Container) (feature.Plan, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	plan := feature.Plan{Key: "fairlead.overlay", Value: "on"}
	if f.host == nil {
		return plan, nil // no network is accelerated
	}
	of := slices.DeleteFunc(c.Ends(f.cfg.Roots.Proc), func(e container.End) bool { return !e.Host })
	nets, err := f.find(of)
	if err != nil {
		return plan, fmt.Errorf("overlay: %w", err)
	}
	for _, n := range nets {
		if n.NetNS == f.host.Inode() || len(n.Refused) > 0 ||
			!slices.ContainsFunc(of, func(e container.End) bool { return slices.Contains(n.Ends, e.Device) }) {
			continue
		}
		ns, err := f.reader.Find.Open(n.Path, n.NetNS)
		if errors.Is(err, netdev.ErrNoNS) {
			continue // the network has just gone
		}
		if err != nil {
			return plan, fmt.Errorf("overlay: %w", err)
		}
		k := ns.Pair(n.Index, f.host)
		now, err := k.Read()
		ns.Close()
		if err != nil {
			return plan, fmt.Errorf("overlay: %w", err)
		}
		plan.Steps = append(plan.Steps, feature.Step{Ref: k.Ref(), Now: now, Value: netdev.OurPair})
	}
	return plan, nil
}

// Examine implements feature.Examiner: the networks of this host, and why one is left alone.
func (f *Overlay) Examine() []probe.Finding {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.host == nil {
		return nil
	}
	const area = "overlay network"
	nets, _, err := f.all()
	if err != nil {
		return []probe.Finding{{Capability: "overlay networks", Area: area, Verdict: probe.Verdict{Level: probe.Unavailable, Why: err.Error()}}}
	}
	var list []probe.Finding
	for _, n := range nets {
		w := probe.Finding{Capability: f.nameOf(n), Area: area, Verdict: probe.Verdict{Level: probe.Full}, Detail: n.Kind + ", can be accelerated"}
		if len(n.Refused) > 0 { // the host is not at fault
			w.Verdict, w.Detail = probe.Verdict{Level: probe.Unavailable, Why: "left alone: " + n.Refused[0].Text}, ""
		}
		list = append(list, w)
	}
	return list
}
