package bench

import (
	"context"
	"errors"
	"fmt"
	"math"
	"path"
	"slices"
	"time"

	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/lab/load"
	"github.com/fairlead-project/fairlead/lab/report"
	"github.com/fairlead-project/fairlead/lab/rig"
	"github.com/fairlead-project/fairlead/lab/sandbox"
)

// The metrics of the latency experiment.
const (
	RawBias       = "raw bias p50"       // of round trips against stamps at the uplink, in seconds
	Bias          = "corrected bias p50" // the same without the host's part, as an absolute value
	SignedBias    = "corrected bias p50, signed"
	WorstBias     = "corrected bias p100" // the worst
	Covered       = "coverage"            // fraction of the packets that were measured from end to end
	Perturbation  = "added to a round trip"
	ofRoundTrip   = "round trip p50"
	Rate          = "packets"
	withRecords   = "records" // a peer: on, and each packet recorded
	withTruth     = "checked" // another: the same, with stamps at the uplink in addition
	withNothing   = "empty"   // another: off, with programs that do nothing at the same hooks
	withOthers    = "others"  // another: the agent measures another container
	withFtrace    = "ftrace"  // another: off, with the kernel's tracer recording the same events
	AgainstFtrace = "added to a round trip, beyond ftrace"
	PassedOver    = "passed over" // fraction of the packets that were not measured by choice
	latencyEach   = 500           // requests a second, while round trips are compared
	latencyPort   = 9001
	latencyFlood  = 9002
	latencyPolicy = "latency"
)

// latencyCase is one case of the latency experiment.
type latencyCase struct {
	name      string
	neighbour []string // what the neighbour sends beside it; nil: nothing
	flood     bool     // the case measures throughput
	crowd     bool     // its rig has many neighbours that flood-ping; see latencycrowd.go
	covers    string   // of a crowd: the traffic for a measurement of coverage; "": round trips
	tables    bool     // of a crowd: coverage is measured with tables of several sizes
}

// arms are the arms of the case, which are measured in turns. The independent stamps at the
// uplink have an arm of their own, because they add to the cost of a packet.
func (c latencyCase) arms() []string {
	switch {
	case c.crowd:
		return []string{withTruth}
	case c.flood:
		return []string{"off", withNothing, "on", withRecords, withFtrace}
	}
	return []string{"off", withNothing, withOthers, "on", withRecords, withFtrace, withTruth}
}

// rounds is the number of rounds, if the case needs more: differences in throughput are
// small.
func (c latencyCase) rounds(of int) int {
	if c.flood {
		return 2 * of
	}
	return of
}

// latencyCatalogue holds every case (MACE, figures of RTT bias, coverage and perturbation).
func latencyCatalogue() []latencyCase {
	return []latencyCase{
		{name: "idle host"},
		{name: "beside 20k/s", neighbour: []string{"udp-send", "--size", "64"}},
		{name: "flood", flood: true},
		{name: "flood pings", crowd: true},
		{name: "ping beside 100 flood pings", crowd: true, covers: api.LatencyICMP},
		{name: "UDP beside 100 flood pings", crowd: true, covers: api.LatencyUDP},
		{name: "TCP beside 100 flood pings", crowd: true, covers: api.LatencyTCP},
		{name: "bulk TCP beside 100 flood pings", crowd: true, covers: bulkTCP},
		{name: "tables beside 100 flood pings", crowd: true, covers: api.LatencyUDP, tables: true},
	}
}

// LatencyCases returns the names of the cases that Latency would measure. Error: ErrNoCase.
func LatencyCases(o Options) ([]string, error) {
	_, names, err := o.latencyCases()
	return names, err
}

func (o Options) latencyCases() ([]latencyCase, []string, error) {
	return choose(o, latencyCatalogue(), func(c *latencyCase, chosen func(string, bool) bool) bool { return chosen(c.name, true) })
}

