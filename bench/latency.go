package bench

import (
	"context"
	"errors"
	"fmt"
	"math"
	"regexp"
	"slices"
	"time"

	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/bench/load"
	"github.com/fairlead-project/fairlead/bench/report"
	"github.com/fairlead-project/fairlead/bench/rig"
)

// The metrics of the latency experiment.
const (
	RawBias       = "raw bias p50"       // of round trips against stamps at the uplink, in seconds
	Bias          = "corrected bias p50" // of the same, with the host's part taken off; the size of the difference
	SignedBias    = "corrected bias p50, signed"
	WorstBias     = "corrected bias p100" // the worst
	Covered       = "coverage"            // part of the packets that were measured from end to end
	Perturbation  = "added to a round trip"
	ofRoundTrip   = "round trip p50"
	Rate          = "packets"
	withRecords   = "records" // a peer: on, and each packet recorded
	withTruth     = "checked" // another: the same, with stamps at the uplink beside
	withNothing   = "empty"   // another: off, with programs that do nothing at the same hooks
	latencyEach   = 500       // requests a second, while round trips are compared
	latencyPort   = 9001
	latencyFlood  = 9002
	latencyPolicy = "latency"
)

// latencyCase is one case of the latency experiment.
type latencyCase struct {
	name      string
	neighbour []string // what the neighbour sends beside it; nil: nothing
	flood     bool     // what is measured is how much gets through
}

// arms are those that a case is measured with, in turns. Stamps at the uplink cost
// each packet something themselves, and so are in one of their own.
func (c latencyCase) arms() []string {
	if c.flood {
		return []string{"off", withNothing, "on", withRecords}
	}
	return []string{"off", withNothing, "on", withRecords, withTruth}
}

// latencyCatalogue holds every case (MACE, figures of RTT bias, coverage and perturbation).
func latencyCatalogue() []latencyCase {
	return []latencyCase{
		{name: "idle host"},
		{name: "beside 20k/s", neighbour: []string{"udp-send", "--size", "64"}},
		{name: "flood", flood: true},
	}
}

// LatencyCases names the cases that Latency would measure. It matches ErrNoCase if
// there are none.
func LatencyCases(o Options) ([]string, error) {
	all, err := o.latencyCases()
	var names []string
	for _, c := range all {
		names = append(names, c.name)
	}
	return names, err
}

func (o Options) latencyCases() ([]latencyCase, error) {
	only, err := regexp.Compile(o.Only)
	if err != nil {
		return nil, err
	}
	all := slices.DeleteFunc(latencyCatalogue(), func(c latencyCase) bool { return !only.MatchString(c.name) })
	if len(all) == 0 {
		return nil, fmt.Errorf("%w: %q", ErrNoCase, o.Only)
	}
	return all, nil
}

// Latency runs the latency experiment: what round trips from a container are raw,
// corrected and at the uplink, and what measuring costs. It needs root and two CPUs.
// When ctx ends, what was built is removed before it returns.
func Latency(ctx context.Context, o Options) (_ *report.Report, err error) {
	e := &experiment{
		report:   &report.Report{Bench: "latency", Env: environment(o.Version, o.Quick), Rounds: 5},
		progress: o.Progress, settle: 300 * time.Millisecond, take: 2 * time.Second,
	}
	if o.Quick {
		e.settle, e.take, e.report.Rounds = 150*time.Millisecond, 500*time.Millisecond, 2
	}
	if o.Rounds > 0 {
		e.report.Rounds = o.Rounds
	}
	if o.Window > 0 {
		e.take = o.Window
	}
	all, err := o.latencyCases()
	if err != nil {
		return nil, err
	}
	release, err := only()
	if err != nil {
		return nil, err
	}
	defer release()
	if err := rig.Sweep(); err != nil {
		return nil, err
	}
	r, err := rig.New(rig.Config{Path: rig.NIC, Containers: []rig.Container{{Name: "one"}, {Name: "neighbour"}}})
	if err != nil {
		return nil, err
	}
	s := &latencySession{experiment: e, rig: r}
	defer func() { err = errors.Join(err, s.close()) }()
	if s.guard, err = newGuard(ctx, r, "", 100*gbit); err != nil {
		return nil, err
	}
	s.guard.feature = latencyPolicy
	for _, c := range all {
		e.total += e.report.Rounds * len(c.arms())
	}
	for _, c := range all {
		if err := s.begin(ctx, c); err != nil {
			return nil, fmt.Errorf("latency experiment, %s: %w", c.name, err)
		}
		for round := range e.report.Rounds {
			off := math.NaN()
			for _, arm := range c.arms() { // off comes first, as the others are held against it
				e.say(fmt.Sprintf("round %d: %s, %s", round+1, c.name, arm))
				if err := s.measure(ctx, c, arm, &off); err != nil {
					return nil, fmt.Errorf("latency experiment, %s, %s: %w", c.name, arm, err)
				}
			}
		}
		if err := s.end(); err != nil {
			return nil, err
		}
	}
	if s.guard.missing != "" {
		e.notes = append(e.notes, "fairlead measured nothing: latency is "+s.guard.missing)
	}
	e.report.Env.Notes = e.notes
	return e.report, nil
}

