// Package bench has the experiments of `fairlead-lab bench` and `fairlead-lab demo`. It
// places load in a rig, switches the protection by policy as a user would, and measures
// off and on in turns.
//
// Package rig builds rigs, package load generates load, and package report formats
// results. Only cmd/fairlead-lab and tests call bench.
package bench

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"
	"sort"
	"strings"
	"sync"
	"time"

	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/lab/rig"
)

// The metrics of the netcpu experiment.
const (
	// Penalty is the time of the victim's work, divided by its time beside neighbours
	// without packets (Iron, section 2).
	Penalty  = "penalty"
	Work     = "victim work"
	Sent     = "sent"
	Received = "received"
	Requests = "requests"
	P50      = "latency p50"
	P99      = "latency p99"
	Longest  = "latency longest"
	// Retransmitted is the number of TCP segments that server and client retransmitted.
	Retransmitted = "retransmitted"
	// VictimCPU is the CPU time that the scheduler charged to the victim, per second. If
	// the victim did less work than that time allows, softirqs took the rest. If the
	// time is less than its quota, the victim did not get its quota.
	VictimCPU = "victim CPU"
	// CPUUsed is the fraction of the time in which the shared CPU was not idle.
	CPUUsed = "CPU used"
	// PacketCost is the CPU time of receiving a packet, including decapsulation,
	// according to the agent's accounts (Iron, table 1).
	PacketCost = "packet cost"
	// Balance is the charged time divided by the softirq and thread time: 1 is exact.
	Balance = "charged of measured"
	// OfStopwatch is the accounts' softirq time divided by that of a stopwatch around the
	// same softirqs: 1 is exact.
	OfStopwatch = "accounts of stopwatch"
	// Price is the charge of the first of two receivers for a packet, divided by the
	// second's for a packet of the same size: 1 is fair.
	Price = "price of first to second"
	// SystemPart is the fraction of the charged time that went to the system.
	SystemPart = "charged to the system"
	// AccountsCost is the CPU time that the accounts cost the victim per packet.
	AccountsCost = "accounts cost"
	// AgentCPU is the agent's own CPU time, per second.
	AgentCPU = "agent CPU"
	// AgentMemory is the agent's resident memory, beside containers that do nothing.
	AgentMemory = "agent memory"
)

// settle returns the time until a mode has its full effect: a container pays only after it has taken
// from others for a second, and charge needs some rounds of the ledger. No mode has 0.
func settle(mode string) time.Duration {
	return map[string]time.Duration{"isolate": 2 * time.Second, "charge": 3 * time.Second, "auto": 8 * time.Second}[mode]
}

// netcpuPlans measure the cost of a neighbour's packets for a victim that computes, without and
// with protection.
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
	rounds := series{}
	taken := make(map[string]map[arm]sample) // of a round, by demand; "" is the base at its end
	add := func(key string, d demand, base bool, arms []arm) {
		rounds.cases = append(rounds.cases, armed{
			name: su.name + " " + d.name, quick: d.quick, base: base, needs: su.service, arms: arms,
			measure: func(ctx context.Context, a arm) (_ []figure, err error) {
				if d.busy > 0 && d.rate == 0 {
					if d.rate, err = s.rateFor(ctx, d.traffic, d.busy); err != nil {
						return nil, err
					}
				}
				if taken[key] == nil {
					taken[key] = make(map[arm]sample)
				}
				taken[key][a], err = s.measure(ctx, d, a == armOn)
				return nil, err
			},
		})
	}
	all := su.demands
	if !su.alone {
		all = append([]demand{su.base()}, all...)
	}
	for i, d := range all {
		add(d.name, d, i == 0 && !su.alone, offOn())
	}
	if !su.alone {
		add("", su.base(), true, []arm{armOff})
	}
	rounds.compare = func() { e.addRound(su, all, taken) }
	return plan{name: su.name, rigged: s, series: []series{rounds}}
}

