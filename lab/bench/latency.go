package bench

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"time"

	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/kernel/bpf"
	"github.com/fairlead-project/fairlead/lab/load"
	"github.com/fairlead-project/fairlead/lab/report"
	"github.com/fairlead-project/fairlead/lab/rig"
)

// The metrics of the latency experiment.
const (
	RawBias       = "raw bias p50"        // of round trips against stamps at the uplink, in seconds
	Bias          = "corrected bias p50"  // the same without the host's part, as an absolute value
	WorstBias     = "corrected bias p100" // the worst
	Covered       = "coverage"            // fraction of packets that are measured from end to end
	Perturbation  = "added to a round trip"
	ofRoundTrip   = "round trip p50"
	Rate          = "packets"
	AgainstFtrace = "added to a round trip, beyond ftrace"
	PassedOver    = "passed over" // fraction of packets that are skipped on purpose
)

// The arms of the latency experiment, beside armOff and armOn.
const (
	withRecords arm = "records" // on, and each packet recorded
	withTruth   arm = "checked" // records, with stamps at the uplink in addition
	withFtrace  arm = "ftrace"  // off, but the kernel's tracer records the same events
)

const (
	latencyEach   = 500 // requests a second, while round trips are compared
	latencyPort   = 9001
	latencyFlood  = 9002
	latencyPolicy = "latency"
)

// latencyCase is one case of the latency experiment.
type latencyCase struct {
	name      string
	neighbour []string // arguments of the neighbour's generator; nil: none
	flood     bool     // the case measures throughput
	crowd     bool     // its rig has many neighbours that flood-ping; see latencycrowd.go
	covers    string   // of a crowd: the traffic for a measurement of coverage; "": round trips
}

// arms returns the arms of the case, which are measured in turns. The independent stamps at
// the uplink are a separate arm, because they add to the cost of a packet.
func (c latencyCase) arms() []arm {
	switch {
	case c.covers != "":
		return []arm{armOn}
	case c.crowd:
		return []arm{withTruth}
	case c.flood:
		return []arm{armOff, armOn, withRecords, withFtrace}
	}
	return []arm{armOff, armOn, withRecords, withFtrace, withTruth}
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
	}
}

// latencyPlans measure round trips from a container, raw, corrected and at the uplink, and the cost
// of the measurement.
func latencyPlans(e *experiment, _ Options) (plans []plan) {
	for _, crowd := range []bool{false, true} {
		s := &latencySession{bed: bed{experiment: e}, crowded: crowd}
		p := plan{name: map[bool]string{false: "two containers", true: "a crowd"}[crowd], rigged: s}
		for _, c := range latencyCatalogue() {
			if c.crowd != crowd {
				continue
			}
			rounds := e.report.Rounds
			if c.flood {
				rounds *= 2 // differences in throughput are small
			}
			p.series = append(p.series, series{
				rounds: rounds,
				begin:  func(ctx context.Context) error { return s.begin(ctx, c) },
				// Off is the baseline, and records go on for a while after they were asked for.
				inOrder: true,
				cases: []armed{{name: c.name, quick: true, arms: c.arms(), measure: func(ctx context.Context, a arm) ([]figure, error) {
					return s.measure(ctx, c, a)
				}}},
				compare: func() { s.compare(c) },
				end:     s.end,
			})
		}
		plans = append(plans, p)
	}
	return plans
}

// compare adds the time that the measurement adds to a round trip beyond the kernel's own tracer.
func (s *latencySession) compare(c latencyCase) {
	if by, measured := s.trips[withFtrace]; measured {
		for _, a := range []arm{armOn, withRecords} {
			s.add(c.name, a, figure{AgainstFtrace, "s", s.trips[a] - by})
		}
	}
	clear(s.trips)
}

// build builds the rig, and starts its agent.
func (s *latencySession) build(ctx context.Context) error {
	cfg := rig.Config{Path: rig.NIC, Containers: []rig.Container{{Name: "one"}, {Name: "neighbour"}}}
	if s.crowded {
		cfg.Containers = crowdOf(mostPings)
	}
	if err := s.raise(ctx, cfg, latencyPolicy, "", 100*gbit); err != nil {
		return err
	}
	s.trips, s.measured = make(map[arm]float64), "*"
	if s.crowded {
		s.measured = "one"
		return s.startPings()
	}
	return nil
}

// latencySession is a rig with an agent, and the load of one case.
type latencySession struct {
	bed
	client *rig.Generator // the source of the measured round trips or packets; nil: ping
	server *rig.Generator

	crowded  bool             // many neighbours flood-ping
	measured string           // pattern of the measured containers' names
	trips    map[arm]float64  // of the round so far
	crowd    []*rig.Generator // flood pings, one in each neighbour
	ping     *rig.Generator   // the ping of the container itself
}

