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

// The metrics of the overlay experiment, in addition to those of netcpu.
const (
	// OfHost is the rate of a round divided by that of host networking in the same round.
	OfHost = "of host networking"
	// RequestCPU and ByteCPU are the CPU time of both hosts for a request and for a byte, by
	// proc_stat(5).
	RequestCPU = "CPU per request"
	ByteCPU    = "CPU per byte"
	// StalledFlows is the number of flows that got no answer for a second.
	StalledFlows = "stalled flows"
)

// armHost is the same load between the hosts' own addresses, beside armOff and armOn.
const armHost arm = "host"

// overlayPlans measure containers on two hosts that talk over an overlay network, without and with
// the short path, and compare them with host networking over the same wire.
func overlayPlans(e *experiment, _ Options) (plans []plan) {
	for _, su := range overlayCatalogue() {
		s := &overlaySession{experiment: e, setup: su}
		p := plan{name: string(su.path), engine: su.path == rig.Swarm, rigged: s}
		for _, c := range su.cases {
			name, rates := su.caseName(c), make(map[arm]float64)
			measure := func(ctx context.Context, a arm) ([]figure, error) {
				figures, err := s.measure(ctx, c, a)
				if len(figures) > 0 {
					rates[a] = figures[0].value
				}
				return figures, err
			}
			compare := func() {
				for _, a := range offOn() {
					if rate, ok := rates[a]; ok && rates[armHost] > 0 {
						e.add(name, a, figure{OfHost, "1", rate / rates[armHost]})
					}
				}
				clear(rates)
			}
			p.series = append(p.series, series{
				begin:   func(ctx context.Context) error { return s.begin(ctx, c) },
				cases:   []armed{{name: name, quick: c.quick, needs: c.service, arms: append(offOn(), armHost), measure: measure}},
				compare: compare,
				end:     s.end,
			})
		}
		plans = append(plans, p)
	}
	return plans
}

// overlaySetup is a rig and the cases that are measured in it.
type overlaySetup struct {
	path  rig.Path
	cases []overlayCase
}

// overlayPaths are the forms of overlay networks. Swarm is the form of Bridged, built by two Docker
// Engines.
var overlayPaths = []rig.Path{rig.Routed, rig.Bridged, rig.Swarm}

func (su overlaySetup) caseName(c overlayCase) string { return string(su.path) + " " + c.name }

// overlayCase is one load from a client on the first host to a server on the second.
type overlayCase struct {
	name   string
	client []string // arguments of its generator, for load.Main
	server []string // arguments of its generator; nil: service
	// service is a real server in place of a generator; "": none.
	service rig.Service
	flows   int
	// ports is the number of ports on which the server listens, one after the other; 0 is one.
	ports int
	bulk  bool // measure the bytes that the server receives, not the answers
	short bool // each request has a new connection
	named bool // the destination is the address of a service
	quick bool
}

// overlayCatalogue holds every case of the overlay experiment (ONCache, figures of
// throughput, request-response, connect-request-response and applications).
func overlayCatalogue() []overlaySetup {
	var cases []overlayCase
	for _, proto := range []string{"udp", "tcp"} {
		for _, flows := range []int{1, 8, 32} {
			c := requestsOf(proto, flows)
			if proto == "udp" {
				c.ports = flows // each server process of netperf has its own socket
			}
			cases = append(cases, c)
		}
	}
	short := requestsOf("tcp", 1)
	short.name, short.client, short.short, short.quick = "tcp crr", append(short.client, "--connect"), true, true
	cases = append(cases, short,
		overlayCase{name: "udp bulk", flows: 1, bulk: true, client: []string{"udp-send", "--greet", "--size", "1400"}, server: []string{"udp-recv", "--greet"}, quick: true},
		overlayCase{name: "tcp bulk", flows: 1, bulk: true, client: []string{"tcp-send", "--congestion", "cubic"}, server: []string{"tcp-recv"}, quick: true})
	for _, s := range []rig.Service{rig.Memcache, rig.Nginx, rig.Redis, rig.Postgres} {
		cases = append(cases, overlayCase{
			name: string(s), service: s, flows: serviceConns, quick: s == rig.Memcache,
			client: []string{"rr-client", "--proto", s.Proto(), "--size", fmt.Sprint(rig.PageSize), "--conns", fmt.Sprint(serviceConns)},
		})
	}
	var all []overlaySetup
	for _, path := range overlayPaths {
		su := overlaySetup{path: path, cases: slices.Clone(cases)}
		if path == rig.Swarm {
			su.cases = slices.DeleteFunc(su.cases, func(c overlayCase) bool { return c.server == nil && c.service != rig.Memcache })
		}
		for i, c := range su.cases { // the other forms have the same programs in front of them
			su.cases[i].quick = c.quick && (path == rig.Routed || path == rig.Bridged && c.name == "tcp rr 1")
		}
		for _, c := range slices.Clone(su.cases) {
			if path == rig.Routed && (c.flows == 8 && c.server != nil || c.short) {
				c.name, c.named, c.quick = "service "+c.name, true, false
				su.cases = append(su.cases, c)
			}
		}
		all = append(all, su)
	}
	return all
}

// requestsOf sends one byte and receives one on each of several flows at once, like TCP_RR and
// UDP_RR of netperf.
func requestsOf(proto string, flows int) overlayCase {
	common := []string{"--proto", proto, "--conns", fmt.Sprint(flows)}
	return overlayCase{
		name: fmt.Sprintf("%s rr %d", proto, flows), flows: flows, quick: flows != 8,
		client: append([]string{"rr-client", "--size", "1"}, common...), server: append([]string{"rr-server"}, common...),
	}
}

// overlaySession is two hosts with an agent each, and the load of one case.
type overlaySession struct {
	*experiment
	setup  overlaySetup
	rig    *rig.Overlay
	guards [2]*guard
	// The servers of the current case, between the containers and between the hosts. Only one of
	// them has clients at a time.
	containers, hosts *overlayPair
	// lacking says why the short path has no effect in this rig; "" if it has one.
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
		if s.guards[host], err = newGuard(ctx, r, "overlay", "", 0); err != nil {
			return err
		}
	}
	// The first switch shows whether the short path works here.
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
	client, server, at := s.rig.Hosts[0], s.rig.Hosts[1], s.rig.Addrs[1]
	if c.named {
		at = rig.ServiceAddr
	}
	if s.containers, err = s.pair(ctx, c, client.Boxes[0], server.Boxes[0], at); err != nil {
		return err
	}
	s.hosts, err = s.pair(ctx, c, client.Node, server.Node, rig.HostAddr(1))
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

// measure returns the figures of one arm, its rate first. Without the short path armOn has no
// figures.
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
	// Each arm has new connections, like a load that begins then.
	client, err := s.rig.Hosts[0].Start(ctx, p.box, append(slices.Clone(c.client), "--to", p.to)...)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, client.Stop()) }()
	first := client.Read()
	sleep(ctx, s.settle)
	of := client
	if c.bulk {
		of = p.server
	}
	before, from, start := of.Read(), readCPUs(), time.Now()
	sleep(ctx, s.take)
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