// Latency runs the latency experiment: round trips from a container, raw, corrected and at
// the uplink, and the cost of the measurement. It needs root and two CPUs. When ctx ends,
// Latency removes the rig before it returns.
func Latency(ctx context.Context, o Options) (_ *report.Report, err error) {
	e := o.experiment("latency",
		usual{rounds: 5, settle: 300 * time.Millisecond, take: 2 * time.Second},
		usual{rounds: 2, settle: 150 * time.Millisecond, take: 500 * time.Millisecond})
	all, _, err := o.latencyCases()
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
	for _, c := range all {
		e.total += c.rounds(e.report.Rounds) * len(c.arms())
	}
	for _, crowd := range []bool{false, true} {
		cases := slices.DeleteFunc(slices.Clone(all), func(c latencyCase) bool { return c.crowd != crowd })
		if len(cases) == 0 {
			continue
		}
		if err := latencyCases(ctx, e, cases, o.Quick); err != nil {
			return nil, fmt.Errorf("latency experiment, %w", err)
		}
	}
	e.report.Env.Notes = e.notes
	return e.report, nil
}

// latencyCases measures the cases of one rig.
func latencyCases(ctx context.Context, e *experiment, cases []latencyCase, quick bool) (err error) {
	s, err := newLatencySession(ctx, e, cases[0].crowd, quick)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, s.close()) }()
	for _, c := range cases {
		if err := s.begin(ctx, c); err != nil {
			return fmt.Errorf("%s: %w", c.name, err)
		}
		for round := range c.rounds(e.report.Rounds) {
			off := math.NaN()
			s.trips = make(map[string]float64)
			for _, arm := range c.arms() { // off comes first, as the baseline of the others
				e.say(fmt.Sprintf("round %d: %s, %s", round+1, c.name, arm))
				measure := func() error { return s.measure(ctx, c, arm, &off) }
				switch {
				case c.tables:
					measure = func() error { return s.tables(ctx, c) }
				case c.covers != "":
					measure = func() error { return s.cover(ctx, c) }
				case c.crowd:
					measure = func() error { return s.steps(ctx, c) }
				}
				if err := measure(); err != nil {
					return fmt.Errorf("%s, %s: %w", c.name, arm, err)
				}
			}
			if by, measured := s.trips[withFtrace]; measured {
				e.report.Add(c.name, AgainstFtrace, "s", true, s.trips["on"]-by)
				e.report.AddPeer(c.name, AgainstFtrace, "s", withRecords, s.trips[withRecords]-by)
			}
		}
		if err := s.end(); err != nil {
			return err
		}
	}
	if s.guard.missing != "" {
		e.notes = append(e.notes, "fairlead measured nothing: latency is "+s.guard.missing)
	}
	return nil
}

// newLatencySession builds a rig, and starts its agent.
func newLatencySession(ctx context.Context, e *experiment, crowd, quick bool) (_ *latencySession, err error) {
	cfg := rig.Config{Path: rig.NIC, Containers: []rig.Container{{Name: "one"}, {Name: "neighbour"}}}
	if crowd {
		cfg.Containers = crowdOf(mostPings)
	}
	s := &latencySession{experiment: e, quick: quick}
	if s.rig, err = rig.New(cfg); err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, s.close())
		}
	}()
	s.measured = s.rig.Prefix() + "*"
	if crowd {
		s.measured = s.rig.Prefix() + "one"
		if err := s.startPings(); err != nil {
			return nil, err
		}
	}
	if s.guard, err = newGuard(ctx, s.rig, "", "", 100*gbit); err != nil {
		return nil, err
	}
	s.guard.feature = latencyPolicy
	return s, nil
}

// latencySession is a rig with an agent, and the load of one case.
type latencySession struct {
	*experiment
	rig    *rig.Rig
	guard  *guard
	load   []*rig.Generator
	client *rig.Generator // the source of the measured round trips or packets; nil: ping
	server *rig.Generator

	quick    bool
	measured string // names of the measured containers
	inForce  string // the names in the policy that is in force
	trips    map[string]float64
	crowd    []*sandbox.Process // flood pings, one in each neighbour
	ping     *sandbox.Process   // the ping of the container itself
}

