package bench

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math"
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

// The part of a request's latency that a qdisc can influence: its wait in the queue of the NIC.
const (
	QueueP99  = "wait at the queue p99"
	QueueP999 = "wait at the queue p99.9"
	QueueMax  = "wait at the queue max"
)

// requestSize is the payload of a request, in bytes.
const requestSize = 64

// requestFrame is the length of a request's frame at the NIC.
func requestFrame(p rig.Path) int {
	const ethernet, ipv4, udp, vxlan = 14, 20, 8, 8
	n := ethernet + ipv4 + udp + requestSize
	if p == rig.VXLAN {
		n += ethernet + ipv4 + udp + vxlan
	}
	return n
}

// waited returns the figures between two readings of a queue. length is the time between them: if no
// request has left the queue, all requests have waited that long.
func waited(now, earlier rig.Waits, length time.Duration) ([]figure, error) {
	q := now.Since(earlier.Histogram)
	if missed := now.Missed - earlier.Missed; missed > q.Count()/1000 {
		return nil, fmt.Errorf("the queue's delay of %d requests was not measured, of %d it was", missed, q.Count())
	}
	at := func(part float64) float64 {
		if q.Count() == 0 {
			return length.Seconds()
		}
		return q.Quantile(part).Seconds()
	}
	return []figure{{QueueP99, "s", at(0.99)}, {QueueP999, "s", at(0.999)}, {QueueMax, "s", at(1)}}, nil
}

// The traffic of one second at the NIC, as a fraction of the ceil: in the first second,
// and the maximum.
const (
	FirstSecond = "first second, of the ceil"
	WorstSecond = "worst second, of the ceil"
)

// bounded measures the traffic at the NIC from the first packet on, for a window and one
// second more, in seconds that start every 20 ms.
func (s *trafficSession) bounded(ctx context.Context, c trafficCase) ([]figure, error) {
	const step, second = 20 * time.Millisecond, time.Second
	type sample struct {
		at    time.Duration
		bytes uint64
	}
	var all []sample
	var first, worst float64
	for start, from := time.Now(), 0; ; {
		bytes, err := s.rig.Sent()
		if err != nil {
			return nil, err
		}
		now := sample{time.Since(start), bytes}
		all = append(all, now)
		for now.at-all[from].at >= second {
			rate := 8 * float64(now.bytes-all[from].bytes) / (now.at - all[from].at).Seconds() / float64(c.ceil)
			if from == 0 {
				first = rate
			}
			worst = max(worst, rate)
			from++
		}
		if now.at >= s.take+second || ctx.Err() != nil {
			break
		}
		sleep(ctx, step)
	}
	return []figure{{FirstSecond, "1", first}, {WorstSecond, "1", worst}}, nil
}

// The length of a step in which the shares are measured, the required number of good steps in a
// row, and the largest sum of deviations in a good step.
const (
	settleStep  = 50 * time.Millisecond
	settleSteps = 3
	settleOff   = 0.15
)

// settles waits until the shares of a phase are right. It returns the time to the end of
// the first good step, or its patience if there is none.
func (s *trafficSession) settles(ctx context.Context, p phase) time.Duration {
	const patience = 2 * time.Second
	start, good, since := time.Now(), 0, time.Duration(0)
	before := s.read()
	for ctx.Err() == nil && time.Since(start) < patience {
		began := time.Since(start)
		sleep(ctx, settleStep)
		now := s.read()
		bits, total := bitRates(before, now)
		before = now
		off := 0.0
		for name := range s.load {
			off += math.Abs(bits[name]/max(total, 1) - p.due[name])
		}
		// A step is bad if the shares deviate too much, or the link is not full.
		if off > settleOff || total < 0.85*float64(s.setup.link) {
			good = 0
			continue
		}
		if good == 0 {
			since = began + settleStep
		}
		if good++; good == settleSteps {
			return since
		}
	}
	return patience
}

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
	s.sends([]string{"w1", "w2"})
	sleep(ctx, s.settle+s.take)
	took := make(map[string][]float64)
	for range times {
		for _, ch := range []change{
			{"a policy file", file(rules{"w1": "net.weight: 1", "w2": "net.weight: 3"}), more},
			{"a policy file", file(c.set), equal},
			{"fairlead set", hand(api.SetRequest{Set: map[string]string{"net.weight": "3"}}), more},
			{"fairlead set", hand(api.SetRequest{Unset: []string{"net.weight"}}), equal},
		} {
			done, err := s.makes(ctx, ch)
			if err != nil {
				return nil, err
			}
			took[ch.name] = append(took[ch.name], done.Seconds())
		}
		done, err := s.startsOne(ctx)
		if err != nil {
			return nil, err
		}
		took["docker start"] = append(took["docker start"], done.Seconds())
	}
	var out []figure
	for name, all := range took {
		out = append(out, figure{InForce + name, "s", report.Median(all)})
	}
	slices.SortFunc(out, func(a, b figure) int { return strings.Compare(a.metric, b.metric) })
	return out, nil
}

