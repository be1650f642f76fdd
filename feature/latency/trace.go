package latency

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"
	"net/http"
	"time"

	"golang.org/x/sys/unix"

	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/feature"
	"github.com/fairlead-project/fairlead/kernel/journal"
	"github.com/fairlead-project/fairlead/policy"
)

// traced is a part of the answer to a request for the records of one container.
type traced struct {
	api.LatencyRecords
	Records []Record // in place of the API's
}

// Trace returns at most most records of one container's packets: all that match a filter, and possibly
// others, from the filter's After on (0: from now on). self is set if the container itself asks. Trace
// waits up to over for the first record. Recording continues for lease afterwards. ok is false if the
// container is not measured.
func (f *Latency) Trace(ctx context.Context, id container.ID, self bool, filter api.LatencyFilter, most int, over time.Duration) (out traced, ok bool, err error) {
	record := func() (*tracer, *trace, error) {
		f.mu.Lock()
		defer f.mu.Unlock()
		// One process's grant may end, and take the container off the meter, just as another's begins.
		if err := f.await(ctx, func() bool { return f.of(id) != nil || !f.asked[id] }); err != nil {
			return nil, nil, err
		}
		return f.record(id, self, filter, lease)
	}
	tracer, tr, err := record()
	if tracer == nil || err != nil {
		return out, err != nil, err
	}
	from := filter.After
	end, renew := time.After(over), time.NewTicker(lease/2)
	defer renew.Stop()
	if from == 0 {
		_, from, _, _ = tracer.after(tr, math.MaxUint64, 0)
	}
	for {
		list, next, missed, news := tracer.after(tr, from, most)
		if len(list) > 0 || over == 0 {
			out.Records, out.Next, out.Missed = list, next, missed
			break
		}
		select {
		case <-ctx.Done():
			return out, true, ctx.Err()
		case <-end:
			over = 0
		case <-renew.C: // waiting renews the request
			if tracer, tr, err = record(); tracer == nil || err != nil {
				return out, err != nil, err
			}
		case <-news:
		}
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.meter != nil {
		out.Limited = f.meter.ran == nil
		out.Lost, out.LostWaits, err = f.lost()
	}
	return out, true, err
}

// lost returns the records, and the waits of recorded packets, that were lost since the meter was
// opened. f.mu is held, and f.meter is not nil.
func (f *Latency) lost() (records, waits uint64, err error) {
	err = errors.Join(f.meter.maps.Lost.Get(&records), f.meter.maps.Waits.Get(&waits))
	return records, waits + f.orphans + f.tracer.lostWaits(), err
}

// record records the packets of a container that match a filter, for a time from now. tracer is nil if
// the container is not measured. f.mu is held.
func (f *Latency) record(id container.ID, self bool, filter api.LatencyFilter, during time.Duration) (_ *tracer, tr *trace, err error) {
	m := f.of(id)
	if m == nil {
		return nil, nil, nil
	}
	now := time.Now()
	if self && !m.traced && f.selfTraced() >= mostSelf {
		return nil, nil, &api.Error{Status: http.StatusServiceUnavailable, Code: "unavailable", Text: "too many containers have their packets recorded: try again later"}
	}
	if f.tracer == nil {
		if f.tracer, err = newTracer(f.meter, &f.reading); err != nil {
			f.tracer = nil
			return nil, nil, err
		}
		f.meter.recorded = true
	}
	tr = f.tracer.want(m.slot, m.numbered, filter, now, during)
	asked := &m.asked
	if self {
		asked = &m.askedSelf
	}
	if until := now.Add(during); until.After(*asked) {
		*asked = until
	}
	begins := !m.traced
	m.traced = true
	err = f.schedule(now, begins)
	if !f.lapsing {
		f.lapseAfter(lease)
	}
	return f.tracer, tr, err
}

// selfTraced returns the number of tenants that are recorded at their own request only.
func (f *Latency) selfTraced() (n int) {
	for _, m := range f.measured {
		if m.traced && m.asked.IsZero() {
			n++
		}
	}
	return n
}

// longLease is how long packets are recorded after a container switched recording on.
const longLease = 10 * time.Minute

// switchTracing starts or stops recording all packets of a container, at its own request. Recording for
// other requests continues.
func (f *Latency) switchTracing(id container.ID, on bool) (out api.LatencyTracing, err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	m := f.of(id)
	if m == nil {
		return out, notMeasured()
	}
	if !on {
		if f.tracer != nil {
			f.tracer.unwant(m.slot, time.Now())
		}
		if until := time.Now().Add(lease); m.askedSelf.After(until) {
			m.askedSelf = until
		}
		return out, nil
	}
	until := time.Now().Add(longLease)
	_, _, err = f.record(id, true, api.LatencyFilter{}, longLease)
	return api.LatencyTracing{On: true, Until: until}, err
}

// lapseAfter calls lapse after a time. f.mu is held.
func (f *Latency) lapseAfter(d time.Duration) {
	f.lapsing = true
	time.AfterFunc(d, func() { f.reading.Turn(f.lapse) })
}

// lapse ends recordings without a recent request.
func (f *Latency) lapse() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.lapsing = false
	if f.tracer == nil {
		return
	}
	changed := false
	now := time.Now()
	slots, left := f.tracer.lapsed(now)
	for _, m := range f.measured {
		next, ended := slots[m.slot]
		if m.traced && ended {
			m.traced, m.asked, m.askedSelf, changed = false, time.Time{}, time.Time{}, true
		}
		m.numbered = max(m.numbered, next)
	}
	if err := f.schedule(now, changed); err != nil {
		f.cfg.Log.Warn("end records of packets", "err", err)
	}
	if left > 0 {
		f.lapseAfter(lease / 4)
		return
	}
	f.orphans += f.tracer.lostWaits()
	if err := f.tracer.close(); err != nil {
		f.cfg.Log.Warn("end records of packets", "err", err)
	}
	f.tracer = nil
}

