package latency

import (
	"context"
	"errors"
	"slices"
	"time"

	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/hist"
)

// Traced are records of one container's packets.
type Traced struct {
	Records []Record
	// Next is the number to ask for next. Of the numbers from what was asked for up
	// to it those that are missing were overwritten before.
	Next   uint64
	Missed uint64
	Costs  [hookXmit + 1]*hist.Histogram // what events with a stamp cost, by hook, while records were asked for
	Lost   uint64                        // of all tenants, for which the kernel's buffer had no room, since the meter began
}

// Trace gives the records of one container's packets that a filter wants, and maybe
// more, from its After on, 0: from now on; so many at the most. It waits no longer than
// over for the first of them, and records on for a while after it. ok is false if the
// container is not measured.
func (f *Latency) Trace(ctx context.Context, id container.ID, filter api.LatencyFilter, most int, over time.Duration) (out Traced, ok bool, err error) {
	f.mu.Lock()
	tracer, tr, err := f.record(id, filter, lease)
	f.mu.Unlock()
	if tracer == nil || err != nil {
		return out, err != nil, err
	}
	from := filter.After
	end := time.After(over)
	if from == 0 {
		_, from, _ = tracer.after(tr, 0, maxRecords)
	}
	for {
		list, next, news := tracer.after(tr, from, most)
		if len(list) > 0 || over == 0 {
			out = Traced{Records: list, Next: next}
			if len(list) > 0 {
				out.Missed = list[0].number - min(from, list[0].number)
			}
			break
		}
		select {
		case <-ctx.Done():
			return out, true, ctx.Err()
		case <-end:
			over = 0
		case <-news:
		}
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.meter != nil {
		out.Costs, err = f.meter.costs()
		err = errors.Join(err, f.meter.maps.Lost.Get(&out.Lost))
	}
	return out, true, err
}

// record begins to record what a filter wants of a container's packets, for a time from
// now on. tracer is nil if it is not measured. f.mu is held.
func (f *Latency) record(id container.ID, filter api.LatencyFilter, during time.Duration) (_ *tracer, tr *trace, err error) {
	t := f.member[id]
	if t == nil {
		return nil, nil, nil
	}
	if f.tracer == nil {
		if f.tracer, err = newTracer(f.meter, &f.reading); err != nil {
			f.tracer = nil
			return nil, nil, err
		}
	}
	tr = f.tracer.want(t.slot, filter, time.Now(), during)
	if !t.traced {
		t.traced = true
		err = errors.Join(f.meter.resume(), f.follow())
	}
	if !f.lapsing {
		f.lapsing = true
		time.AfterFunc(lease, f.lapse)
	}
	return f.tracer, tr, err
}

// longLease is for how long packets are recorded for who has switched that on.
const longLease = 10 * time.Minute

// switchTracing begins to record all packets of a container, or ends what was begun.
// What other people still ask for goes on.
func (f *Latency) switchTracing(id container.ID, on bool) (out api.LatencyTracing, err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	t := f.member[id]
	if t == nil {
		return out, notMeasured()
	}
	if !on {
		if f.tracer != nil {
			f.tracer.unwant(t.slot, time.Now())
		}
		return out, nil
	}
	until := time.Now().Add(longLease)
	_, _, err = f.record(id, api.LatencyFilter{}, longLease)
	return api.LatencyTracing{On: true, Until: until}, err
}

// lapse ends the recording of those that nobody has asked for lately.
func (f *Latency) lapse() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.lapsing = false
	if f.tracer == nil {
		return
	}
	changed := false
	slots, left := f.tracer.lapsed(time.Now())
	for _, t := range f.tenants {
		if t.traced && slices.Contains(slots, t.slot) {
			t.traced, changed = false, true
		}
	}
	if changed {
		if err := f.follow(); err != nil {
			f.cfg.Log.Warn("end records of packets", "err", err)
		}
	}
	if left > 0 {
		f.lapsing = true
		time.AfterFunc(lease/4, f.lapse)
		return
	}
	if err := f.tracer.close(); err != nil {
		f.cfg.Log.Warn("end records of packets", "err", err)
	}
	f.tracer = nil
}
