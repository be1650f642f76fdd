package bench

import (
	"context"
	"time"

	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/lab/load"
	"github.com/fairlead-project/fairlead/lab/rig"
)

// accuracy checks the accounts. The agent only keeps them, and two neighbours receive packets of
// one size, the first neighbour three times as many. No CPU sends another an IPI, so softirqs are
// the whole cost of a packet.
func accuracy() []setup {
	at := func(name string, rate uint64) demand {
		return demand{name: name, traffic: rig.Traffic{Kind: rig.UDP, Uneven: true}, rate: rate}
	}
	// At 2,000 packets per second the accounts sample every run, at the other rates only
	// some. Behind a tunnel they sample all.
	few, many, flood := at("2k", 2_000), at("20k", 20_000), at("flood", load.Flood)
	rates := map[rig.Path][]demand{
		rig.Hop: {many}, rig.NIC: {few, many, flood}, rig.VXLAN: {many, flood}, rig.Macvlan: {many},
	}
	var all []setup
	for _, path := range []rig.Path{rig.Hop, rig.NIC, rig.VXLAN, rig.Macvlan} {
		cfg := rig.Config{Path: path, Unsteered: true, Containers: []rig.Container{{Name: "victim"}, {Name: "first"}}}
		if path != rig.Hop {
			cfg.Containers = append(cfg.Containers, rig.Container{Name: "second"})
		}
		all = append(all, setup{
			name: "charges " + string(path),
			cfg:  cfg, alone: true, accounts: true, timed: true,
			demands: rates[path],
		})
	}
	return all
}

// exactness compares the accounts with an independent measurement.
type exactness struct {
	whole  float64 // softirq time of the accounts divided by that of a stopwatch
	system float64 // fraction of the charged time that went to the system
	price  float64 // cost of a packet of the first neighbour divided by the second's; 0: there is no second
}

// exactnessBetween returns the exactness between two readings, or nil without a stopwatch
// or accounts.
func (s *session) exactnessBetween(before, after reading) *exactness {
	if s.stopwatch == nil || before.net == nil || after.net == nil {
		return nil
	}
	n := after.net.After(*before.net)
	e := &exactness{whole: n.Softirq / (after.softirq - before.softirq).Seconds()}
	if n.Charged > 0 {
		e.system = (n.System.Receive + n.System.Send) / n.Charged
	}
	var prices []float64
	for i, r := range after.received {
		name := s.rig.Neighbours()[i].Name
		for _, a := range n.Accounts {
			if a.Name == name {
				prices = append(prices, a.Receive/float64(r.Since(before.received[i]).Ops))
			}
		}
	}
	if len(prices) == 2 {
		e.price = prices[0] / prices[1]
	}
	return e
}

// startStopwatch starts the stopwatch before the agent, so that its programs run first; see
// rig.Stopwatch.
func (s *session) startStopwatch() (err error) {
	if !s.setup.timed {
		return nil
	}
	if s.stopwatch, err = rig.NewStopwatch(); err != nil {
		return err
	}
	return s.stopwatch.Start()
}

// readAccounts reads the accounts and the stopwatch together.
func (s *session) readAccounts(ctx context.Context) (net *api.NetCPU, softirq time.Duration, err error) {
	if net, err = s.guard.accounts(ctx); err != nil || s.stopwatch == nil {
		return net, softirq, err
	}
	softirq, err = s.stopwatch.Read()
	return net, softirq, err
}