// recorded returns the records that match a filter, in the API's form. It waits up to over for the
// first one.
func (f *Latency) recorded(ctx context.Context, id container.ID, self bool, filter api.LatencyFilter, over time.Duration) (any, error) {
	out := api.LatencyRecords{Records: []api.LatencyRecord{}}
	most := cmp.Or(filter.Most, maxRecords)
	var by *attribution // made for the first wait
	for end := time.Now().Add(over); ; {
		got, measured, err := f.Trace(ctx, id, self, filter, most, max(time.Until(end), 0))
		if err != nil {
			return nil, err
		}
		if !measured {
			return nil, notMeasured()
		}
		out.Next, out.Lost, out.LostWaits, out.Limited = got.Next, got.Lost, got.LostWaits, got.Limited
		out.Missed += got.Missed
		for _, r := range got.Records {
			if wants(filter, &r) {
				wr := wireRecord(r)
				for _, w := range r.waits {
					if by == nil {
						by = f.attribution()
					}
					wr.Waits = append(wr.Waits, by.wire(w, r.Direction, f.membersOf(id)))
				}
				out.Records = append(out.Records, wr)
			}
		}
		if len(out.Records) > 0 || !time.Now().Before(end) {
			return out, nil
		}
		filter.After = got.Next
	}
}

// membersOf returns the members of a container's tenant.
func (f *Latency) membersOf(id container.ID) []container.ID {
	f.mu.Lock()
	defer f.mu.Unlock()
	if t := f.tenants.Of(id); t != nil {
		return t.IDs()
	}
	return []container.ID{id}
}

func notMeasured() error {
	return &api.Error{Status: http.StatusConflict, Code: "not_measured",
		Text: "the container's packets are not measured: policy has to say fairlead.latency=on"}
}

// class returns the Protocol of a protocol number.
func class(protocol uint8) Protocol {
	switch protocol {
	case unix.IPPROTO_TCP:
		return TCP
	case unix.IPPROTO_UDP:
		return UDP
	case unix.IPPROTO_ICMP, unix.IPPROTO_ICMPV6:
		return ICMP
	}
	return Other
}

func wireRecord(r Record) api.LatencyRecord {
	seconds := func(s Stage) *float64 {
		if r.Stages[s] < 0 {
			return nil
		}
		v := r.Stages[s].Seconds()
		return &v
	}
	w := api.LatencyRecord{
		Time: r.At, Direction: r.Direction.String(), Protocol: class(r.Protocol).String(),
		From: r.From.Addr().String(), FromPort: int(r.From.Port()), To: r.To.Addr().String(), ToPort: int(r.To.Port()),
		Seq: uint64(r.Seq), Type: int(r.Type), Syn: r.Syn, Bytes: r.Bytes, Added: seconds(Added), Stack: seconds(Stack), Stages: []api.LatencyPart{},
	}
	for _, s := range way(r.Direction) {
		if v := seconds(s); v != nil {
			w.Stages = append(w.Stages, api.LatencyPart{Stage: s.Name(r.Direction), Seconds: *v})
		}
	}
	return w
}

