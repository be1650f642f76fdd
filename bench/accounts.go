package bench

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/fairlead-project/fairlead/api"
)

// accounts reads whose packets took whose CPU time. It is nil where the agent
// does not know: unmetered says why then, and it is not asked again; or where there
// is no agent.
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

// charges are what the accounts say of one window.
type charges struct {
	stolen  float64            // of the victim's time, per second
	balance float64            // what was charged over what was measured as a whole; 0: nothing was
	cost    map[string]float64 // of a received packet by protocol, in seconds
}

// chargesBetween gives the charges between two readings, nil if either is missing.
func chargesBetween(before, after *api.NetCPU, victim string) *charges {
	if before == nil || after == nil {
		return nil
	}
	n := after.After(*before)
	seconds := n.Taken.Sub(n.Since).Seconds()
	if seconds <= 0 {
		return nil
	}
	c := &charges{cost: map[string]float64{}}
	if whole := n.Softirq + n.Thread; whole > 0 {
		c.balance = n.Charged / whole
	}
	work := map[string]api.NetCPUWork{}
	for _, a := range append([]api.NetCPUAccount{n.System}, n.Accounts...) {
		if a.Name == victim {
			c.stolen = a.Stolen / seconds
		}
		for _, w := range a.Work {
			if w.Direction == "receive" {
				sum := work[w.Protocol]
				sum.Seconds, sum.Packets = sum.Seconds+w.Seconds, sum.Packets+w.Packets
				work[w.Protocol] = sum
			}
		}
	}
	for protocol, w := range work {
		// What a tunnel brought costs what is in it, and the way out of it.
		if w.Packets > 0 && protocol != encapsulated {
			c.cost[protocol] = (w.Seconds + work[encapsulated].Seconds) / float64(w.Packets)
		}
	}
	return c
}

const encapsulated = "encapsulated"

// protocol is how the accounts call a kind of traffic.
func protocol(kind string) string {
	p, _, _ := strings.Cut(kind, "-")
	return p
}