// addRound adds the figures of a round to the report.
func (e *experiment) addRound(su setup, all []demand, taken map[string]map[arm]sample) {
	var alone undisturbed
	if !su.alone {
		first, last := taken[su.base().name][armOff], taken[""][armOff]
		first.work = (first.work + last.work) / 2
		taken[su.base().name][armOff], alone.work = first, first.work
		if said := (first.said + last.said) / 2; !math.IsNaN(said) {
			alone.said = said
		}
	}
	agent, measured := make(map[arm]float64), 0.0
	for _, d := range all {
		name, of := su.name+" "+d.name, taken[d.name]
		if of == nil {
			continue
		}
		measured++
		for _, a := range offOn() {
			m := of[a]
			if !su.alone {
				e.add(name, a, figure{Penalty, "1", alone.work / m.work}, figure{Work, "1/s", m.work})
			}
			e.add(name, a, m.figures...)
			if !su.alone && d.traffic.Kind != "" {
				e.add(name, a, alone.slowedFigures(m.counted, m.said)...)
			}
			agent[a] += m.agent
		}
		if cost, ok := loss(alone.work, of[armOff], of[armOn]); ok && su.accounts {
			e.add(name, armOn, figure{AccountsCost, "s", cost})
		}
	}
	for _, a := range offOn() {
		e.add(su.name, a, figure{AgentCPU, "1", agent[a] / measured})
	}
}

// sample is the result of a window: its own figures, and values for the figures of a round.
type sample struct {
	figures  []figure
	work     float64 // units per second of the victim
	counted  float64 // the same between the agent's two accounts; NaN: unknown
	said     float64 // the agent's slowed of the victim; NaN: the agent keeps no account
	received float64 // packets per second
	used     float64 // fraction of the time in which the shared CPU was not idle
	agent    float64 // CPU time of the agent, per second
	steal    float64 // fraction of the CPU time that the hypervisor took
}

// loss is the CPU time that the accounts cost the victim per packet, caches included: the
// difference of its work without and with them. ok is false if the two windows did not
// receive equally many packets, because then the difference has other causes, too.
func loss(base float64, off, on sample) (seconds float64, ok bool) {
	if base == 0 || on.received == 0 || off.received < on.received*0.99 || off.received > on.received*1.01 {
		return 0, false
	}
	return (off.work - on.work) / base / on.received, true
}

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

// accountFigures returns the figures of traffic from the accounts of a window.
func accountFigures(n api.NetCPU, t rig.Traffic) (figures []figure) {
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
	protocol, _, _ := strings.Cut(string(t.Kind), "-")
	// A packet from a tunnel costs its own work plus the decapsulation.
	if w := work[protocol]; w.Packets > 0 && !t.Out {
		figures = append(figures, figure{PacketCost, "s", (w.Seconds + work["encapsulated"].Seconds) / float64(w.Packets)})
	}
	if whole := n.Softirq + n.Thread; whole > 0 && n.Charged > 0 {
		figures = append(figures, figure{Balance, "1", n.Charged / whole})
	}
	return figures
}

// exactness compares the accounts of a window with an independent measurement.
func (s *session) exactness(n api.NetCPU, before, after reading) []figure {
	system := 0.0
	if n.Charged > 0 {
		system = (n.System.Receive + n.System.Send) / n.Charged
	}
	var prices []float64
	for i, r := range after.received {
		for _, a := range n.Accounts {
			if a.Name == s.rig.Neighbours()[i].Name {
				prices = append(prices, a.Receive/float64(r.Since(before.received[i]).Ops))
			}
		}
	}
	figures := []figure{{OfStopwatch, "1", n.Softirq / (after.softirq - before.softirq).Seconds()}, {SystemPart, "1", system}}
	if len(prices) == 2 && prices[0] > 0 {
		figures = append(figures, figure{Price, "1", prices[0] / prices[1]})
	}
	return figures
}

