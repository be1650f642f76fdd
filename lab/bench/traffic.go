package bench

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/fairlead-project/fairlead/lab/load"
	"github.com/fairlead-project/fairlead/lab/rig"
)

// The metrics of the traffic experiment, in addition to those of netcpu.
const (
	Total      = "received in all"
	ReceivedBy = "received by "   // followed by a container that has a rate
	ShareOf    = "share of "      // followed by a container: its fraction of the total
	Settling   = "settled after " // followed by a phase: the time until the shares are right
	P999       = "latency p99.9"
)

// armTC divides the link as an operator would by hand, beside armOff and armOn.
const armTC arm = "tc"

// trafficPlans measure how containers share an uplink: without any mechanism, with fairlead, and with
// tc by hand.
func trafficPlans(e *experiment, _ Options) (plans []plan) {
	for _, su := range trafficCatalogue() {
		s := &trafficSession{bed: bed{experiment: e}, setup: su}
		p := plan{name: su.name, engine: su.path == rig.Docker, rigged: s}
		for _, c := range su.cases {
			p.series = append(p.series, series{
				begin: func(ctx context.Context) error { return s.begin(ctx, c) },
				cases: []armed{{
					name: su.name + " " + c.name, quick: c.quick, needs: c.service(), arms: c.arms(),
					measure: func(ctx context.Context, a arm) ([]figure, error) { return s.measure(ctx, c, a) },
				}},
				end: s.end,
			})
		}
		plans = append(plans, p)
	}
	return plans
}

// arms returns the arms of a case.
func (c trafficCase) arms() []arm {
	if c.timed { // the other arms have nothing to time
		return []arm{armOn}
	}
	arms := offOn()
	if c.tc != nil {
		arms = append(arms, armTC)
	}
	return arms
}

// service returns the real server of a case; "" is none.
func (c trafficCase) service() (s rig.Service) {
	for _, snd := range c.send {
		s = cmp.Or(s, snd.service)
	}
	return s
}

// trafficSession is a rig with an agent, and the load of one case at a time.
type trafficSession struct {
	bed
	setup trafficSetup
	load  map[string]*flow // load of the case
	queue *rig.Queue       // at the NIC, if the case has requests; nil without

	calm undisturbed // requests of the case without neighbours, in the same arm
}

// flow is the traffic of one container.
type flow struct {
	sending
	from, to, server *rig.Generator // server runs the service
}

// build builds the rig, and starts its agent.
func (s *trafficSession) build(ctx context.Context) error {
	cfg := rig.Config{Path: s.setup.path}
	for _, name := range s.setup.boxes {
		cfg.Containers = append(cfg.Containers, rig.Container{Name: name, Quota: s.setup.quotas[name]})
	}
	return s.raise(ctx, cfg, "traffic", "", cmp.Or(s.setup.link, 100*gbit))
}

func (s *trafficSession) close() error {
	return errors.Join(s.end(), s.leave())
}

// begin starts the load of a case, paused.
func (s *trafficSession) begin(ctx context.Context, c trafficCase) (err error) {
	s.load = make(map[string]*flow)
	for i, snd := range c.send {
		const firstPort = 9001
		f := &flow{sending: snd}
		s.load[snd.name] = f
		if snd.service != "" {
			if f.server, err = s.rig.Serve(ctx, snd.service, s.rig.Boxes[s.setup.box(snd.name)]); err != nil {
				return err
			}
			continue
		}
		port := fmt.Sprint(firstPort + i)
		recv := map[string][]string{"tcp-send": {"tcp-recv"}, "udp-send": {"udp-recv", "--buffer", "8388608"}, "rr-client": {"rr-server", "--proto", "udp"}}[snd.args[0]]
		from, to, at := s.rig.Boxes[s.setup.box(snd.name)], s.rig.Outside, s.rig.Uplink(firstPort+i)
		switch {
		case s.setup.inward:
			from, to, at = to, from, s.rig.At(s.setup.box(snd.name), firstPort+i)
		case snd.to != "":
			to, at = s.rig.Boxes[s.setup.box(snd.to)], s.rig.At(s.setup.box(snd.to), firstPort+i)
		}
		if f.to, err = s.rig.Start(ctx, to, append(recv, "--listen", ":"+port)...); err != nil {
			return err
		}
		if f.from, err = s.rig.Start(ctx, from, append(slices.Clone(snd.args), "--to", at, "--rate", "0")...); err != nil {
			return err
		}
	}
	if c.probe == "" || s.setup.link == 0 || s.load[c.probe].service != "" {
		return nil
	}
	s.queue, err = s.rig.Queue(requestFrame(s.setup.path))
	return err
}

// end ends the load of a case.
func (s *trafficSession) end() error {
	err := s.bed.end()
	if s.queue != nil {
		err = errors.Join(err, s.queue.Close())
	}
	s.load, s.queue = nil, nil
	return err
}

// divide switches to an arm, with the load paused.
func (s *trafficSession) divide(ctx context.Context, c trafficCase, a arm) error {
	if err := s.guard.apply(ctx, nil); err != nil {
		return err
	}
	var classes []rig.Class
	if a == armTC {
		classes = c.tc
	}
	rate := s.setup.link
	switch {
	case a == armOn: // fairlead's root qdisc also limits the link rate
		rate = 0
	case rate == 0 && a == armTC:
		rate = 100 * gbit
	}
	if err := s.rig.Link(ctx, rate, classes); err != nil {
		return err
	}
	if a == armOn {
		return s.guard.apply(ctx, c.set)
	}
	return nil
}