// latencySession is a rig with an agent, and the load of one case.
type latencySession struct {
	*experiment
	rig    *rig.Rig
	guard  *guard
	load   []*rig.Generator
	client *rig.Generator // whose round trips, or packets, are measured
	server *rig.Generator
}

func (s *latencySession) close() error {
	errs := []error{s.end()}
	if s.guard != nil {
		errs = append(errs, s.guard.stop())
	}
	return errors.Join(append(errs, s.rig.Close())...)
}

func (s *latencySession) end() error {
	var errs []error
	for _, g := range s.load {
		errs = append(errs, g.Stop())
	}
	s.load = nil
	return errors.Join(errs...)
}

// begin starts the load of a case, paused.
func (s *latencySession) begin(ctx context.Context, c latencyCase) error {
	start := func(g **rig.Generator) func(*rig.Generator, error) error {
		return func(started *rig.Generator, err error) error {
			if err == nil {
				*g = started
				s.load = append(s.load, started)
			}
			return err
		}
	}
	one, neighbour := s.rig.Boxes[0], s.rig.Boxes[1]
	var beside *rig.Generator
	if c.flood { // a softirq for each packet, from container to container
		return errors.Join(
			start(&s.server)(s.rig.Start(ctx, neighbour, "udp-recv", "--listen", fmt.Sprintf(":%d", latencyFlood))),
			start(&s.client)(s.rig.Start(ctx, one, "udp-send", "--size", "64", "--to", s.rig.At(1, latencyFlood), "--rate", "0")))
	}
	err := errors.Join(
		start(&s.server)(s.rig.Start(ctx, s.rig.Outside, "rr-server", "--proto", "udp", "--listen", fmt.Sprintf(":%d", latencyPort))),
		start(&s.client)(s.rig.Start(ctx, one, "rr-client", "--proto", "udp", "--size", "64", "--conns", "1", "--to", s.rig.Uplink(latencyPort), "--rate", "0")))
	if err == nil && c.neighbour != nil {
		err = errors.Join(
			start(&beside)(s.rig.Start(ctx, s.rig.Outside, "udp-recv", "--listen", fmt.Sprintf(":%d", latencyFlood))),
			start(&beside)(s.rig.Start(ctx, neighbour, append(slices.Clone(c.neighbour), "--to", s.rig.Uplink(latencyFlood), "--rate", "20000")...)))
	}
	return err
}

// policy has the container measured, or not.
func (s *latencySession) policy(ctx context.Context, on bool) error {
	if s.guard.on == on {
		return nil
	}
	text := ""
	if on {
		text = fmt.Sprintf("match: {name: %q}\nset: {latency: on}\n", s.rig.Prefix()+"*")
	}
	return s.guard.policy(ctx, text, func(c api.Container) (taken, changed bool) {
		asked := slices.ContainsFunc(c.Policy, func(p api.Setting) bool {
			return p.Key == "fairlead.latency" && p.Value == "on"
		})
		return asked == on, true
	})
}

