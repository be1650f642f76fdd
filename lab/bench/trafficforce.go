package bench

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/lab/load"
	"github.com/fairlead-project/fairlead/lab/report"
	"github.com/fairlead-project/fairlead/lab/rig"
)

// InForce, followed by a change, is the time from the change to the start of the first 100 ms in
// which all shares are within 3 % of the due shares.
const InForce = "in force after "

const (
	forceWindow = 100 * time.Millisecond
	forceStep   = 5 * time.Millisecond
	forceOff    = 0.03
)

// change is a change while containers send, and the due shares after it.
type change struct {
	name string
	do   func(context.Context) error
	due  map[string]float64
}

// enforced measures the delay of changes by a policy file, by `fairlead set` and by the
// start of a container.
func (s *trafficSession) enforced(ctx context.Context, c trafficCase) ([]figure, error) {
	const times = 4
	equal := map[string]float64{"w1": 0.5, "w2": 0.5}
	more := map[string]float64{"w1": 0.25, "w2": 0.75}
	file := func(set rules) func(context.Context) error {
		return func(context.Context) error {
			return os.WriteFile(filepath.Join(s.guard.policies(), policyFile), []byte(s.guard.text(set)), 0o644)
		}
	}
	hand := func(in api.SetRequest) func(context.Context) error {
		return func(ctx context.Context) error {
			_, err := s.guard.client.Set(ctx, s.rig.Prefix()+"w2", in)
			return err
		}
	}
	readers := make(map[string]*rig.Generator)
	for name, f := range s.load {
		readers[name] = f.to
	}
	s.sends([]string{"w1", "w2"})
	if err := sleep(ctx, s.settle+s.take); err != nil {
		return nil, err
	}
	took := make(map[string][]float64)
	for range times {
		for _, ch := range []change{
			{"a policy file", file(rules{"w1": "net.weight: 1", "w2": "net.weight: 3"}), more},
			{"a policy file", file(c.set), equal},
			{"fairlead set", hand(api.SetRequest{Set: map[string]string{"net.weight": "3"}}), more},
			{"fairlead set", hand(api.SetRequest{Unset: []string{"net.weight"}}), equal},
		} {
			done, err := s.makes(ctx, ch, readers)
			if err != nil {
				return nil, err
			}
			took[ch.name] = append(took[ch.name], done.Seconds())
		}
		if err := s.startsOne(ctx, readers, took); err != nil {
			return nil, err
		}
	}
	var out []figure
	for name, all := range took {
		out = append(out, figure{InForce + name, "s", report.Median(all)})
	}
	slices.SortFunc(out, func(a, b figure) int { return strings.Compare(a.metric, b.metric) })
	return out, nil
}

// startsOne starts a container of the engine that sends at once, and removes it.
func (s *trafficSession) startsOne(ctx context.Context, readers map[string]*rig.Generator, took map[string][]float64) (err error) {
	const port = 9010
	to, err := s.rig.Start(ctx, s.rig.Outside, "tcp-recv", "--listen", fmt.Sprintf(":%d", port))
	if err != nil {
		return err
	}
	defer to.Stop()
	start, remove, err := s.rig.Prepare(ctx, "w3", []string{"fairlead.net.weight=1"}, "tcp-send", "--conns", "2", "--to", s.rig.Uplink(port))
	if err != nil {
		return err
	}
	defer func() {
		if e := remove(context.WithoutCancel(ctx)); err == nil {
			err = e
		}
	}()
	all := map[string]*rig.Generator{"w3": to}
	for name, g := range readers {
		all[name] = g
	}
	done, err := s.makes(ctx, change{"docker start", start, map[string]float64{"w1": 1. / 3, "w2": 1. / 3, "w3": 1. / 3}}, all)
	if err != nil {
		return err
	}
	took["docker start"] = append(took["docker start"], done.Seconds())
	return nil
}

const forcePatience = 5 * time.Second

// makes makes a change, and returns the time until it was in force. Beyond forcePatience it returns
// an error, as there is no figure for never.
func (s *trafficSession) makes(ctx context.Context, ch change, readers map[string]*rig.Generator) (time.Duration, error) {
	type sample struct {
		at  time.Duration
		all map[string]load.Reading
	}
	start := time.Now()
	failed := make(chan error, 1)
	go func() { failed <- ch.do(ctx) }() // while the loop below watches the shares
	var samples []sample
	for from := 0; time.Since(start) < forcePatience; {
		now := sample{time.Since(start), make(map[string]load.Reading)}
		for name, g := range readers {
			now.all[name] = g.Read()
		}
		samples = append(samples, now)
		for ; now.at-samples[from].at >= forceWindow; from++ {
			var total float64
			bits := make(map[string]float64)
			for name := range readers {
				bits[name] = now.all[name].Since(samples[from].all[name]).BitRate()
				total += bits[name]
			}
			good := total > 0.85*float64(s.setup.link)
			for name, due := range ch.due {
				share := bits[name] / max(total, 1)
				good = good && share >= due*(1-forceOff) && share <= due*(1+forceOff)
			}
			if good {
				return samples[from].at, <-failed
			}
		}
		if err := sleep(ctx, forceStep); err != nil {
			return 0, err
		}
	}
	if err := <-failed; err != nil {
		return 0, err
	}
	return 0, fmt.Errorf("shares after %q: not as due within %s", ch.name, forcePatience)
}