// startsOne starts a container of the engine that sends at once, and removes it.
func (s *trafficSession) startsOne(ctx context.Context) (took time.Duration, err error) {
	const port = 9010
	to, err := s.rig.Start(ctx, s.rig.Outside, "tcp-recv", "--listen", fmt.Sprintf(":%d", port))
	if err != nil {
		return 0, err
	}
	defer to.Stop()
	start, remove, err := s.rig.Prepare(ctx, "w3", []string{"fairlead.net.weight=1"}, "tcp-send", "--conns", "2", "--to", s.rig.Uplink(port))
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, remove(context.WithoutCancel(ctx))) }()
	s.load["w3"] = &flow{sending: bulk("w3", 2), to: to}
	defer delete(s.load, "w3")
	return s.makes(ctx, change{"docker start", start, map[string]float64{"w1": 1. / 3, "w2": 1. / 3, "w3": 1. / 3}})
}

const forcePatience = 5 * time.Second

// makes makes a change, and returns the time until it was in force. After forcePatience it returns an
// error, because there is no figure for never.
func (s *trafficSession) makes(ctx context.Context, ch change) (time.Duration, error) {
	type sample struct {
		at  time.Duration
		all map[string]load.Reading
	}
	start := time.Now()
	failed := make(chan error, 1)
	go func() { failed <- ch.do(ctx) }() // while the loop below watches the shares
	var samples []sample
	for from := 0; ctx.Err() == nil && time.Since(start) < forcePatience; {
		now := sample{time.Since(start), s.read()}
		samples = append(samples, now)
		for ; now.at-samples[from].at >= forceWindow; from++ {
			bits, total := bitRates(samples[from].all, now.all)
			good := total > 0.85*float64(s.setup.link)
			for name, due := range ch.due {
				share := bits[name] / max(total, 1)
				good = good && share >= due*(1-forceOff) && share <= due*(1+forceOff)
			}
			if good {
				return samples[from].at, <-failed
			}
		}
		sleep(ctx, forceStep)
	}
	if err := <-failed; err != nil {
		return 0, err
	}
	return 0, fmt.Errorf("shares after %q: not as due within %s", ch.name, forcePatience)
}

// heard compares the agent's slowed of the senders of a case with their own counts, from listen to
// figures. The caller closes it.
type heard struct {
	s      *trafficSession
	before api.Frame
	logs   map[string]*worklog // by container
}

// frame returns the agent's present frame.
func (g *guard) frame(ctx context.Context) (api.Frame, error) {
	f, err := g.client.Frame(ctx)
	if err != nil {
		err = g.explain(fmt.Errorf("read what the agent says: %w", err))
	}
	return f, err
}

// listen begins the comparison.
func (s *trafficSession) listen(ctx context.Context) (*heard, error) {
	h := &heard{s: s, logs: make(map[string]*worklog)}
	for name, f := range s.load {
		switch {
		case f.to == nil: // a real server has no such counter
		case f.args[0] == "rr-client":
			h.logs[name] = newWorklog(f.from.Ops)
		default:
			h.logs[name] = newWorklog(f.to.Bytes)
		}
	}
	var err error
	if h.before, err = s.guard.frame(ctx); err != nil {
		h.close()
	}
	return h, err
}