// latencyKey is the policy key that a grant decides.
const latencyKey = "fairlead.latency"

// grantTime is how long a container is measured after a process asked for it. The process renews the
// grant by asking again. The grant of a killed process expires.
const grantTime = 15 * time.Second

// inForce limits how long a request waits until the container is measured.
const inForce = 10 * time.Second

// grantee is a process that asked to measure a container.
type grantee struct {
	container container.ID
	pid       int
}

// grant measures a container for a grantee, whatever policy says.
type grant struct {
	uid          int
	since, until time.Time
}

var _ feature.Commander = (*Latency)(nil)

// Command implements feature.Commander. It records packets and returns them, starts or stops the
// measurement for a process, and starts or stops recording at a container's own request.
func (f *Latency) Command(ctx context.Context, of *container.Container, ask api.Ask) (any, error) {
	if of != nil {
		switch in := ask.Body.(type) {
		case api.LatencyFilter:
			return f.recorded(ctx, of.ID, ask.Self, in, ask.Over)
		case api.LatencyMeasure:
			return f.measureFor(ctx, of.ID, in)
		case api.LatencyTracing:
			return f.switchTracing(of.ID, in.On)
		}
	}
	return nil, fmt.Errorf("latency: no command %T", ask.Body)
}

// measureFor grants a process the measurement of a container, or renews or ends the grant. It waits
// until the container is measured.
func (f *Latency) measureFor(ctx context.Context, id container.ID, ask api.LatencyMeasure) (out api.LatencyMeasured, err error) {
	by, now := grantee{id, ask.PID}, time.Now()
	f.mu.Lock()
	defer f.mu.Unlock()
	g, had := f.grants[by]
	if !ask.On {
		if had {
			g.until = now
			f.grants[by] = g // Decide ends the measurement
		}
		return out, nil
	}
	if f.host == nil {
		return out, f.Unavailable()
	}
	if !had {
		g = grant{uid: ask.UID, since: now}
	}
	g.until = now.Add(grantTime)
	f.grants[by] = g
	// A measurement from an earlier grant is about to end, unless a decision keeps it.
	if err = f.await(ctx, func() bool { return f.asked[id] && f.of(id) != nil }); err != nil {
		g.until = time.Now()
		f.grants[by] = g
		return out, err
	}
	return api.LatencyMeasured{On: true, Until: g.until}, nil
}

// await waits until Decide or Apply has met a condition. f.mu is held, but released while it waits.
func (f *Latency) await(ctx context.Context, met func() bool) error {
	for timeout := time.After(inForce); !met(); {
		news := f.news
		f.mu.Unlock()
		var err error
		select {
		case <-ctx.Done():
			err = ctx.Err()
		case <-timeout:
			err = &api.Error{Status: http.StatusServiceUnavailable, Code: "unavailable", Text: "the container is not measured yet; `fairlead ps` says why"}
		case <-news:
		}
		f.mu.Lock()
		if err != nil {
			return err
		}
	}
	return nil
}

// wake wakes requests that await. f.mu is held.
func (f *Latency) wake() {
	close(f.news)
	f.news = make(chan struct{})
}

// Adopt implements feature.Decider. Processes with a grant of an earlier agent ask again.
func (f *Latency) Adopt([]journal.Entry) []policy.Decision { return nil }

// Decide implements feature.Decider: it switches the measurement on for containers with a grant that
// policy does not measure anyway.
func (f *Latency) Decide(targets []policy.Target, _ bool) (out []policy.Decision, err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	defer f.wake()
	clear(f.asked)
	now := time.Now()
	stands := make(map[container.ID]policy.Decision)
	for by, g := range f.grants {
		d := policy.Decision{Container: by.container, Key: latencyKey, Value: "on", Since: g.since, Expiry: g.until}
		d.Reason = fmt.Sprintf("process %d of uid %d has it measured while it runs", by.pid, g.uid)
		if d.Lapsed(now) {
			delete(f.grants, by)
			d.Since = now // differs from the current decision, and so withdraws it
		}
		if other, known := stands[by.container]; !known || d.Expiry.After(other.Expiry) {
			stands[by.container] = d
		}
	}
	for _, t := range targets {
		d, asked := stands[t.Container.ID]
		says := t.Settings.Latency != nil && *t.Settings.Latency
		f.asked[t.Container.ID] = says || asked && !d.Lapsed(now)
		if asked && !says {
			out = append(out, d)
		}
	}
	return out, nil
}