func (s *latencySession) close() error {
	errs := []error{s.end()}
	for _, p := range s.crowd {
		p.Kill()
	}
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
	s.load, s.client, s.server = nil, nil, nil
	if s.ping != nil {
		s.ping.Kill()
		s.ping = nil
	}
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
	if c.covers != "" {
		return s.traffic(ctx, c.covers, start(&s.server), start(&s.client))
	}
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

// policy switches the measurement on for the containers that match a pattern, and off for all
// others; "" is none.
func (s *latencySession) policy(ctx context.Context, names string) error {
	before, text := s.inForce, ""
	if names == before {
		return nil
	}
	if names != "" {
		text = fmt.Sprintf("match: {name: %q}\nset: {latency: on}\n", names)
	}
	err := s.guard.policy(ctx, text, func(c api.Container) (taken, changed bool) {
		was, _ := path.Match(before, c.Name)
		is, _ := path.Match(names, c.Name)
		asked := slices.ContainsFunc(c.Policy, func(p api.Setting) bool {
			return p.Key == "fairlead.latency" && p.Value == "on"
		})
		return asked == is, is != was
	})
	if err == nil {
		s.inForce = names
	}
	return err
}

// measure adds the figures of one arm. off is the round trip without any measurement.
func (s *latencySession) measure(ctx context.Context, c latencyCase, arm string, off *float64) error {
	s.client.SetRate(0)
	names := s.measured
	switch arm {
	case "off", withNothing, withFtrace:
		names = ""
	case withOthers:
		names = s.rig.Prefix() + "neighbour"
	}
	if err := s.policy(ctx, names); err != nil {
		return err
	}
	switch arm {
	case withNothing:
		hooks, err := rig.AttachNothing()
		if err != nil {
			return err
		}
		defer hooks.Close()
	case withFtrace:
		f, err := rig.NewFtrace("net/net_dev_queue", "net/net_dev_start_xmit", "net/napi_gro_receive_entry", "net/netif_rx", "net/netif_receive_skb")
		if err != nil {
			return err
		}
		defer f.Close()
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
	if arm == withTruth {
		return s.check(ctx, c)
	}
	if arm == withRecords {
		if _, err := s.guard.client.LatencyRecords(ctx, name, api.LatencyFilter{}, 0); err != nil {
			return s.guard.explain(err)
		}
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
		s.trips[arm] = trip
	}
	return nil
}

// check adds the bias of the round trips.
func (s *latencySession) check(ctx context.Context, c latencyCase) error {
	raw, corrected, err := s.bias(ctx)
	if err != nil {
		return err
	}
	s.report.AddPeer(c.name, SignedBias, "s", withTruth, report.Median(corrected))
	for i := range corrected {
		corrected[i] = math.Abs(corrected[i])
	}
	s.report.AddPeer(c.name, RawBias, "s", withTruth, report.Median(raw))
	s.report.AddPeer(c.name, Bias, "s", withTruth, report.Median(corrected))
	s.report.AddPeer(c.name, WorstBias, "s", withTruth, slices.Max(corrected))
	return nil
}

// LatencyHeadline returns the result in one sentence.
func LatencyHeadline(r *report.Report) string {
	if c, ok := r.Find("flood pings", worstStep); ok {
		return fmt.Sprintf("Beside up to %d flood pings round trips from a container are up to %.1f us too long, and within %.1f us once corrected",
			mostPings, 1e6*report.Median(c.Off), 1e6*report.Median(c.On))
	}
	return "Round trips from a container, and what measuring them costs"
}

// LatencyPlots returns the plots for a report of Latency.
func LatencyPlots(r *report.Report, _ Options) []report.Plot {
	bias := report.Plot{
		Title: "RTT bias", Metric: stepBias,
		Note: "By how much a round trip is longer than at the uplink, by how many neighbours flood-ping: raw and corrected.",
	}
	for _, n := range []int{0, 20, 40, 60, 80, mostPings} { // more cannot be read
		bias.Groups = append(bias.Groups, report.Group{Label: fmt.Sprint(n), Case: stepName(n)})
	}
	added := report.Plot{Title: "Perturbation", Metric: Perturbation, Note: "What a round trip takes longer than while nothing is attached."}
	covered := report.Plot{Title: "Coverage beside 100 flood pings", Metric: Covered, Ideal: 1}
	tables := report.Plot{Title: "Coverage by the size of the table", Metric: Covered, Ideal: 1, Note: "Of UDP requests beside 100 flood pings, by how many packets under way have room."}
	for _, c := range latencyCatalogue() {
		switch {
		case c.tables:
			for _, n := range tableSizes(false) {
				tables.Groups = append(tables.Groups, report.Group{Label: fmt.Sprint(n), Case: tableName(n)})
			}
		case c.covers != "":
			covered.Groups = append(covered.Groups, report.Group{Label: c.covers, Case: c.name})
		case !c.crowd && !c.flood:
			added.Groups = append(added.Groups, report.Group{Label: c.name, Case: c.name})
		}
	}
	return measured(r, []report.Plot{bias, added, covered, tables})
}