func (s *latencySession) close() error {
	return errors.Join(s.end(), s.leave())
}

func (s *latencySession) end() error {
	err := errors.Join(s.bed.end(), rig.Stop(s.ping))
	s.client, s.server, s.ping = nil, nil, nil
	return err
}

// begin starts the load of a case, paused; for ping there is none.
func (s *latencySession) begin(ctx context.Context, c latencyCase) error {
	one, neighbour, outside := s.rig.Boxes[0], s.rig.Boxes[1], s.rig.Outside
	recv, send := []string{"rr-server", "--proto", "udp"}, []string{"rr-client", "--proto", "udp", "--size", "64", "--conns", "1"}
	at, to := outside, s.rig.Uplink(latencyPort)
	switch {
	case c.covers == api.LatencyICMP:
		return nil
	case c.covers == bulkTCP:
		recv, send = []string{"tcp-recv"}, []string{"tcp-send"}
	case c.covers != "":
		recv[2], send[2] = c.covers, c.covers
	case c.flood: // a softirq for each packet, from container to container
		recv, send = []string{"udp-recv"}, []string{"udp-send", "--size", "64"}
		at, to = neighbour, s.rig.At(1, latencyPort)
	}
	var err error
	if s.server, err = s.rig.Start(ctx, at, append(recv, "--listen", fmt.Sprintf(":%d", latencyPort))...); err != nil {
		return err
	}
	if s.client, err = s.rig.Start(ctx, one, append(send, "--to", to, "--rate", "0")...); err != nil || c.neighbour == nil {
		return err
	}
	if _, err = s.rig.Start(ctx, outside, "udp-recv", "--listen", fmt.Sprintf(":%d", latencyFlood)); err != nil {
		return err
	}
	_, err = s.rig.Start(ctx, neighbour, append(slices.Clone(c.neighbour), "--to", s.rig.Uplink(latencyFlood), "--rate", "20000")...)
	return err
}

// policy switches the measurement on for the measured containers, or off.
func (s *latencySession) policy(ctx context.Context, on bool) error {
	if !on {
		return s.guard.apply(ctx, nil)
	}
	return s.guard.apply(ctx, rules{s.measured: "latency: on"})
}

// measure measures one arm of a case. A crowd adds figures under further case names.
func (s *latencySession) measure(ctx context.Context, c latencyCase, a arm) ([]figure, error) {
	switch {
	case c.covers != "":
		return s.cover(ctx, c)
	case c.crowd:
		return nil, s.steps(ctx, c)
	}
	s.client.SetRate(0)
	if err := s.policy(ctx, a != armOff && a != withFtrace); err != nil {
		return nil, err
	}
	name := s.rig.Prefix() + "one"
	switch a {
	case withTruth:
		raw, corrected, err := s.bias(ctx)
		if err != nil {
			return nil, err
		}
		return []figure{{RawBias, "s", report.Median(raw)}, {Bias, "s", report.Median(corrected)}, {WorstBias, "s", slices.Max(corrected)}}, nil
	case withFtrace:
		f, err := rig.NewFtrace("net/net_dev_queue", "net/net_dev_start_xmit", "net/napi_gro_receive_entry", "net/netif_rx", "net/netif_receive_skb")
		if err != nil {
			return nil, err
		}
		defer f.Close()
	case withRecords:
		if _, err := s.guard.client.LatencyRecords(ctx, name, api.LatencyFilter{}, 0); err != nil {
			return nil, s.guard.explain(err)
		}
	}
	rate, of := uint64(latencyEach), s.client
	if c.flood {
		rate, of = load.Flood, s.server
	}
	s.client.SetRate(rate)
	sleep(ctx, s.settle)
	before := of.Read()
	var seen api.Latency
	var err error
	if a == armOn && !c.flood {
		seen, err = s.guard.client.Latency(ctx, name, s.take) // answers after that time
	} else {
		sleep(ctx, s.take)
	}
	if err != nil {
		return nil, s.guard.explain(err)
	}
	w := of.Read().Since(before)
	s.client.SetRate(0)
	if c.flood {
		return []figure{{Rate, "1/s", w.Rate()}}, nil
	}
	var figures []figure
	if ratio, ok := coverageOf(seen, "").Ratio(); ok {
		figures = append(figures, figure{Covered, "1", ratio})
	}
	s.trips[a] = w.Latency(0.5).Seconds()
	figures = append(figures, figure{ofRoundTrip, "s", s.trips[a]})
	if a != armOff {
		figures = append(figures, figure{Perturbation, "s", s.trips[a] - s.trips[armOff]})
	}
	return figures, nil
}

