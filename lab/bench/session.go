package bench

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"
	"strings"
	"time"

	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/lab/load"
	"github.com/fairlead-project/fairlead/lab/rig"
	"golang.org/x/sys/unix"
)

// bed is a rig with an agent in which an experiment measures.
type bed struct {
	*experiment
	rig   *rig.Rig
	guard *guard
}

// raise builds the rig, and starts the agent; see newGuard.
func (b *bed) raise(ctx context.Context, cfg rig.Config, feature, protect string, uplink uint64) (err error) {
	if b.rig, err = rig.New(ctx, cfg); err == nil {
		b.guard, err = newGuard(ctx, b.rig, feature, protect, uplink)
	}
	return err
}

// end ends the load.
func (b *bed) end() error {
	if b.rig == nil {
		return nil
	}
	return b.rig.Stop()
}

// leave ends the load and the agent, and removes the rig.
func (b *bed) leave() error {
	err := b.end()
	if b.guard != nil {
		b.unmetered, b.missing = cmp.Or(b.guard.unmetered, b.unmetered), cmp.Or(b.guard.missing, b.missing)
		err = errors.Join(err, b.guard.stop())
	}
	if b.rig != nil {
		err = errors.Join(err, b.rig.Close())
	}
	return err
}

// letRun lets the first n generators run, and stops the others.
func letRun(load []*rig.Generator, n int) error {
	return errors.Join(signalAll(load[:n], unix.SIGCONT), signalAll(load[n:], unix.SIGSTOP))
}

func signalAll(load []*rig.Generator, s unix.Signal) error {
	var errs []error
	for _, g := range load {
		errs = append(errs, g.Signal(s))
	}
	return errors.Join(errs...)
}

// session is a rig with an active victim, an agent, and one kind of traffic at a time.
type session struct {
	bed
	setup  setup
	victim *rig.Generator // counts the work of the victim; nil if the victim is idle
	pid    int            // process of the victim or of its service; 0 if it is idle
	log    *worklog       // log of the victim's work; nil without victim

	burners []*rig.Generator // in the neighbours, if they compute
	traffic rig.Traffic      // the current traffic
	running *rig.Running     // nil before the first traffic
	shape   uint64           // current rate of the NIC, bit/s
	lifted  bool
	settle  time.Duration // time of load before a window

	stopwatch *rig.Stopwatch // nil unless the setup is timed
}

// build builds the rig, and starts the agent and the victim.
func (s *session) build(ctx context.Context) (err error) {
	su := s.setup
	s.settle = cmp.Or(su.settled, max(s.experiment.settle, settle(su.mode)))
	if su.timed {
		if s.stopwatch, err = rig.NewStopwatch(); err != nil {
			return err
		}
		// Start it before the agent, so that its programs run first; see rig.Stopwatch.
		if err := s.stopwatch.Start(); err != nil {
			return err
		}
	}
	if err := s.raise(ctx, su.cfg, "netcpu", su.protect, 0); err != nil {
		return err
	}
	if err := s.startVictim(ctx); err != nil {
		return err
	}
	if s.victim != nil {
		s.log = newWorklog(s.victim.Ops)
	}
	if !su.compute {
		return nil
	}
	for i, b := range s.rig.Neighbours() {
		if s.rig.Containers[1+i].CPU != rig.SharedCPU {
			continue
		}
		g, err := s.rig.Start(ctx, b, "burn")
		if err != nil {
			return err
		}
		s.burners = append(s.burners, g)
	}
	return nil
}

func (s *session) startVictim(ctx context.Context) (err error) {
	switch {
	case s.setup.service != "":
		server, err := s.rig.Serve(ctx, s.setup.service, s.rig.Victim())
		if err != nil {
			return err
		}
		if s.victim, err = s.rig.Ask(ctx, s.setup.service, 0, s.rig.Boxes[serviceClient], serviceConns, rig.PageSize); err != nil {
			return err
		}
		s.victim.SetRate(load.Flood)
		s.pid = server.PID
	case s.setup.alone:
	default:
		if s.victim, err = s.rig.Start(ctx, s.rig.Victim(), "burn"); err != nil {
			return err
		}
		s.pid = s.victim.PID
	}
	return nil
}

func (s *session) close() error {
	if s.log != nil {
		s.log.Close()
	}
	err := s.leave()
	if s.stopwatch != nil {
		err = errors.Join(err, s.stopwatch.Close())
	}
	return err
}

// send replaces the traffic by t, paused. Without t the last traffic stays, paused.
func (s *session) send(ctx context.Context, t rig.Traffic) error {
	if t == s.traffic || t.Kind == "" {
		return nil
	}
	if s.running != nil {
		err := s.running.Stop()
		s.running, s.traffic = nil, rig.Traffic{}
		if err != nil {
			return err
		}
	}
	run, err := s.rig.Send(ctx, t)
	if err != nil {
		return err
	}
	s.running, s.traffic = run, t
	return nil
}

