package bench

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"strconv"
	"time"

	"github.com/fairlead-project/fairlead/lab/report"
	"github.com/fairlead-project/fairlead/lab/rig"
)

// The metrics of the blockio experiment.
const (
	PartOfIOPS  = "IOPS, part of the undisturbed"
	TimesP99    = "p99 latency, times the undisturbed"
	DetectedIn  = "interference declared after"
	RecoveredIn = "95 % of the undisturbed after"
	NamedRight  = "burners among the culprits named"
	BurnersKeep = "work of the burners"
	DiskIOPS    = "IOPS"
	DiskP99     = "p99 latency"
	Hits        = "losses detected"
	FalseAlarms = "false alarms"
	MetShare    = "1 s samples in which reservations are met"
	SettledIn   = "reservations met after a change"
	Refused     = "over-commitment refused"
	PartOfDue   = "part of the reservation"
	AgentPart   = "agent CPU while armed"
	// LostBeyond is what the neighbours lose beyond what the container with the reservation gains.
	// ReleasedIn is the time until everything is restored after the neighbours have stopped.
	LostBeyond = "CPU time that neighbours lose beyond what it takes, part of all"
	ReleasedIn = "all put back after"
	// Transactions is the number of a database's transactions per second.
	Transactions       = "transactions"
	PartOfTransactions = "transactions, part of the undisturbed"
	NetworkTime        = "time for the network, part of the disk's CPU"
)

// blockioCase is one case: a rig, and the measurements of a round.
type blockioCase struct {
	name  string
	quick bool
	most  int // most rounds, for a case with long ones; 0: no limit
	rig   blockioConfig
	round func(*blockioRig, context.Context, *experiment, blockioCase) error
}

// blockioBurners is the number of neighbours that compute all the time, each in a container
// of its own (MIST, figure 5).
const blockioBurners = 12

func blockioCatalogue() []blockioCase {
	reads := func(depth int) []string {
		return []string{"disk", "--size", "4096", "--conns", strconv.Itoa(depth)}
	}
	cpus := runtime.NumCPU()
	// MIST's figure 7: the mix of Hotmail's INDEX, from 4 threads.
	hotmail := []string{"disk", "--size", "4096", "--also", "65536", "--sequential", "reads", "--writes", "25", "--conns", "4"}
	all := []blockioCase{
		{name: "12 burners, depth 1", quick: true, rig: blockioConfig{load: reads(1), burners: blockioBurners, yield: true}, round: (*blockioRig).beside},
		{name: "12 burners, depth 16", rig: blockioConfig{load: reads(16), burners: blockioBurners, yield: true}, round: (*blockioRig).beside},
		{name: "12 burners, Hotmail mix", rig: blockioConfig{load: hotmail, burners: blockioBurners, yield: true}, round: (*blockioRig).beside},
		{name: "12 burners, pgbench", most: 3, rig: blockioConfig{service: rig.Postgres, burners: blockioBurners, yield: true}, round: (*blockioRig).database},
		{name: "one key, depth 1", quick: true, most: 3, rig: blockioConfig{load: reads(1), burners: blockioBurners, oneKey: true}, round: (*blockioRig).beside},
		{name: "one key, depth 16", most: 3, rig: blockioConfig{load: reads(16), burners: blockioBurners, oneKey: true}, round: (*blockioRig).beside},
		{name: "one key, pgbench", most: 3, rig: blockioConfig{service: rig.Postgres, burners: blockioBurners, oneKey: true}, round: (*blockioRig).database},
		{name: "12 burners, by action", quick: true, rig: blockioConfig{load: reads(1), burners: blockioBurners}, round: (*blockioRig).byAction},
		{name: "detect, 1 thread", quick: true, most: 3, rig: blockioConfig{load: reads(1), burners: blockioBurners, own: 2 * cpus}, round: (*blockioRig).detect},
		{name: fmt.Sprintf("detect, %d threads", 4*cpus), most: 3, rig: blockioConfig{load: reads(4 * cpus), burners: blockioBurners, own: 2 * cpus}, round: (*blockioRig).detect},
		{name: "RT runtime", quick: true, rig: blockioConfig{load: reads(1), burners: blockioBurners}, round: (*blockioRig).byBudget},
		{name: "three containers", quick: true, most: 3, rig: blockioConfig{three: true, yield: true}, round: (*blockioRig).three},
		{name: "mail beside streams", quick: true, rig: blockioConfig{load: []string{"mail", "--size", "16384", "--conns", "16"}, burners: 8, streams: 2}, round: (*blockioRig).streams},
		{name: "monitor, depth 1", quick: true, rig: blockioConfig{load: reads(1)}, round: (*blockioRig).monitored},
		{name: "monitor, depth 16", rig: blockioConfig{load: reads(16)}, round: (*blockioRig).monitored},
		{name: "schedulers", quick: true, rig: blockioConfig{load: append(reads(16), "--writes", "30"), loop: true}, round: (*blockioRig).scheduled},
	}
	return all
}

