package bench

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/bench/load"
	"github.com/fairlead-project/fairlead/bench/report"
	"github.com/fairlead-project/fairlead/bench/rig"
)

// The metrics of the traffic experiment, beside those of netcpu.
const (
	Total    = "received in all"
	ShareOf  = "share of "      // and a container: part of what was received in all
	Settling = "settled after " // and a phase: until the shares are those that are due
	P999     = "latency p99.9"
)

// arm is what divides the link during a measurement.
type arm string

const (
	armOff arm = "off"
	armOn  arm = "on"
	armTC  arm = "tc"
	armCNI arm = "cni"
)

// TrafficCases names the cases that Traffic would measure. It matches ErrNoCase
// if there are none.
func TrafficCases(o Options) ([]string, error) {
	all, err := o.trafficSetups()
	var names []string
	for _, su := range all {
		for _, c := range su.cases {
			names = append(names, su.name+" "+c.name)
		}
	}
	return names, err
}

func (o Options) trafficSetups() ([]trafficSetup, error) {
	only, err := regexp.Compile(o.Only)
	if err != nil {
		return nil, err
	}
	var list []trafficSetup
	for _, su := range trafficCatalogue() {
		su.cases = slices.DeleteFunc(su.cases, func(c trafficCase) bool {
			return !only.MatchString(su.name+" "+c.name) || !c.quick && o.Quick && o.Only == ""
		})
		if len(su.cases) > 0 {
			list = append(list, su)
		}
	}
	if len(list) == 0 {
		return nil, fmt.Errorf("%w: %q", ErrNoCase, o.Only)
	}
	return list, nil
}

// Traffic runs the traffic experiment: how containers share an uplink with
// nothing done, with fairlead, and with what else there is. It needs root and
// two CPUs. When ctx ends, what was built is removed before it returns.
func Traffic(ctx context.Context, o Options) (*report.Report, error) {
	e := &experiment{
		report:   &report.Report{Bench: "traffic", Env: environment(o.Version, o.Quick), Rounds: 3},
		progress: o.Progress,
		warm:     500 * time.Millisecond, take: 2 * time.Second,
	}
	if o.Quick {
		e.warm, e.take, e.report.Rounds = 300*time.Millisecond, 500*time.Millisecond, 1
	}
	if o.Rounds > 0 {
		e.report.Rounds = o.Rounds
	}
	if o.Window > 0 {
		e.take = o.Window
	}
	all, err := o.trafficSetups()
	if err != nil {
		return nil, err
	}
	plugin := rig.CNIPlugin() != ""
	if !plugin {
		e.notes = append(e.notes, "the CNI plugin bandwidth is not installed (Debian package containernetworking-plugins): it was left out")
	}
	release, err := only()
	if err != nil {
		return nil, err
	}
	defer release()
	if err := rig.Sweep(); err != nil {
		return nil, err
	}
	for _, su := range all {
		for _, c := range su.cases {
			e.total += e.report.Rounds * len(c.arms(plugin))
		}
	}
	for _, su := range all {
		if err := e.traffic(ctx, su, plugin); err != nil {
			return nil, fmt.Errorf("traffic experiment, %s: %w", su.name, err)
		}
	}
	if e.missing != "" {
		e.notes = append(e.notes, "fairlead had no effect: traffic is "+strings.TrimSuffix(e.missing, "."))
	}
	e.report.Env.Notes = e.notes
	return e.report, nil
}

// arms are those that a case is measured with.
func (c trafficCase) arms(plugin bool) []arm {
	arms := []arm{armOff, armOn}
	if c.tc != nil {
		arms = append(arms, armTC)
	}
	if c.cni != nil && plugin {
		arms = append(arms, armCNI)
	}
	return arms
}

// traffic measures the cases of one rig, each arm once in each round: forwards
// in the first, backwards in the next.
func (e *experiment) traffic(ctx context.Context, su trafficSetup, plugin bool) (err error) {
	s, err := newTrafficSession(ctx, su, e.warm, e.take)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, s.close()) }()
	for _, c := range su.cases {
		if err := s.begin(ctx, c); err != nil {
			return err
		}
		arms := c.arms(plugin)
		for round := range e.report.Rounds {
			for _, a := range arms {
				e.say(fmt.Sprintf("round %d: %s %s, %s", round+1, su.name, c.name, a))
				figures, err := s.measure(ctx, c, a)
				if err != nil {
					return fmt.Errorf("%s, %s: %w", c.name, a, err)
				}
				for _, f := range figures {
					name := su.name + " " + c.name
					switch a {
					case armOff, armOn:
						e.report.Add(name, f.metric, f.unit, a == armOn, f.value)
					default:
						e.report.AddPeer(name, f.metric, f.unit, string(a), f.value)
					}
				}
			}
			slices.Reverse(arms)
		}
		if err := s.end(); err != nil {
			return err
		}
	}
	e.missing = s.guard.missing
	return nil
}

