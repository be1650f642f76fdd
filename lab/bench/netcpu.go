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
	"strings"
	"time"

	"github.com/fairlead-project/fairlead/lab/report"
)

// NetCPUCases returns the names of the cases that NetCPU would measure. Error: ErrNoCase.
func NetCPUCases(o Options) ([]string, error) {
	_, names, err := o.setups()
	return names, err
}

// setups returns the rigs and cases that the options select.
func (o Options) setups() ([]setup, []string, error) {
	return choose(o, catalogue(), func(su *setup, chosen func(string, bool) bool) bool {
		su.demands = slices.DeleteFunc(slices.Clone(su.demands), func(d demand) bool { return !chosen(su.name+" "+d.name, d.quick) })
		return len(su.demands) > 0
	})
}

// settle is the time until a mode has its full effect: almost none for isolate, some rounds
// of the ledger for charge. The mode auto first waits before it acts.
func settle(mode string) time.Duration {
	switch mode {
	case "charge":
		return 3 * time.Second
	case "auto":
		return 8 * time.Second
	}
	return 300 * time.Millisecond
}

// installed removes the cases with programs that are not installed on this machine, with a note
// about each program.
func installed(all []setup, have func(program string) bool) (list []setup, notes []string) {
	n := needs{have: have}
	for _, su := range all {
		if n.met(string(su.service)) {
			list = append(list, su)
		}
	}
	return list, n.notes()
}

// NetCPU runs the netcpu experiment: the cost of a neighbour's packets for a victim that
// computes, without protection and with it. It needs root and two CPUs. When ctx ends,
// NetCPU removes the rig before it returns.
func NetCPU(ctx context.Context, o Options) (*report.Report, error) {
	e := o.experiment("netcpu",
		usual{rounds: 5, settle: settle(o.Mode), take: 2 * time.Second, takes: 3},
		usual{rounds: 2, settle: 150 * time.Millisecond, take: 400 * time.Millisecond, takes: 1})
	e.mode = cmp.Or(o.Mode, "isolate")
	if o.Settle > 0 {
		e.settle = o.Settle
	}
	all, _, err := o.setups()
	if err != nil {
		return nil, err
	}
	all, e.notes = installed(all, onMachine)
	var plans []plan
	for _, su := range all {
		plans = append(plans, e.netcpu(su))
	}
	r, err := e.run(ctx, plans)
	if err == nil && e.unmetered != "" {
		r.Env.Notes = append(r.Env.Notes, "packet cost and stolen time are missing: "+strings.TrimSuffix(e.unmetered, "."))
	}
	return r, err
}

// netcpu plans one setup. A round begins and ends with the base: a victim beside neighbours without
// packets.
func (e *experiment) netcpu(su setup) plan {
	s := &session{experiment: e, setup: su}
	all := slices.Clone(su.demands)
	if !su.alone {
		all = append([]demand{su.base()}, all...)
	}
	taken := make([][2]sample, len(all))
	var last sample // of the base
	rounds := series{begin: func(ctx context.Context) error { return s.findRates(ctx, all) }}
	for i := range all {
		rounds.cases = append(rounds.cases, armed{su.name + " " + all[i].name, offOn(), func(ctx context.Context, a arm) (_ []figure, err error) {
			taken[i][index(a == armOn)], err = s.measure(ctx, all[i], a == armOn)
			return nil, err
		}})
	}
	if !su.alone {
		rounds.cases = append(rounds.cases, armed{su.name + " " + su.base().name, []arm{armOff}, func(ctx context.Context, _ arm) (_ []figure, err error) {
			last, err = s.measure(ctx, su.base(), false)
			return nil, err
		}})
	}
	rounds.compare = func() { e.addRound(su, all, taken, last) }
	return plan{su.name, s, []series{rounds}}
}

// addRound adds the figures of a round to the report. last is the second measurement of the base.
func (e *experiment) addRound(su setup, all []demand, taken [][2]sample, last sample) {
	var alone undisturbed
	if !su.alone {
		first := &taken[0][0]
		first.work = (first.work + last.work) / 2
		alone.work = first.work
		if first.charges != nil && last.charges != nil {
			alone.said = (first.charges.slowed + last.charges.slowed) / 2
		}
	}
	for i, d := range all {
		for _, on := range []bool{false, true} {
			e.addSample(su, d, on, alone, taken[i][index(on)])
		}
		if cost, ok := loss(alone.work, taken[i][0], taken[i][1]); ok && su.accounts {
			e.report.Add(su.name+" "+d.name, AccountsCost, "s", true, cost)
		}
	}
	for _, on := range []bool{false, true} {
		var agent float64
		for i := range all {
			agent += taken[i][index(on)].agent / float64(len(all))
		}
		e.report.Add(su.name, AgentCPU, "1", on, agent)
	}
}

func index(on bool) int {
	if on {
		return 1
	}
	return 0
}
