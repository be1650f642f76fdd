package bench

import (
	"context"

	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/bench/load"
	"github.com/fairlead-project/fairlead/bench/rig"
)

// accuracy are how right the accounts are: the agent does nothing but keep them, and
// two neighbours receive packets of one size, the first three times as many. No CPU
// calls another, so that softirqs are all that a packet takes.
func accuracy() []setup {
	at := func(name string, rate uint64) demand {
		return demand{name: name, traffic: rig.Traffic{Kind: rig.UDP, Uneven: true}, rate: rate}
	}
	// At 2,000 a second every run is looked at, at the others some are; behind a
	// tunnel all.
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
			name: "charges " + string(path), title: "Whether the accounts are right, " + pathNames[path],
			cfg: cfg, alone: true, accounts: true, timed: true,
			demands: rates[path],
		})
	}
	return all
}

// exactness is what an independent measure says of the accounts.
type exactness struct {
	whole  float64 // softirq time by the accounts over that by a stopwatch
	system float64 // part of all that was charged that no container pays for
	price  float64 // what a packet of the first neighbour cost over one of the second; 0: there is no second
}

// exactnessBetween gives that for two readings, nil if there is no stopwatch or no
// account.
func (s *session) exactnessBetween(before, after reading) *exactness {
	if s.stopwatch == nil || before.net == nil || after.net == nil {
		return nil
	}
	n := after.net.After(*before.net)
	e := &exactness{whole: n.Softirq / after.softirq.Since(before.softirq, rig.NetRx, rig.NetTx).Seconds()}
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

// startStopwatch starts one before there is an agent, so that its programs come
// before those of any; see rig.Stopwatch.
func (s *session) startStopwatch() (err error) {
	if !s.setup.timed {
		return nil
	}
	if s.stopwatch, err = rig.NewStopwatch(rig.StopwatchConfig{}); err != nil {
		return err
	}
	return s.stopwatch.Start()
}

// readAccounts reads the accounts, and the stopwatch at the same moment.
func (s *session) readAccounts(ctx context.Context) (net *api.NetCPU, softirq rig.Elapsed, err error) {
	if net, err = s.guard.accounts(ctx); err != nil || s.stopwatch == nil {
		return net, softirq, err
	}
	softirq, err = s.stopwatch.Read()
	return net, softirq, err
}