// sends starts the named flows, and pauses the others.
func (s *trafficSession) sends(names []string) {
	for name, f := range s.load {
		if f.from == nil {
			continue // the client has not started yet
		}
		rate := uint64(0)
		if slices.Contains(names, name) {
			rate = f.rate
		}
		f.from.SetRate(rate)
	}
}

// measure measures a case with one arm.
func (s *trafficSession) measure(ctx context.Context, c trafficCase, a arm) ([]figure, error) {
	s.sends(nil)
	if err := s.divide(ctx, c, a); err != nil {
		return nil, err
	}
	for _, f := range s.load {
		if err := s.ask(ctx, f); err != nil {
			return nil, err
		}
	}
	defer s.sends(nil)
	if c.timed {
		return s.enforced(ctx, c)
	}
	if err := s.alone(ctx, c); err != nil {
		return nil, err
	}
	phases := c.phases
	if phases == nil {
		phases = []phase{{sends: slices.Collect(maps.Keys(s.load))}}
	}
	var out []figure
	for i, p := range phases {
		changed := make(chan error, 1)
		changed <- nil
		if p.set != nil && a == armOn {
			<-changed
			go func() { changed <- s.guard.apply(ctx, p.set) }() // while they send
		}
		if p.pause > 0 {
			s.sends(nil)
			sleep(ctx, p.pause)
		}
		s.sends(p.sends)
		if c.ceil > 0 {
			return s.bounded(ctx, c)
		}
		if i > 0 {
			out = append(out, figure{Settling + p.name, "s", s.settles(ctx, p).Seconds()})
		} else {
			s.warmUp(ctx, c)
		}
		if err := <-changed; err != nil {
			return nil, err
		}
		figures, err := s.window(ctx, c, p)
		if err != nil {
			return nil, err
		}
		out = append(out, figures...)
	}
	return out, nil
}

// warmUp waits before a measurement. A connection that was starved in the last arm sends
// again only after a time that doubles each time (RFC 6298, 5.5). This arm is not to blame,
// so warmUp waits as long as the connection may have been starved.
func (s *trafficSession) warmUp(ctx context.Context, c trafficCase) {
	if f := s.load[c.fixed]; f != nil {
		before := f.to.Read()
		for start := time.Now(); f.to.Read().Since(before).Bytes == 0 && ctx.Err() == nil && time.Since(start) < 2*(s.settle+s.take); {
			sleep(ctx, settleStep)
		}
	}
	sleep(ctx, s.settle)
}

func (s *trafficSession) read() map[string]load.Reading {
	out := make(map[string]load.Reading)
	for name, f := range s.load {
		g := f.to
		if f.service != "" || f.args[0] == "rr-client" { // the client measures the latency
			g = f.from
		}
		out[name] = g.Read()
	}
	return out
}

// bitRates returns the receive rate of each container between two readings, and their sum, in bit/s.
func bitRates(before, after map[string]load.Reading) (bits map[string]float64, total float64) {
	bits = make(map[string]float64)
	for name := range after {
		bits[name] = after[name].Since(before[name]).BitRate()
		total += bits[name]
	}
	return bits, total
}

// window measures one phase.
func (s *trafficSession) window(ctx context.Context, c trafficCase, p phase) ([]figure, error) {
	heard, err := s.listen(ctx)
	if err != nil {
		return nil, err
	}
	defer heard.close()
	before := s.read()
	again, err := s.retransmitted(c)
	if err != nil {
		return nil, err
	}
	var began rig.Waits
	if s.queue != nil {
		if began, err = s.queue.Read(); err != nil {
			return nil, err
		}
	}
	take := s.take
	if c.probe != "" {
		take *= 2 // for the 0.999-quantile
	}
	sleep(ctx, take)
	after := s.read()
	slowed, err := heard.figures(ctx, c, p)
	if err != nil {
		return nil, err
	}
	var waits []figure
	if s.queue != nil {
		ended, err := s.queue.Read()
		if err != nil {
			return nil, err
		}
		if waits, err = waited(ended, began, take); err != nil {
			return nil, err
		}
	}
	if err := s.rig.Ended(); err != nil {
		return nil, err
	}
	label := ""
	if p.name != "" {
		label = p.name + ": "
	}
	bits, total := bitRates(before, after)
	total -= bits[c.probe]
	delete(bits, c.probe)
	var out []figure
	switch {
	case c.probe == "":
	case s.load[c.probe].service != "":
		now, err := s.retransmitted(c)
		if err != nil {
			return nil, err
		}
		out = served(after[c.probe].Since(before[c.probe]), now-again)
	default:
		w := after[c.probe].Since(before[c.probe])
		took := func(q float64) float64 {
			if w.Ops == 0 { // no answer came in time
				return load.Lost.Seconds()
			}
			return w.Latency(q).Seconds()
		}
		out = append(out, figure{P50, "s", took(0.5)}, figure{P99, "s", took(0.99)}, figure{P999, "s", took(0.999)}, figure{Requests, "1/s", w.Rate()})
		out = append(out, waits...)
	}
	if c.fixed != "" {
		out = append(out, figure{ReceivedBy + c.fixed, "bit/s", bits[c.fixed]})
	}
	if len(bits) > 0 {
		out = append(out, figure{label + Total, "bit/s", total})
	}
	if total > 0 && len(bits) > 1 {
		for _, snd := range c.send {
			if _, counted := bits[snd.name]; counted && slices.Contains(p.sends, snd.name) && (p.name != "" || snd.name == c.send[len(c.send)-1].name) {
				out = append(out, figure{label + ShareOf + snd.name, "1", bits[snd.name] / total})
			}
		}
	}
	for _, f := range slowed {
		f.metric = label + f.metric
		out = append(out, f)
	}
	return out, nil
}
