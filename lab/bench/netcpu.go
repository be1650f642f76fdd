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
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/fairlead-project/fairlead/lab/report"
	"github.com/fairlead-project/fairlead/lab/rig"
)

// NetCPUCases returns the names of the cases that NetCPU would measure. Error: ErrNoCase.
func NetCPUCases(o Options) ([]string, error) {
	_, names, err := o.setups()
	return names, err
}

// setups returns the rigs and cases that the options select.
func (o Options) setups() ([]setup, []string, error) {
	return choose(o, catalogue(o.Docker), func(su *setup, chosen func(string, bool) bool) bool {
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
		if !n.met(su.victim) || !n.met(string(su.service)) {
			continue
		}
		su.demands = slices.DeleteFunc(slices.Clone(su.demands), func(d demand) bool { return !n.met(d.traffic.Kind.Program()) })
		if len(su.demands) > 0 {
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
	release, err := only()
	if err != nil {
		return nil, err
	}
	defer release()
	if err := rig.Sweep(); err != nil {
		return nil, err
	}
	for _, su := range all {
		e.total += e.report.Rounds * su.measurements()
	}
	for _, su := range all {
		if err := e.run(ctx, su); err != nil {
			return nil, fmt.Errorf("netcpu experiment, %s: %w", su.name, err)
		}
	}
	if e.unmetered != "" {
		e.notes = append(e.notes, "packet cost and stolen time are missing: "+strings.TrimSuffix(e.unmetered, "."))
	}
	e.report.Env.Notes = append(e.notes, notes(e.foreign, e.missing, e.quiet)...)
	return e.report, nil
}

// experiment is one run over setups.
type experiment struct {
	report      *report.Report
	progress    func(done, total int, what string)
	done, total int
	mode        string
	settle      time.Duration
	take        time.Duration
	takes       int // tries for a window that others disturb; 0 is one

	quiet   quiet
	foreign float64 // most CPUs that other programs used beside an idle rig
	missing string  // why the protection had no effect; "" if it had one
	// unmetered is why there is no packet cost; "" if there is one.
	unmetered string
	notes     []string
}

func (e *experiment) say(what string) {
	if e.progress != nil {
		e.progress(e.done, e.total, what)
	}
	e.done++
}

func (e *experiment) run(ctx context.Context, su setup) (err error) {
	ready := e.settle
	if su.mode != "" {
		ready = max(ready, settle(su.mode))
	}
	if su.service != "" {
		ready = max(ready, 4*time.Second) // the threads have chosen how they take their turns by then
	}
	s, err := newSession(ctx, su, cmp.Or(su.mode, e.mode), ready, e.take)
	if err != nil {
		return err
	}
	s.quiet.takes = e.takes
	defer func() { err = errors.Join(err, s.close()) }()
	for i := range su.demands {
		if d := &su.demands[i]; d.busy > 0 {
			if d.rate, err = s.rateFor(ctx, d.traffic, d.busy); err != nil {
				return err
			}
		}
	}
	for round := range e.report.Rounds {
		if err := e.round(ctx, s, su, round+1); err != nil {
			return err
		}
	}
	e.foreign = max(e.foreign, s.foreign)
	e.quiet.add(s.quiet)
	e.unmetered = s.guard.unmetered
	if s.guard.missing != "" {
		e.missing = s.guard.missing
	}
	return nil
}

// round measures every case once off and once on. The order alternates from case to case,
// so that the protection is switched half as often. The base, a victim beside neighbours
// without packets and without protection, is measured before and after.
func (e *experiment) round(ctx context.Context, s *session, su setup, round int) error {
	take := func(d demand, on bool) (sample, error) {
		e.say(fmt.Sprintf("round %d: %s %s, %s", round, su.name, d.name, map[bool]string{false: "off", true: "on"}[on]))
		return s.measure(ctx, d, on)
	}
	all := su.demands
	if !su.alone {
		all = append([]demand{su.base()}, all...)
	}
	measured := make([][2]sample, len(all))
	order := [2]bool{false, true}
	for i, d := range all {
		for _, on := range order {
			m, err := take(d, on)
			if err != nil {
				return err
			}
			measured[i][index(on)] = m
		}
		order[0], order[1] = order[1], order[0]
	}
	var base float64
	if !su.alone {
		last, err := take(su.base(), false)
		if err != nil {
			return err
		}
		first := &measured[0][0]
		first.work = (first.work + last.work) / 2
		base = first.work
	}
	for i, d := range all {
		for _, on := range []bool{false, true} {
			e.add(su, d, on, base, measured[i][index(on)])
		}
		if cost, ok := loss(base, measured[i][0], measured[i][1]); ok && su.accounts {
			e.report.Add(su.name+" "+d.name, AccountsCost, "s", true, cost)
		}
	}
	for _, on := range []bool{false, true} {
		var agent float64
		for i := range all {
			agent += measured[i][index(on)].agent / float64(len(all))
		}
		e.report.Add(su.name, AgentCPU, "1", on, agent)
	}
	return nil
}

func index(on bool) int {
	if on {
		return 1
	}
	return 0
}