// figure is one value of one metric.
type figure struct {
	metric, unit string
	value        float64
}

// trafficSession is one rig with an agent, and the load of one case at a time.
type trafficSession struct {
	setup      trafficSetup
	rig        *rig.Rig
	guard      *guard
	warm, take time.Duration

	load    map[string]*flow  // of the case
	limited []int             // whom the CNI plugin limits
	set     map[string]string // the policy, by container
}

// flow is what one container sends.
type flow struct {
	sending
	from, to *rig.Generator
}

func newTrafficSession(ctx context.Context, su trafficSetup, warm, take time.Duration) (_ *trafficSession, err error) {
	cfg := rig.Config{Path: su.path}
	for _, name := range su.boxes {
		cfg.Containers = append(cfg.Containers, rig.Container{Name: name})
	}
	r, err := rig.New(cfg)
	if err != nil {
		return nil, err
	}
	s := &trafficSession{setup: su, rig: r, warm: warm, take: take}
	uplink := su.link
	if uplink == 0 {
		uplink = 100 * gbit
	}
	if s.guard, err = newGuard(ctx, r, "", uplink); err != nil {
		return nil, errors.Join(err, s.close())
	}
	return s, nil
}

func (s *trafficSession) close() error {
	errs := []error{s.end()}
	if s.guard != nil {
		errs = append(errs, s.guard.stop())
	}
	return errors.Join(append(errs, s.rig.Close())...)
}

// begin starts the load of a case, paused.
func (s *trafficSession) begin(ctx context.Context, c trafficCase) error {
	s.load = make(map[string]*flow)
	for i, snd := range c.send {
		const firstPort = 9001
		f := &flow{sending: snd}
		s.load[snd.name] = f
		port := fmt.Sprint(firstPort + i)
		recv := map[string][]string{"tcp-send": {"tcp-recv"}, "udp-send": {"udp-recv", "--buffer", "8388608"}, "rr-client": {"rr-server", "--proto", "udp"}}[snd.args[0]]
		var err error
		if f.to, err = s.rig.Start(ctx, s.rig.Outside, append(recv, "--listen", ":"+port)...); err != nil {
			return err
		}
		args := append(slices.Clone(snd.args), "--to", s.rig.Uplink(firstPort+i), "--rate", "0")
		if f.from, err = s.rig.Start(ctx, s.rig.Boxes[s.setup.box(snd.name)], args...); err != nil {
			return err
		}
	}
	return nil
}

// end ends the load, and whatever divides the link.
func (s *trafficSession) end() error {
	var errs []error
	for _, f := range s.load {
		for _, g := range []*rig.Generator{f.from, f.to} {
			if g != nil {
				errs = append(errs, g.Stop())
			}
		}
	}
	s.load = nil
	return errors.Join(append(errs, s.unlimit())...)
}

func (s *trafficSession) unlimit() error {
	var errs []error
	for _, i := range s.limited {
		errs = append(errs, s.rig.CNIBandwidth(i, 0))
	}
	s.limited = nil
	return errors.Join(errs...)
}

// divide puts an arm in place of what was before, with the load paused.
func (s *trafficSession) divide(ctx context.Context, c trafficCase, a arm) error {
	if err := s.unlimit(); err != nil {
		return err
	}
	if s.guard.on {
		if err := s.policy(ctx, nil); err != nil {
			return err
		}
	}
	var classes []rig.Class
	if a == armTC {
		classes = c.tc
	}
	rate := s.setup.link
	switch {
	case a == armOn: // whose own root stands for the link
		rate = 0
	case rate == 0 && a == armTC:
		rate = 100 * gbit
	}
	if err := s.rig.Link(rate, classes); err != nil {
		return err
	}
	switch a {
	case armOn:
		return s.policy(ctx, c.set)
	case armCNI:
		for i, rate := range c.cni {
			s.limited = append(s.limited, i)
			if err := s.rig.CNIBandwidth(i, rate); err != nil {
				return err
			}
		}
	}
	return nil
}

