// Package bench holds the experiments of `fairlead-lab bench` and `fairlead-lab demo`:
// it places load in a rig, toggles the protection by policy as a user would,
// and measures in turns, off and on.
//
// It builds no rigs (package rig), generates no load (package load) and draws
// nothing (package report). Only cmd/fairlead-lab and tests call it.
package bench

import (
	"cmp"
	"context"
	"slices"
	"time"
)

// settle is the time until a mode has its full effect: a container is free until it has taken from
// others for a second, and charge needs some rounds of the ledger.
func settle(mode string) time.Duration {
	switch mode {
	case "charge":
		return 3 * time.Second
	case "auto":
		return 8 * time.Second
	}
	return 2 * time.Second
}

// netcpuPlans measure the cost of a neighbour's packets for a victim that computes, without
// protection and with it.
func netcpuPlans(e *experiment, o Options) (plans []plan) {
	e.mode = cmp.Or(o.Mode, "isolate")
	e.settle = settle(e.mode)
	for _, su := range catalogue() {
		plans = append(plans, e.netcpu(su))
	}
	return plans
}

// netcpu plans one setup. A round begins and ends with the base: a victim beside neighbours without
// packets.
func (e *experiment) netcpu(su setup) plan {
	s := &session{bed: bed{experiment: e}, setup: su}
	taken := make(map[string]map[arm]sample) // of a round
	take := func(d demand) func(context.Context, arm) ([]figure, error) {
		name, rate := su.name+" "+d.name, d.rate
		return func(ctx context.Context, a arm) (_ []figure, err error) {
			if d.busy > 0 && rate == 0 {
				if rate, err = s.rateFor(ctx, d.traffic, d.busy); err != nil {
					return nil, err
				}
			}
			d := d
			d.rate = rate
			if taken[name] == nil {
				taken[name] = make(map[arm]sample)
			}
			taken[name][a], err = s.measure(ctx, d, a == armOn)
			return nil, err
		}
	}
	all := slices.Clone(su.demands)
	rounds := series{}
	var last sample // of the base
	if !su.alone {
		all = append([]demand{su.base()}, all...)
	}
	for i, d := range all {
		rounds.cases = append(rounds.cases, armed{
			name: su.name + " " + d.name, quick: d.quick, base: i == 0 && !su.alone, needs: su.service, arms: offOn(), measure: take(d),
		})
	}
	if !su.alone {
		rounds.cases = append(rounds.cases, armed{name: su.name + " " + su.base().name, base: true, arms: []arm{armOff}, measure: func(ctx context.Context, _ arm) (_ []figure, err error) {
			last, err = s.measure(ctx, su.base(), false)
			return nil, err
		}})
	}
	rounds.compare = func() {
		measured := slices.DeleteFunc(slices.Clone(all), func(d demand) bool { return taken[su.name+" "+d.name] == nil })
		e.addRound(su, measured, taken, last)
	}
	return plan{name: su.name, rigged: s, series: []series{rounds}}
}

// addRound adds the figures of a round to the report. last is the second measurement of the base.
func (e *experiment) addRound(su setup, all []demand, taken map[string]map[arm]sample, last sample) {
	var alone undisturbed
	if !su.alone {
		base := taken[su.name+" "+all[0].name]
		first := base[armOff]
		first.work = (first.work + last.work) / 2
		base[armOff], alone.work = first, first.work
		if first.charges != nil && last.charges != nil {
			alone.said = (first.charges.slowed + last.charges.slowed) / 2
		}
	}
	agent := make(map[arm]float64)
	for _, d := range all {
		name := su.name + " " + d.name
		for _, a := range offOn() {
			e.addSample(su, d, a, alone, taken[name][a])
			agent[a] += taken[name][a].agent / float64(len(all))
		}
		if cost, ok := loss(alone.work, taken[name][armOff], taken[name][armOn]); ok && su.accounts {
			e.add(name, armOn, figure{AccountsCost, "s", cost})
		}
	}
	for _, a := range offOn() {
		e.add(su.name, a, figure{AgentCPU, "1", agent[a]})
	}
}