// compute makes the neighbours without traffic compute, if the setup requires it.
func (s *session) compute(d demand, on bool) error {
	t := d.traffic
	busy := t.Neighbours
	switch {
	case d.idle:
		busy = len(s.burners)
	case d.control && !on, t.Kind == "":
		busy = 0
	case busy == 0 || busy > len(s.burners):
		busy = len(s.burners)
	}
	return errors.Join(signalAll(s.burners[:busy], unix.SIGSTOP), signalAll(s.burners[busy:], unix.SIGCONT))
}

// prepare sets up a case, with the traffic paused.
func (s *session) prepare(ctx context.Context, d demand, on bool) error {
	if s.running != nil {
		// Switch without load: the time of a switch under load is not part of the measurement.
		if err := s.running.SetRate(0); err != nil {
			return err
		}
	}
	if err := errors.Join(s.send(ctx, d.traffic), s.compute(d, on)); err != nil {
		return err
	}
	if d.shape != s.shape {
		if err := s.rig.Shape(ctx, d.shape); err != nil {
			return err
		}
		s.shape = d.shape
	}
	if lift := d.lift && !on; lift != s.lifted {
		for i := range s.rig.Neighbours() {
			if err := s.rig.Lift(1+i, lift); err != nil {
				return err
			}
		}
		s.lifted = lift
	}
	if err := s.rig.Drop(d.control && !on); err != nil {
		return err
	}
	if s.setup.accounts {
		return s.guard.attended(ctx, on)
	}
	if err := s.guard.inDriver(ctx, on && d.xdp); err != nil {
		return err
	}
	if err := s.protect(ctx, on || d.control); err != nil || !on || !d.xdp || s.guard.missing != "" {
		return err
	}
	return s.guard.checkDriver(ctx)
}

// protect switches the protection on or off.
func (s *session) protect(ctx context.Context, on bool) error {
	if !on {
		return s.guard.apply(ctx, nil)
	}
	return s.guard.apply(ctx, rules{s.setup.protect + "*": "netcpu: " + cmp.Or(s.setup.mode, s.mode)})
}

// measure runs a case with the protection on or off, and measures it once it has settled.
// It repeats a window that the hypervisor disturbs.
func (s *session) measure(ctx context.Context, d demand, on bool) (sample, error) {
	return s.quiet.take(func() (sample, error) { return s.window(ctx, d, on) })
}

// window measures once.
func (s *session) window(ctx context.Context, d demand, on bool) (sample, error) {
	if err := s.prepare(ctx, d, on); err != nil {
		return sample{}, err
	}
	if d.traffic.Kind != "" {
		if err := s.running.SetRate(d.rate); err != nil {
			return sample{}, err
		}
	}
	sleep(ctx, s.settle)
	before, err := s.read(ctx)
	if err != nil {
		return sample{}, err
	}
	sleep(ctx, s.take*time.Duration(max(d.long, 1)))
	after, err := s.read(ctx)
	if err != nil {
		return sample{}, err
	}
	if err := s.rig.Ended(); err != nil {
		return sample{}, err
	}
	if d.traffic.Kind == "" && s.setup.service == "" {
		s.foreign = max(s.foreign, after.all.busySince(before.all)-s.own())
	}
	return s.between(d, before, after), nil
}

// own is the number of CPUs that the rig itself uses without traffic.
func (s *session) own() float64 {
	var quota float64
	for i, c := range s.rig.Containers {
		if i == 0 && !s.setup.alone || i > 0 && len(s.burners) > 0 {
			quota += c.Quota / 100
		}
	}
	return min(quota, 1)
}

// reading holds all counters at one moment.
type reading struct {
	at                  time.Time
	all, shared         cpuTimes
	victimCPU, agentCPU time.Duration
	agentMemory         float64
	victim              load.Reading
	sent, received      []load.Reading
	net                 *api.NetCPU   // nil if the agent keeps no accounts
	softirq             time.Duration // of the stopwatch, if there is one
	retransmitted       uint64        // by a service and its client
}

