package bench

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/fairlead-project/fairlead/api"
)

// accounts reads the agent's CPU accounts. It returns nil without an agent, and if the
// agent keeps no accounts. In that case it sets unmetered to the reason, and does not ask
// again.
func (g *guard) accounts(ctx context.Context) (*api.NetCPU, error) {
	if g.unmetered != "" || g.process == nil {
		return nil, nil
	}
	n, err := g.client.NetCPU(ctx, "")
	var refused *api.Error
	if errors.As(err, &refused) {
		g.unmetered = refused.Text
		return nil, nil
	}
	if err != nil {
		return nil, g.explain(fmt.Errorf("read accounts: %w", err))
	}
	return &n, nil
}

// charges are the changes of the accounts in one window.
type charges struct {
	slowed  float64            // how much slower the victim ran, as the agent says it; NaN: it has no account
	balance float64            // charged time divided by measured time; 0: nothing was measured
	cost    map[string]float64 // CPU time of a received packet in seconds, by protocol
}

// chargesBetween returns the charges between two readings, or nil if one is missing.
func chargesBetween(before, after *api.NetCPU, victim string) *charges {
	if before == nil || after == nil {
		return nil
	}
	n := after.After(*before)
	if !n.Taken.After(n.Since) {
		return nil
	}
	c := &charges{cost: map[string]float64{}, slowed: slowedBetween(before, after, victim)}
	if whole := n.Softirq + n.Thread; whole > 0 {
		c.balance = n.Charged / whole
	}
	work := map[string]api.NetCPUWork{}
	for _, a := range append([]api.NetCPUAccount{n.System}, n.Accounts...) {
		for _, w := range a.Work {
			if w.Direction == "receive" {
				sum := work[w.Protocol]
				sum.Seconds, sum.Packets = sum.Seconds+w.Seconds, sum.Packets+w.Packets
				work[w.Protocol] = sum
			}
		}
	}
	for protocol, w := range work {
		// A packet from a tunnel costs its own work plus the decapsulation.
		if w.Packets > 0 && protocol != encapsulated {
			c.cost[protocol] = (w.Seconds + work[encapsulated].Seconds) / float64(w.Packets)
		}
	}
	return c
}

const encapsulated = "encapsulated"

// protocol returns the accounts' name for the protocol of a kind of traffic.
func protocol(kind string) string {
	p, _, _ := strings.Cut(kind, "-")
	return p
}