// coverageOf adds up the coverage of all containers, for one protocol; "": all packets.
func coverageOf(seen api.Latency, protocol string) (sum api.LatencyCoverage) {
	for _, d := range seen.Containers {
		for _, p := range append(d.Protocols, api.LatencyProtocol{LatencyTimes: d.LatencyTimes}) {
			if p.Protocol == protocol {
				sum.Seen += p.Coverage.Seen
				sum.Matched += p.Coverage.Matched
				sum.Local += p.Coverage.Local
				sum.Unsampled += p.Coverage.Unsampled
			}
		}
	}
	return sum
}

// bias makes round trips. It returns the raw difference between each trip and the same trip
// at the NIC, and the absolute corrected difference.
func (s *latencySession) bias(ctx context.Context) (raw, corrected []float64, err error) {
	name, filter := s.rig.Prefix()+"one", api.LatencyFilter{Port: latencyPort}
	asked, err := s.guard.client.LatencyRecords(ctx, name, filter, 0)
	if err != nil {
		return nil, nil, s.guard.explain(err)
	}
	truth, err := s.rig.Tap(latencyPort)
	if err != nil {
		return nil, nil, err
	}
	defer truth.Close()
	s.client.SetRate(latencyEach)
	sleep(ctx, s.settle+s.take)
	s.client.SetRate(0)
	filter.After = asked.Next
	got, err := s.guard.client.LatencyRecords(ctx, name, filter, time.Second)
	if err != nil {
		return nil, nil, s.guard.explain(err)
	}
	wire, err := truth.Trips()
	if err != nil {
		return nil, nil, err
	}
	trips, _ := api.LatencyTrips(got.Records)
	raw, corrected, err = wireBias(trips, wire, bpf.Zero())
	for i := range corrected {
		corrected[i] = math.Abs(corrected[i])
	}
	return raw, corrected, err
}

// wireBias returns the differences between round trips and the same trips at the NIC, in
// seconds, raw and corrected. wire are the trips at the NIC, in times since about zero.
// wireBias compares each trip with the one at the NIC that began closest to it, if that is
// near enough.
func wireBias(trips []api.LatencyTrip, wire []rig.Trip, zero time.Time) (raw, corrected []float64, err error) {
	const near = 500 * time.Microsecond
	zero = aligned(trips, wire, zero)
	next := 0
	for _, t := range trips {
		var off time.Duration
		if next, off = nearest(wire, next, t.Time.Sub(zero)); off > near {
			continue // the NIC has not seen this trip
		}
		took := (wire[next].Answered - wire[next].Asked).Seconds()
		raw, corrected = append(raw, t.Raw-took), append(corrected, t.Corrected-took)
	}
	if len(raw) < len(trips)/2 || len(raw) == 0 {
		return nil, nil, fmt.Errorf("of %d round trips %d were found at the NIC, which saw %d", len(trips), len(raw), len(wire))
	}
	return raw, corrected, nil
}

// nearest returns the trip at the NIC that began closest to a time, and the distance
// between the two. It searches from a trip that began earlier.
func nearest(wire []rig.Trip, from int, began time.Duration) (int, time.Duration) {
	if len(wire) == 0 {
		return from, time.Hour
	}
	off := func(i int) time.Duration { return (wire[i].Asked - began).Abs() }
	for from+1 < len(wire) && off(from+1) <= off(from) {
		from++
	}
	return from, off(from)
}

// aligned corrects zero. Two processes read their clocks separately, and requests may be closer
// together than the error of these readings. With the right zero, trips begin at the same times as
// the trips at the NIC. aligned tries several trips, because any trip may have been delayed between
// its two stamps.
func aligned(trips []api.LatencyTrip, wire []rig.Trip, zero time.Time) time.Time {
	const anchors, apart, far = 8, 5 * time.Millisecond, 20 * time.Microsecond
	best, least := zero, time.Duration(math.MaxInt64)
	for k := range min(anchors, len(trips)) {
		anchor := trips[k*len(trips)/anchors].Time
		for _, w := range wire {
			if (w.Asked - anchor.Sub(zero)).Abs() > apart {
				continue
			}
			try, next := anchor.Add(-w.Asked), 0
			var sum, off time.Duration
			for _, t := range trips {
				next, off = nearest(wire, next, t.Time.Sub(try))
				sum += min(off, far)
			}
			if sum < least {
				best, least = try, sum
			}
		}
	}
	return best
}