func (s *session) read(ctx context.Context) (r reading, err error) {
	if r.net, err = s.guard.accounts(ctx); err != nil {
		return r, err
	}
	if s.stopwatch != nil {
		if r.softirq, _, err = s.stopwatch.Read(); err != nil {
			return r, err
		}
	}
	r.at, r.all, r.shared = time.Now(), readCPU(allCPUs), readCPU(rig.SharedCPU)
	if p := s.guard.process; p != nil {
		r.agentCPU, r.agentMemory = cpuTime(p.PID), resident(p.PID)
	}
	if s.pid != 0 {
		r.victimCPU = cpuTime(s.pid)
	}
	if s.victim != nil {
		r.victim = s.victim.Read()
	}
	if s.setup.service != "" {
		if r.retransmitted, err = rig.Retransmitted(s.pid, s.victim.PID); err != nil {
			return r, err
		}
	}
	if s.running != nil {
		for _, g := range s.running.Senders {
			r.sent = append(r.sent, g.Read())
		}
		for _, g := range s.running.Receivers {
			r.received = append(r.received, g.Read())
		}
	}
	return r, nil
}

// between returns the sample between two readings of a case.
func (s *session) between(d demand, before, after reading) sample {
	su, kind, length := s.setup, d.traffic.Kind, after.at.Sub(before.at)
	m := sample{
		agent: (after.agentCPU - before.agentCPU).Seconds() / length.Seconds(),
		used:  after.shared.usedSince(before.shared, length),
		steal: after.all.stealSince(before.all),

		counted: math.NaN(), said: math.NaN(),
	}
	add := func(metric, unit string, value float64) { m.figures = append(m.figures, figure{metric, unit, value}) }
	var sent, bits float64
	var answers load.Window // requests have one client
	for i, r := range after.sent {
		answers = r.Since(before.sent[i])
		sent += answers.Rate()
	}
	for i, r := range after.received {
		w := r.Since(before.received[i])
		m.received += w.Rate()
		bits += w.BitRate()
	}
	if s.victim != nil {
		w := after.victim.Since(before.victim)
		// A victim without any work has an infinite penalty, which no table can
		// show. So it counts as one unit of work.
		m.work = max(w.Rate(), 1/w.Seconds)
		if su.service != "" {
			m.figures = served(w, after.retransmitted-before.retransmitted)
		}
		add(VictimCPU, "1", (after.victimCPU-before.victimCPU).Seconds()/length.Seconds())
	}
	if su.service != "" {
		add(CPUUsed, "1", m.used)
		if kind != "" {
			add(Received, "1/s", m.received)
		}
		return m
	}
	if before.net != nil && after.net != nil {
		n := after.net.After(*before.net)
		if n.Taken.After(n.Since) {
			m.said = slowedBetween(before.net, after.net, s.rig.Victim().Name)
			if kind != "" {
				m.figures = append(m.figures, accountFigures(n, d.traffic)...)
			}
		}
		if s.victim != nil {
			m.counted = s.log.rate(before.net.Taken, after.net.Taken)
		}
		if s.stopwatch != nil {
			m.figures = append(m.figures, s.exactness(n, before, after)...)
		}
	}
	if su.alone && kind == "" {
		add(AgentCPU, "1", m.agent)
		add(AgentMemory, "B", after.agentMemory)
		return m
	}
	if su.alone || d.long > 0 {
		add(CPUUsed, "1", m.used)
	}
	switch kind {
	case rig.UDP, rig.Overrun:
		add(Sent, "1/s", sent)
		add(Received, "1/s", m.received)
	case rig.TCP:
		add(Received, "bit/s", bits)
	case rig.UDPRR, rig.TCPRR:
		add(Requests, "1/s", sent)
		add(P50, "s", answers.Latency(0.5).Seconds())
		add(P99, "s", answers.Latency(0.99).Seconds())
	}
	return m
}

// rateFor finds the rate of traffic that uses a fraction busy of the shared CPU, without
// protection and without quotas.
func (s *session) rateFor(ctx context.Context, t rig.Traffic, busy float64) (uint64, error) {
	return findRate(busy, func(rate uint64) (float64, error) {
		m, err := s.measure(ctx, demand{traffic: t, rate: rate, lift: true}, false)
		return m.used, err
	})
}

var errNoRate = errors.New("no rate keeps the shared CPU busy")

// findRate finds the packets per second that use a fraction busy of a CPU, within 0.02. The
// cost per packet falls as the rate grows, so it takes several steps.
func findRate(busy float64, used func(rate uint64) (float64, error)) (uint64, error) {
	const off, steps = 0.02, 12
	var seen []string
	for rate, i := uint64(50_000), 0; i < steps; i++ {
		u, err := used(rate)
		if err != nil {
			return 0, err
		}
		if math.Abs(u-busy) <= off {
			return rate, nil
		}
		if u <= 0 {
			return 0, errors.New("the shared CPU is idle under traffic")
		}
		seen = append(seen, fmt.Sprintf("%d/s: %.2f", rate, u))
		rate = uint64(min(max(float64(rate)*min(max(busy/u, 0.5), 2), 1000), 2e6))
	}
	return 0, fmt.Errorf("%w by %.2f: %s", errNoRate, busy, strings.Join(seen, ", "))
}
