package latency

import (
	"context"
	"errors"
	"time"

	"github.com/fairlead-project/fairlead/container"
)

// Traced are records of one container's packets.
type Traced struct {
	Records []Record
	// Next is the number to ask for next. Of the numbers from what was asked for up
	// to it those that are missing were overwritten before.
	Next   uint64
	Missed uint64
	Lost   uint64 // of all tenants, for which the kernel's buffer had no room, since the meter began
}

// Trace gives the records of one container's packets from a number on, 0: from now
// on; so many at the most. It waits no longer than over for the first of them, and
// records on for a while after it. ok is false if the container is not measured.
func (f *Latency) Trace(ctx context.Context, id container.ID, from uint64, most int, over time.Duration) (out Traced, ok bool, err error) {
	f.mu.Lock()
	t := f.member[id]
	if t == nil {
		f.mu.Unlock()
		return out, false, nil
	}
	if f.tracer == nil {
		if f.tracer, err = newTracer(f.meter); err != nil {
			f.tracer = nil
			f.mu.Unlock()
			return out, true, err
		}
	}
	tracer, s := f.tracer, t.slot
	tr := tracer.want(s, time.Now())
	if !t.traced {
		t.traced = true
		if err = errors.Join(f.meter.resume(), f.follow()); err == nil {
			time.AfterFunc(lease, f.lapse)
		}
	}
	f.mu.Unlock()
	if err != nil {
		return out, true, err
	}
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
		err = f.meter.maps.Lost.Get(&out.Lost)
	}
	return out, true, err
}

// lapse ends the recording of those that nobody has asked for lately.
func (f *Latency) lapse() {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.tracer == nil {
		return
	}
	changed, left := false, 0
	for _, s := range f.tracer.lapsed(time.Now()) {
		for _, t := range f.tenants {
			if t.slot == s {
				t.traced, changed = false, true
			}
		}
	}
	for _, t := range f.tenants {
		if t.traced {
			left++
		}
	}
	if changed {
		if err := f.follow(); err != nil {
			f.cfg.Log.Warn("end records of packets", "err", err)
		}
	}
	if left > 0 {
		time.AfterFunc(lease/4, f.lapse)
		return
	}
	if err := f.tracer.close(); err != nil {
		f.cfg.Log.Warn("end records of packets", "err", err)
	}
	f.tracer = nil
}