func (o Options) blockioCases() ([]blockioCase, []string, error) {
	return choose(o, blockioCatalogue(), func(c *blockioCase, chosen func(string, bool) bool) bool { return chosen(c.name, c.quick) })
}

// BlockIOCases returns the names of the cases that BlockIO would measure. Error: ErrNoCase.
func BlockIOCases(o Options) ([]string, error) {
	_, names, err := o.blockioCases()
	return names, err
}

// BlockIO runs the experiments of the MIST paper, scaled to this machine: a load on a disk
// beside containers that compute, or use the network or the same disk, without protection
// and with a reservation. It needs root. When ctx ends, BlockIO removes the rig before it
// returns.
func BlockIO(ctx context.Context, o Options) (*report.Report, error) {
	e := o.experiment("blockio", usual{rounds: 5, take: 2 * time.Second}, usual{rounds: 2, take: time.Second})
	cases, _, err := o.blockioCases()
	if err != nil {
		return nil, err
	}
	release, err := only()
	if err != nil {
		return nil, err
	}
	defer release()
	n := needs{have: onMachine}
	cases = slices.DeleteFunc(cases, func(c blockioCase) bool { return !n.met(string(c.rig.service)) })
	e.notes = n.notes()
	for _, c := range cases {
		e.total += e.blockioRounds(c)
	}
	for _, c := range cases {
		if err := e.blockio(ctx, c); err != nil {
			return nil, fmt.Errorf("blockio experiment, %s: %w", c.name, err)
		}
	}
	e.report.Env.Notes = append(e.report.Env.Notes, e.notes...)
	return e.report, nil
}

func (e *experiment) blockioRounds(c blockioCase) int {
	if c.most == 0 {
		return e.report.Rounds
	}
	if e.report.Env.Quick {
		return 1
	}
	return min(e.report.Rounds, c.most)
}

func (e *experiment) blockio(ctx context.Context, c blockioCase) (err error) {
	r, err := newBlockioRig(ctx, c.rig)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, r.close()) }()
	for range e.blockioRounds(c) {
		e.say(c.name)
		if err := c.round(r, ctx, e, c); err != nil {
			return err
		}
	}
	return nil
}

// BlockIOHeadline returns the result in one sentence.
func BlockIOHeadline(r *report.Report) string {
	c, ok := r.Find("12 burners, depth 1", PartOfIOPS)
	if !ok {
		return ""
	}
	return fmt.Sprintf("Beside 12 containers that compute, a load at a disk keeps %.0f %% of its IOPS with nothing done, and %.0f %% with a reservation.",
		100*report.Median(c.Off), 100*report.Median(c.On))
}

// BlockIOPlots returns the plots for a report of BlockIO.
func BlockIOPlots(*report.Report, Options) []report.Plot {
	groups := []report.Group{
		{Label: "depth 1", Case: "12 burners, depth 1"}, {Label: "depth 16", Case: "12 burners, depth 16"}, {Label: "Hotmail", Case: "12 burners, Hotmail mix"},
	}
	var detect []report.Group
	for _, c := range blockioCatalogue() {
		if c.rig.own > 0 {
			detect = append(detect, report.Group{Label: c.name, Case: c.name})
		}
	}
	database := []report.Group{{Label: "pgbench", Case: "12 burners, pgbench"}}
	return []report.Plot{
		{Title: "IOPS beside 12 burners", Note: "Part of the undisturbed (MIST, figures 5 and 7).", Metric: PartOfIOPS, Ideal: 1, Groups: groups},
		{Title: "p99 latency beside 12 burners", Note: "Times the undisturbed.", Metric: TimesP99, Ideal: 1, Groups: append(groups, database...)},
		{Title: "Transactions beside 12 burners", Note: "PostgreSQL, pgbench; part of the undisturbed.", Metric: PartOfTransactions, Ideal: 1, Groups: database},
		{Title: "Losses of 10 % and more that are detected", Note: "Part of the windows (MIST, figures 2 and 3).", Metric: Hits, Ideal: 1, Groups: detect},
		{Title: "A mail server beside decoding and streams", Note: "Part of the reservation (MIST, figure 9).", Metric: PartOfDue, Ideal: 1, Groups: []report.Group{{Label: "mail", Case: "mail beside streams"}}},
	}
}