// The metrics that compare the agent's slowed with the victim's own count of its work
// (docs/slowed.md). Slowed is 1 minus the speed divided by the undisturbed speed.
const (
	Slowed     = "slowed"          // by the victim's own count
	SlowedSaid = "slowed, as said" // by the agent
	SlowedOff  = "slowed, off by"  // the distance between the two
	slowedBar  = 0.05
	slowedFar  = 0.2
)

// slowedBetween returns the API's slowed of a container between two readings. NaN: there is no such
// container.
func slowedBetween(before, after *api.NetCPU, name string) float64 {
	b, a := api.Frame{Taken: before.Taken}, api.Frame{Taken: after.Taken}
	b.NetCPU, a.NetCPU = before, after
	for _, x := range after.Accounts {
		a.Containers = append(a.Containers, api.Container{ID: x.Container, Name: x.Name})
	}
	return said(b, a, name).Slowed
}

// said returns the overview of a container between two frames. Slowed is NaN without the container.
func said(before, after api.Frame, name string) api.OverviewRow {
	for _, row := range after.After(before).Rows {
		if row.Name == name {
			return row
		}
	}
	return api.OverviewRow{Slowed: math.NaN()}
}

// undisturbed is a victim without the neighbours of a case: its work per second, and the agent's
// slowed, because other programs disturb it even then.
type undisturbed struct{ work, said float64 }

// slowedFigures compare how much slower than undisturbed the victim runs, by its work per second and by
// the agent. There are none if a value is unknown.
func (u undisturbed) slowedFigures(work, said float64) []figure {
	counted, relative := 1-work/u.work, 1-(1-said)/(1-u.said)
	if !(u.work > 0) || math.IsNaN(work) || math.IsNaN(relative) || u.said >= 1 {
		return nil
	}
	return []figure{{Slowed, "1", counted}, {SlowedSaid, "1", relative}, {SlowedOff, "1", math.Abs(relative - counted)}}
}

// worklog records a victim's own count of its work at short intervals. The bench learns the times of
// the agent's readings only with the answers, which come seconds later under a flood. The log has the
// victim's work between any two such times. The caller closes it.
type worklog struct {
	read func() uint64

	mu   sync.Mutex
	at   []time.Time
	done []uint64

	stop    context.CancelFunc
	running sync.WaitGroup
}

// The time between two entries, and the highest number of entries: one to two minutes.
const (
	worklogEvery = 10 * time.Millisecond
	worklogKeep  = 12_000
)

func newWorklog(read func() uint64) *worklog {
	ctx, stop := context.WithCancel(context.Background())
	l := &worklog{read: read, stop: stop}
	l.now()
	l.running.Go(func() {
		for ctx.Err() == nil {
			sleep(ctx, worklogEvery)
			l.now()
		}
	})
	return l
}

// now adds an entry. It reads the count under the lock, so that the entries are in order.
func (l *worklog) now() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.add(time.Now(), l.read())
}

func (l *worklog) add(at time.Time, done uint64) {
	if len(l.at) >= worklogKeep {
		half := worklogKeep / 2
		l.at, l.done = append(l.at[:0], l.at[half:]...), append(l.done[:0], l.done[half:]...)
	}
	l.at, l.done = append(l.at, at), append(l.done, done)
}

// Close ends the log.
func (l *worklog) Close() {
	l.stop()
	l.running.Wait()
}

// rate returns the work per second between two times. NaN: the log does not reach back so far, or the
// times are equal.
func (l *worklog) rate(from, to time.Time) float64 {
	l.now()
	return (l.until(to) - l.until(from)) / to.Sub(from).Seconds()
}

// until returns the work up to a time, interpolated between two entries.
func (l *worklog) until(t time.Time) float64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	i := sort.Search(len(l.at), func(i int) bool { return !l.at[i].Before(t) })
	switch {
	case i == len(l.at), i == 0 && l.at[0].After(t):
		return math.NaN()
	case i == 0:
		return float64(l.done[0])
	}
	part := t.Sub(l.at[i-1]).Seconds() / l.at[i].Sub(l.at[i-1]).Seconds()
	return float64(l.done[i-1]) + part*float64(l.done[i]-l.done[i-1])
}