// measure adds the figures of one arm. off is the round trip without any.
func (s *latencySession) measure(ctx context.Context, c latencyCase, arm string, off *float64) error {
	s.client.SetRate(0)
	if err := s.policy(ctx, arm != "off" && arm != withNothing); err != nil {
		return err
	}
	if arm == withNothing {
		hooks, err := rig.AttachNothing()
		if err != nil {
			return err
		}
		defer hooks.Close()
	}
	add := func(metric, unit string, value float64) {
		switch arm {
		case "off", "on":
			s.report.Add(c.name, metric, unit, arm == "on", value)
		default:
			s.report.AddPeer(c.name, metric, unit, arm, value)
		}
	}
	name := s.rig.Prefix() + "one"
	rate := uint64(latencyEach)
	if c.flood {
		rate = load.Flood
	}
	var asked api.LatencyRecords
	var truth *rig.Tap
	var err error
	if arm == withRecords || arm == withTruth {
		if asked, err = s.guard.client.LatencyRecords(ctx, name, api.LatencyFilter{}, 0); err != nil {
			return s.guard.explain(err)
		}
	}
	if arm == withTruth {
		if truth, err = s.rig.Tap(latencyPort); err != nil {
			return err
		}
		defer truth.Close()
	}
	s.client.SetRate(rate)
	if err := sleep(ctx, s.settle); err != nil {
		return err
	}
	of := s.client
	if c.flood {
		of = s.server
	}
	before := of.Read()
	var coverage chan error
	var seen api.Latency
	if arm == "on" && !c.flood {
		coverage = make(chan error, 1)
		go func() {
			var err error
			seen, err = s.guard.client.Latency(ctx, name, s.take)
			coverage <- err
		}()
	}
	if err := sleep(ctx, s.take); err != nil {
		return err
	}
	w := of.Read().Since(before)
	s.client.SetRate(0)
	if coverage != nil {
		if err := <-coverage; err != nil {
			return s.guard.explain(err)
		}
		var sum api.LatencyCoverage
		for _, d := range seen.Containers {
			sum.Seen += d.Coverage.Seen
			sum.Matched += d.Coverage.Matched
			sum.Local += d.Coverage.Local
			sum.Unsampled += d.Coverage.Unsampled
		}
		if ratio, ok := sum.Ratio(); ok {
			add(Covered, "1", ratio)
		}
	}
	if c.flood {
		add(Rate, "1/s", w.Rate())
		return nil
	}
	trip := w.Latency(0.5).Seconds()
	add(ofRoundTrip, "s", trip)
	if arm == "off" {
		*off = trip
	} else {
		add(Perturbation, "s", trip-*off)
	}
	if truth == nil {
		return nil
	}
	got, err := s.guard.client.LatencyRecords(ctx, name, api.LatencyFilter{After: asked.Next, Port: latencyPort}, time.Second)
	if err != nil {
		return s.guard.explain(err)
	}
	wire, err := truth.Trips()
	if err != nil {
		return err
	}
	zero, err := monotonicZero()
	if err != nil {
		return err
	}
	trips, _ := api.LatencyTrips(got.Records)
	raw, corrected, err := wireBias(trips, wire, zero)
	if err != nil {
		return err
	}
	add(RawBias, "s", report.Median(raw))
	add(SignedBias, "s", report.Median(corrected))
	for i := range corrected {
		corrected[i] = math.Abs(corrected[i])
	}
	add(Bias, "s", report.Median(corrected))
	add(WorstBias, "s", slices.Max(corrected))
	return nil
}

// LatencyHeadline says in a sentence what Latency found.
func LatencyHeadline(r *report.Report) string {
	c, ok := r.Find("idle host", Bias)
	raw, also := r.Find("idle host", RawBias)
	if !ok || !also {
		return "Round trips from a container, and what measuring them costs"
	}
	return fmt.Sprintf("Round trips from a container are %.1f us too long, and within %.1f us once corrected",
		1e6*report.Median(raw.Peers[withTruth]), 1e6*report.Median(c.Peers[withTruth]))
}

// LatencyPlots are the plots of Latency.
func LatencyPlots(*report.Report, Options) []report.Plot { return nil }