// policy makes what is set, by container, the policy; nil: none.
func (s *trafficSession) policy(ctx context.Context, set map[string]string) error {
	text := ""
	for _, name := range slices.Sorted(maps.Keys(set)) {
		what := set[name]
		if !strings.HasPrefix(what, "{") {
			what = "{" + what + "}"
		}
		text += fmt.Sprintf("---\nmatch: {name: %q}\nset: %s\n", s.rig.Prefix()+name, what)
	}
	was := s.set
	s.set = set
	return s.guard.policy(ctx, text, func(c api.Container) (taken, changed bool) {
		name := strings.TrimPrefix(c.Name, s.rig.Prefix())
		want, n := set[name], 0
		for _, p := range c.Policy {
			if strings.HasPrefix(p.Key, "fairlead.net.") && p.From != "default" {
				n++
				if !strings.Contains(want, strings.TrimPrefix(p.Key, "fairlead.")+": "+p.Value) {
					return false, false
				}
			}
		}
		return n == strings.Count(want, "net."), want != was[name]
	})
}

// sends lets only some send.
func (s *trafficSession) sends(names []string) {
	for name, f := range s.load {
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
	defer s.sends(nil)
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
			go func() { changed <- s.policy(ctx, p.set) }() // while they send
		}
		if p.pause > 0 {
			s.sends(nil)
			if err := sleep(ctx, p.pause); err != nil {
				return nil, err
			}
		}
		s.sends(p.sends)
		if i > 0 {
			after, err := s.settles(ctx, p)
			if err != nil {
				return nil, err
			}
			out = append(out, figure{Settling + p.name, "s", after.Seconds()})
		} else if err := sleep(ctx, s.warm); err != nil {
			return nil, err
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

func (s *trafficSession) read() map[string]load.Reading {
	out := make(map[string]load.Reading)
	for name, f := range s.load {
		g := f.to
		if f.args[0] == "rr-client" { // which knows how long they took
			g = f.from
		}
		out[name] = g.Read()
	}
	return out
}

// window measures what comes of a phase.
func (s *trafficSession) window(ctx context.Context, c trafficCase, p phase) ([]figure, error) {
	before := s.read()
	take := s.take
	if c.probe != "" {
		take *= 2 // the last of a thousand
	}
	if err := sleep(ctx, take); err != nil {
		return nil, err
	}
	after := s.read()
	for name, f := range s.load {
		for _, g := range []*rig.Generator{f.from, f.to} {
			select {
			case <-g.Done():
				return nil, fmt.Errorf("the load of %s has ended: %w", name, g.Wait())
			default:
			}
		}
	}
	label := ""
	if p.name != "" {
		label = p.name + ": "
	}
	var total float64
	bits := make(map[string]float64)
	for name := range s.load {
		if name != c.probe {
			bits[name] = after[name].Since(before[name]).BitRate()
			total += bits[name]
		}
	}
	var out []figure
	if c.probe != "" {
		w := after[c.probe].Since(before[c.probe])
		out = append(out, figure{P50, "s", w.Latency(0.5).Seconds()}, figure{P99, "s", w.Latency(0.99).Seconds()}, figure{P999, "s", w.Latency(0.999).Seconds()}, figure{Requests, "1/s", w.Rate()})
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
	return out, nil
}

// The steps in which it is looked whether shares are those that are due, how
// many good ones in a row are asked for, and how far off, all together, a good one may be.
const (
	settleStep  = 50 * time.Millisecond
	settleSteps = 3
	settleOff   = 0.15
)

// settles waits until the shares of a phase are those that are due, and gives
// how long it took to the end of the first step that was good; the end of its
// patience, if they never are.
func (s *trafficSession) settles(ctx context.Context, p phase) (time.Duration, error) {
	const patience = 2 * time.Second
	start, good, since := time.Now(), 0, time.Duration(0)
	before := s.read()
	for time.Since(start) < patience {
		began := time.Since(start)
		if err := sleep(ctx, settleStep); err != nil {
			return 0, err
		}
		now := s.read()
		var total, off float64
		bits := make(map[string]float64)
		for name := range s.load {
			bits[name] = now[name].Since(before[name]).BitRate()
			total += bits[name]
		}
		before = now
		for name := range s.load {
			off += max(bits[name]/max(total, 1)-p.due[name], p.due[name]-bits[name]/max(total, 1))
		}
		// As much as the link takes, and everybody's part of it.
		if off > settleOff || total < 0.85*float64(s.setup.link) {
			good = 0
			continue
		}
		if good == 0 {
			since = began + settleStep
		}
		if good++; good == settleSteps {
			return since, nil
		}
	}
	return patience, nil
}
