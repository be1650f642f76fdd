package bench

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/fairlead-project/fairlead/lab/load"
	"github.com/fairlead-project/fairlead/lab/rig"
	"github.com/fairlead-project/fairlead/lab/sandbox"
)

// overlaySession is two hosts with an agent each, and the load of one case.
type overlaySession struct {
	*experiment
	setup  overlaySetup
	rig    *rig.Overlay
	guards [2]*guard
	// The servers of the current case, between the containers and between the hosts. Only one of
	// them has clients at a time.
	containers, hosts *overlayPair
	// lacking is why the short path has no effect in this rig; "" if it has.
	lacking string
}

// overlayPair is a server on the second host, and the place of its clients on the first.
type overlayPair struct {
	server *rig.Generator
	box    *sandbox.Box // of the clients
	to     string       // the destination of the clients
}

// build builds the hosts, and starts their agents.
func (s *overlaySession) build(ctx context.Context) (err error) {
	if s.rig, err = rig.NewOverlay(ctx, s.setup.path); err != nil {
		return err
	}
	for host, r := range s.rig.Hosts {
		if s.guards[host], err = newGuard(ctx, r, "", 0); err != nil {
			return err
		}
		s.guards[host].feature = "overlay"
	}
	// Only after switching it on is it known whether there is something to measure.
	if err := s.shorten(ctx, true); err != nil {
		return err
	}
	return s.shorten(ctx, false)
}

func (s *overlaySession) close() error {
	if s.rig == nil {
		return nil
	}
	errs := []error{s.end()}
	for _, g := range s.guards {
		if g != nil {
			errs = append(errs, g.stop())
		}
	}
	return errors.Join(append(errs, s.rig.Close())...)
}

// end ends the load of a case.
func (s *overlaySession) end() error { return s.rig.Hosts[1].Stop() }

// begin starts the servers of a case.
func (s *overlaySession) begin(ctx context.Context, c overlayCase) (err error) {
	client, server, at := s.rig.Hosts[0], s.rig.Hosts[1], s.rig.Addr(1)
	if c.named {
		at = rig.ServiceAddr
	}
	if s.containers, err = s.pair(ctx, c, client.Boxes[0], server.Boxes[0], at); err != nil {
		return err
	}
	s.hosts, err = s.pair(ctx, c, client.Node, server.Node, s.rig.HostAddr(1))
	return err
}

// pair starts a server.
func (s *overlaySession) pair(ctx context.Context, c overlayCase, client, server *sandbox.Box, at string) (_ *overlayPair, err error) {
	var listen, to []string
	for i := range max(c.ports, 1) {
		listen, to = append(listen, fmt.Sprintf(":%d", rig.PortNumber+i)), append(to, fmt.Sprintf("%s:%d", at, rig.PortNumber+i))
	}
	p := &overlayPair{box: client, to: strings.Join(to, ",")}
	if c.service != "" {
		p.server, err = s.rig.Hosts[1].Serve(ctx, c.service, server)
	} else {
		p.server, err = s.rig.Hosts[1].Start(ctx, server, append(slices.Clone(c.server), "--listen", strings.Join(listen, ","))...)
	}
	if err != nil {
		return nil, err
	}
	return p, nil
}

// shorten switches the short path on or off for the containers of both hosts, and waits until their
// agents report it.
func (s *overlaySession) shorten(ctx context.Context, on bool) error {
	if s.lacking != "" {
		return nil // the policy has no effect
	}
	var r rules
	if on {
		r = rules{"*": "overlay: on"}
	}
	for _, g := range s.guards {
		if err := g.apply(ctx, r); err != nil {
			return err
		}
		if g.missing != "" {
			s.lacking, s.missing = g.missing, g.missing
			return nil
		}
	}
	return nil
}

// measure returns the figures of one arm; the first is its rate. Without the short path there are
// none of armOn.
func (s *overlaySession) measure(ctx context.Context, c overlayCase, a arm) (_ []figure, err error) {
	if s.lacking != "" && a == armOn {
		return nil, nil
	}
	p := s.containers
	if a == armHost {
		p = s.hosts
	}
	if err := s.shorten(ctx, a == armOn); err != nil {
		return nil, err
	}
	// Each arm has its own connections, as a load that begins then has.
	client, err := s.rig.Hosts[0].Start(ctx, p.box, append(slices.Clone(c.client), "--to", p.to)...)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, client.Stop()) }()
	first := client.Read()
	if err := sleep(ctx, s.settle); err != nil {
		return nil, err
	}
	of := client
	if c.bulk {
		of = p.server
	}
	before, from, start := of.Read(), readCPUs(), time.Now()
	if err := sleep(ctx, s.take); err != nil {
		return nil, err
	}
	w, to, took := of.Read().Since(before), readCPUs(), time.Since(start)
	used := 0.0
	for cpu := range to {
		used += to[cpu].usedSince(from[cpu], took) * took.Seconds()
	}
	// A flow that has stalled since the beginning counts, too.
	return overlayFigures(c, w, used, client.Read().Since(first).Stalled), nil
}

// overlayFigures returns the figures of a window. used is the CPU time of the machine in seconds.
func overlayFigures(c overlayCase, w load.Window, used float64, stalled uint64) []figure {
	figures := []figure{{Requests, "1/s", w.Rate()}}
	n, spent := float64(w.Ops), RequestCPU
	if c.bulk {
		figures, n, spent = []figure{{Received, "bit/s", w.BitRate()}}, float64(w.Bytes), ByteCPU
	}
	if n > 0 {
		figures = append(figures, figure{spent, "s", used / n})
	}
	if c.bulk {
		return figures
	}
	return append(figures, figure{P50, "s", w.Latency(0.5).Seconds()}, figure{P99, "s", w.Latency(0.99).Seconds()},
		figure{StalledFlows, "1", float64(stalled)})
}

// readCPUs reads the CPUs of both hosts.
func readCPUs() [2]cpuTimes { return [2]cpuTimes{readCPU(rig.SharedCPU), readCPU(rig.SenderCPU)} }
