package latency

import (
	"context"
	"errors"
	"math"
	"net/http"
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
	Next      uint64
	Missed    uint64
	Costs     [hookXmit + 1]*hist.Histogram // what events with a stamp cost, by hook, while records were asked for
	Lost      uint64                        // of all tenants, for which there was no room, or that were too many, since the meter began
	LostWaits uint64                        // the same, of waits of recorded packets
	// Limited is set while the host is not watched, as a container asks that has had
	// its time: records have neither Mace nor waits.
	Limited bool
}

// Trace gives the records of one container's packets that a filter wants, and maybe
// more, from its After on, 0: from now on; so many at the most. self is set if the
// container itself asks. It waits no longer than over for the first of them, and records
// on for a while after it. ok is false if the container is not measured.
func (f *Latency) Trace(ctx context.Context, id container.ID, self bool, filter api.LatencyFilter, most int, over time.Duration) (out Traced, ok bool, err error) {
	record := func() (*tracer, *trace, error) {
		f.mu.Lock()
		defer f.mu.Unlock()
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
			out = Traced{Records: list, Next: next, Missed: missed}
			break
		}
		select {
		case <-ctx.Done():
			return out, true, ctx.Err()
		case <-end:
			over = 0
		case <-renew.C: // who waits asks
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
		var lerr error
		out.Costs, err = f.meter.costs()
		out.Lost, out.LostWaits, lerr = f.lost()
		err = errors.Join(err, lerr)
	}
	return out, true, err
}

// lost counts the records, and the waits of recorded packets, that did not come here since
// the meter began. f.mu is held, and there is a meter.
func (f *Latency) lost() (records, waits uint64, err error) {
	err = errors.Join(f.meter.maps.Lost.Get(&records), f.meter.maps.Waits.Get(&waits))
	return records, waits + f.astray + f.tracer.lostWaits(), err
}

// record begins to record what a filter wants of a container's packets, for a time from
// now on. tracer is nil if it is not measured. f.mu is held.
func (f *Latency) record(id container.ID, self bool, filter api.LatencyFilter, during time.Duration) (_ *tracer, tr *trace, err error) {
	t := f.member[id]
	if t == nil {
		return nil, nil, nil
	}
	now := time.Now()
	if self && !t.traced && f.selfTraced() >= mostSelf {
		return nil, nil, &api.Error{Status: http.StatusServiceUnavailable, Code: "unavailable", Text: "too many containers have their packets recorded: try again later"}
	}
	if f.tracer == nil {
		if f.tracer, err = newTracer(f.meter, &f.reading); err != nil {
			f.tracer = nil
			return nil, nil, err
		}
	}
	tr = f.tracer.want(t.slot, t.numbered, filter, now, during)
	asked := &t.asked
	if self {
		asked = &t.askedSelf
	}
	if until := now.Add(during); until.After(*asked) {
		*asked = until
	}
	begins := !t.traced
	t.traced = true
	err = f.settle(now, begins)
	if !f.lapsing {
		f.lapsing = true
		time.AfterFunc(lease, f.lapse)
	}
	return f.tracer, tr, err
}

// selfTraced is how many tenants are recorded that only ask themselves.
func (f *Latency) selfTraced() (n int) {
	for _, t := range f.tenants {
		if t.traced && t.asked.IsZero() {
			n++
		}
	}
	return n
}

// longLease is for how long packets are recorded for who has switched that on.
const longLease = 10 * time.Minute

// switchTracing begins to record all packets of a container, or ends what was begun: it
// asks for that itself. What other people still ask for goes on.
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
		if until := time.Now().Add(lease); t.askedSelf.After(until) {
			t.askedSelf = until
		}
		return out, nil
	}
	until := time.Now().Add(longLease)
	_, _, err = f.record(id, true, api.LatencyFilter{}, longLease)
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
	now := time.Now()
	slots, left := f.tracer.lapsed(now)
	for _, t := range f.tenants {
		next, ended := slots[t.slot]
		if t.traced && ended {
			t.traced, t.asked, t.askedSelf, changed = false, time.Time{}, time.Time{}, true
		}
		t.numbered = max(t.numbered, next)
	}
	if err := f.settle(now, changed); err != nil {
		f.cfg.Log.Warn("end records of packets", "err", err)
	}
	if left > 0 {
		f.lapsing = true
		time.AfterFunc(lease/4, f.lapse)
		return
	}
	f.astray += f.tracer.lostWaits()
	if err := f.tracer.close(); err != nil {
		f.cfg.Log.Warn("end records of packets", "err", err)
	}
	f.tracer = nil
}
