package bench

import (
	"context"
	"fmt"
	"runtime"
	"strconv"

	"github.com/fairlead-project/fairlead/lab/rig"
)

// The metrics of the blockio experiment.
const (
	PartOfIOPS  = "IOPS, part of the undisturbed"
	TimesP99    = "p99 latency, times the undisturbed"
	DetectedIn  = "interference declared after"
	RecoveredIn = "95 % of the undisturbed after"
	NamedRight  = "burners among the culprits named"
	DiskIOPS    = "IOPS"
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
)

// armAlone is the load undisturbed. The others are compared with it.
const armAlone arm = "alone"

// blockioCase is one case: a rig, and the measurements of a round.
type blockioCase struct {
	name    string
	quick   bool
	most    int // most rounds, for a case with long ones; 0: no limit
	rig     blockioConfig
	measure func(*blockioRig, context.Context, blockioCase, arm) ([]figure, error)
	// whole measures all arms of a case at once, in place of measure, and adds the figures.
	whole func(*blockioRig, context.Context, blockioCase) error
}

// arms returns the arms of each round, in order.
func (c blockioCase) arms() []arm {
	if c.whole != nil {
		return []arm{armAll}
	}
	return append([]arm{armAlone}, offOn()...)
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
	return []blockioCase{
		{name: "12 burners, depth 1", quick: true, rig: blockioConfig{load: reads(1), burners: blockioBurners, yield: true}, measure: (*blockioRig).beside},
		{name: "12 burners, depth 16", rig: blockioConfig{load: reads(16), burners: blockioBurners, yield: true}, measure: (*blockioRig).beside},
		{name: "12 burners, Hotmail mix", rig: blockioConfig{load: hotmail, burners: blockioBurners, yield: true}, measure: (*blockioRig).beside},
		{name: "12 burners, pgbench", most: 3, rig: blockioConfig{service: rig.Postgres, burners: blockioBurners, yield: true}, measure: (*blockioRig).beside},
		{name: "one key, depth 1", quick: true, most: 3, rig: blockioConfig{load: reads(1), burners: blockioBurners, oneKey: true}, measure: (*blockioRig).beside},
		{name: "one key, depth 16", most: 3, rig: blockioConfig{load: reads(16), burners: blockioBurners, oneKey: true}, measure: (*blockioRig).beside},
		{name: "one key, pgbench", most: 3, rig: blockioConfig{service: rig.Postgres, burners: blockioBurners, oneKey: true}, measure: (*blockioRig).beside},
		{name: "detect, 1 thread", quick: true, most: 3, rig: blockioConfig{load: reads(1), burners: blockioBurners, own: 2 * cpus}, whole: (*blockioRig).detect},
		{name: fmt.Sprintf("detect, %d threads", 4*cpus), most: 3, rig: blockioConfig{load: reads(4 * cpus), burners: blockioBurners, own: 2 * cpus}, whole: (*blockioRig).detect},
		{name: "three containers", quick: true, most: 3, rig: blockioConfig{three: true, yield: true}, whole: (*blockioRig).three},
		{name: "mail beside streams", quick: true, rig: blockioConfig{load: []string{"mail", "--size", "16384", "--conns", "16"}, burners: 8, streams: 2}, measure: (*blockioRig).mail},
		{name: "monitor, depth 1", quick: true, rig: blockioConfig{load: reads(1)}, whole: (*blockioRig).monitored},
		{name: "monitor, depth 16", rig: blockioConfig{load: reads(16)}, whole: (*blockioRig).monitored},
	}
}

// blockioPlans measure a load on a disk beside containers that compute, or use the network or the
// same disk, without protection and with a reservation: the experiments of the MIST paper, scaled to
// this machine.
func blockioPlans(e *experiment, _ Options) (plans []plan) {
	for _, c := range blockioCatalogue() {
		plans = append(plans, e.blockio(c))
	}
	return plans
}

// blockio plans a case, which has a rig of its own.
func (e *experiment) blockio(c blockioCase) plan {
	r := &blockioRig{bed: bed{experiment: e}, config: c.rig}
	rounds := series{inOrder: true, rounds: e.report.Rounds}
	if c.most > 0 {
		rounds.rounds = min(rounds.rounds, c.most)
		if e.report.Env.Quick {
			rounds.rounds = 1
		}
	}
	rounds.cases = []armed{{name: c.name, quick: c.quick, needs: c.rig.service, arms: c.arms(), measure: func(ctx context.Context, a arm) ([]figure, error) {
		if a == armAll {
			return nil, c.whole(r, ctx, c)
		}
		return c.measure(r, ctx, c, a)
	}}}
	return plan{name: c.name, rigged: r, series: []series{rounds}}
}
