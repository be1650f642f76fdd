package bench

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os/exec"
	"slices"
	"time"

	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/lab/load"
	"github.com/fairlead-project/fairlead/lab/report"
	"github.com/fairlead-project/fairlead/lab/rig"
	"github.com/fairlead-project/fairlead/lab/sandbox"
)

// A crowd is a container beside many neighbours that flood-ping the outside (MACE,
// tests/run_bench.sh: 0 to 100 neighbours in steps of 10).
const (
	mostPings = 100
	bulkTCP   = "bulk" // the traffic that a case covers
)

// The metrics of the steps: off is raw, on is corrected. Each step is a case in the report.
// The median and the worst are over all steps.
const (
	stepBias   = "bias"
	medianStep = "bias, median step"
	worstStep  = "bias, worst step"
)

func stepName(pings int) string { return fmt.Sprintf("%d flood pings", pings) }

// pingSteps are the numbers of neighbours that ping at the same time.
func pingSteps(quick bool) (all []int) {
	if quick {
		return []int{0, 20, mostPings}
	}
	for n := 0; n <= mostPings; n += 10 {
		all = append(all, n)
	}
	return all
}

// crowdOf returns the measured container and n neighbours.
func crowdOf(n int) []rig.Container {
	all := []rig.Container{{Name: "one"}}
	for i := range n {
		all = append(all, rig.Container{Name: fmt.Sprintf("n%d", i+1)})
	}
	return all
}

// startPings starts a flood ping in each neighbour, stopped.
func (s *latencySession) startPings() error {
	for _, b := range s.rig.Neighbours() {
		p, err := s.startPing(b)
		if err != nil {
			return err
		}
		s.crowd = append(s.crowd, p)
	}
	return letRun(s.crowd, 0)
}

// startPing starts a ping that sends a request as soon as it has the last reply.
func (s *latencySession) startPing(in *sandbox.Box) (*rig.Generator, error) {
	busybox, err := exec.LookPath("busybox")
	if err != nil {
		return nil, fmt.Errorf("ping: %w", err)
	}
	outside, _, err := net.SplitHostPort(s.rig.Uplink(1))
	if err != nil {
		return nil, err
	}
	p, err := in.Start(exec.Command(busybox, "ping", "-A", "-q", outside), rig.SharedCPU)
	if err != nil {
		return nil, err
	}
	return &rig.Generator{Process: p}, nil
}

// steps adds the bias of round trips beside a growing number of pinging neighbours: the
// medians of each step, and the median and the worst of the medians.
func (s *latencySession) steps(ctx context.Context, c latencyCase) error {
	if err := s.policy(ctx, true); err != nil {
		return err
	}
	var raws, corrects []float64
	for _, n := range pingSteps(s.report.Env.Quick) {
		if err := letRun(s.crowd, n); err != nil {
			return err
		}
		raw, corrected, err := s.bias(ctx)
		switch {
		case ctx.Err() != nil:
			return ctx.Err()
		case err != nil:
			s.notes = append(s.notes, fmt.Sprintf("beside %d flood pings: %v", n, err))
			continue
		}
		before, after := report.Median(raw), report.Median(corrected)
		raws, corrects = append(raws, before), append(corrects, after)
		s.add(stepName(n), armOff, figure{stepBias, "s", before})
		s.add(stepName(n), armOn, figure{stepBias, "s", after})
	}
	if err := letRun(s.crowd, 0); err != nil || len(raws) == 0 {
		return err
	}
	s.add(c.name, armOff, figure{medianStep, "s", report.Median(raws)}, figure{worstStep, "s", slices.Max(raws)})
	s.add(c.name, armOn, figure{medianStep, "s", report.Median(corrects)}, figure{worstStep, "s", slices.Max(corrects)})
	return nil
}

// cover measures the coverage of one kind of traffic beside all pinging neighbours.
func (s *latencySession) cover(ctx context.Context, c latencyCase) (figures []figure, err error) {
	if err := errors.Join(s.policy(ctx, true), letRun(s.crowd, mostPings)); err != nil {
		return nil, err
	}
	switch {
	case s.client != nil:
		s.client.SetRate(load.Flood)
	case s.ping == nil:
		if s.ping, err = s.startPing(s.rig.Boxes[0]); err != nil {
			return nil, err
		}
	}
	sleep(ctx, s.settle)
	seen, err := s.guard.client.Latency(ctx, s.rig.Prefix()+"one", max(s.take, 100*time.Millisecond))
	if err != nil {
		return nil, s.guard.explain(err)
	}
	if s.client != nil {
		s.client.SetRate(0)
	}
	protocol := c.covers
	if protocol == bulkTCP {
		protocol = api.LatencyTCP
	}
	sum := coverageOf(seen, protocol)
	if ratio, ok := sum.Ratio(); ok {
		figures = append(figures, figure{Covered, "1", ratio})
	}
	if sum.Seen > 0 {
		figures = append(figures, figure{PassedOver, "1", float64(sum.Unsampled) / float64(sum.Seen)})
	}
	return figures, letRun(s.crowd, 0)
}