func (h *heard) close() {
	for _, l := range h.logs {
		l.Close()
	}
}

// figures returns the loss of the victim of a phase, by its own count and by the agent. The victim is
// the container with the measured requests, or the container for which the agent is most wrong. A
// container can lose only what it is guaranteed and what the uplink carried.
func (h *heard) figures(ctx context.Context, c trafficCase, p phase) ([]figure, error) {
	after, err := h.s.guard.frame(ctx)
	if err != nil {
		return nil, err
	}
	got, total := make(map[string]float64), 0.0
	for name, l := range h.logs {
		if got[name] = l.rate(h.before.Taken, after.Taken); name != c.probe {
			got[name] *= 8
			total += got[name]
		}
	}
	var worst []figure
	for _, name := range slices.Sorted(maps.Keys(got)) {
		if !slices.Contains(p.sends, name) || c.probe != "" && name != c.probe {
			continue
		}
		row, calm := said(h.before, after, h.s.rig.Prefix()+name), h.s.calm
		if name != c.probe {
			full := total
			if due := float64(row.Egress.Due); due > 0 {
				full = min(total, due*ofTCP)
			}
			calm = undisturbed{work: max(full, got[name])}
		}
		if f := calm.slowedFigures(got[name], row.Slowed); worst == nil || len(f) > 0 && f[2].value > worst[2].value {
			worst = f
		}
	}
	return worst, nil
}

// alone measures the requests of a case without neighbours.
func (s *trafficSession) alone(ctx context.Context, c trafficCase) (err error) {
	s.calm = undisturbed{}
	if f := s.load[c.probe]; f == nil || f.to == nil {
		return nil
	}
	s.sends([]string{c.probe})
	sleep(ctx, s.settle)
	h, err := s.listen(ctx)
	if err != nil {
		return err
	}
	defer h.close()
	sleep(ctx, s.take)
	after, err := s.guard.frame(ctx)
	if err != nil {
		return err
	}
	s.calm = undisturbed{h.logs[c.probe].rate(h.before.Taken, after.Taken), said(h.before, after, s.rig.Prefix()+c.probe).Slowed}
	return nil
}

// ask starts a client with new connections for a flow with a server, paused. The connections of the
// last arm may have been starved. They send again only after a time that doubles each time (RFC 6298,
// 5.5), so ask waits for their end as long as they may have been starved.
func (s *trafficSession) ask(ctx context.Context, f *flow) error {
	if f.service == "" {
		return nil
	}
	if old := f.from; old != nil {
		f.from = nil
		if err := old.Stop(); err != nil {
			return err
		}
		for start := time.Now(); rig.Connected(f.server.PID) && ctx.Err() == nil && time.Since(start) < 2*(s.settle+s.take); {
			sleep(ctx, settleStep)
		}
	}
	var err error
	f.from, err = s.rig.Ask(ctx, f.service, s.setup.box(f.name), s.rig.Outside, serviceConns, f.size)
	return err
}

// retransmitted returns the number of segments that the server of a case and its client have
// retransmitted; 0 without a server.
func (s *trafficSession) retransmitted(c trafficCase) (uint64, error) {
	f := s.load[c.probe]
	if f == nil || f.server == nil {
		return 0, nil
	}
	return rig.Retransmitted(f.server.PID, f.from.PID)
}

// served returns the figures of a server's client in a window. If the client has more connections than
// answers, the other requests have waited for the whole window.
func served(w load.Window, retransmitted uint64) []figure {
	answered := float64(w.Ops)
	all := max(answered, serviceConns)
	took := func(q float64) float64 {
		if q*all > answered {
			return w.Seconds
		}
		return w.Latency(q * all / answered).Seconds()
	}
	return []figure{
		{Requests, "1/s", w.Rate()}, {P50, "s", took(0.5)}, {P99, "s", took(0.99)}, {Longest, "s", took(1)},
		{Retransmitted, "1", float64(retransmitted)},
	}
}
