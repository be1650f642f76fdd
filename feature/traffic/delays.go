package traffic

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/fairlead-project/fairlead/feature/traffic/delay"
	"github.com/fairlead-project/fairlead/feature/traffic/model"
	"github.com/fairlead-project/fairlead/hist"
	"github.com/fairlead-project/fairlead/kernel/qdisc"
)

// atOnce limits the callers that measure at the same time, because each one slows down every packet at
// every root qdisc of the host.
const atOnce = 4

// Measure is Read after a time d, with the delays of packets that were enqueued and sent in that time;
// if delays are always measured, of all packets sent in it. It waits while atOnce others measure. It
// returns an error if ctx ends. With d = 0 it is Read.
func (f *Traffic) Measure(ctx context.Context, d time.Duration) (m Reading, err error) {
	if d == 0 {
		return f.Read(), nil
	}
	select {
	case f.measuring <- struct{}{}:
		defer func() { <-f.measuring }()
	case <-ctx.Done():
		return m, ctx.Err()
	}
	before := f.Read()
	cut := make(map[delay.Class]bool)
	classes := make([]delay.Class, 0, len(before.Rows))
	was := make(map[delay.Class]*hist.Histogram)
	for _, row := range before.Rows {
		classes = append(classes, row.class)
		cut[row.class] = row.Split > 0
		if row.Delays != nil {
			was[row.class] = row.Delays
		}
	}
	var meter *delay.Meter // only for this call
	var failed error
	if len(classes) > 0 && len(was) == 0 {
		if meter, failed = delay.Open(f.host.Inode(), classes); failed == nil {
			defer meter.Close()
		}
	}
	select {
	case <-ctx.Done():
		return m, ctx.Err()
	case <-time.After(d):
	}
	m = f.Read()
	if m.Err = failed; meter == nil {
		m.since(was, before.Missed)
		return m, nil
	}
	m.Err = m.fill(meter, cut)
	return m, nil
}

// since subtracts an earlier measurement.
func (r *Reading) since(was map[delay.Class]*hist.Histogram, missed uint64) {
	for i, row := range r.Rows {
		if before := was[row.class]; before != nil && row.Delays != nil {
			r.Rows[i].Delays = row.Delays.Since(before)
		}
	}
	if r.Missed >= missed { // else the meter has restarted
		r.Missed -= missed
	}
}

// follow measures the delays of all classes, if they are always measured. Without classes, no program
// is in the kernel. Shaping does not depend on it, so an error is only logged; Support reports whether
// measuring works at all.
func (f *Traffic) follow() {
	if !f.cfg.Delays {
		return
	}
	classes, cut := f.classes()
	var err error
	switch {
	case len(classes) == 0:
		err = f.unfollow()
	case f.meter == nil:
		f.meter, err = delay.Open(f.host.Inode(), classes)
	default:
		// Counts made while packets are split are meaningless: see fill.
		same := slices.DeleteFunc(slices.Clone(classes), func(c delay.Class) bool { return cut[c] != f.cut[c] })
		err = errors.Join(f.meter.Follow(same), f.meter.Follow(classes))
	}
	f.cut = cut
	was := f.unmeasured
	f.unmeasured = fmt.Sprint(err)
	if err != nil && f.unmeasured != was {
		f.cfg.Log.Error("delays are not measured, or not of all", "err", err)
	}
}

// unfollow undoes follow.
func (f *Traffic) unfollow() error {
	if f.meter == nil {
		return nil
	}
	err := f.meter.Close()
	f.meter = nil
	return err
}

// classes lists the classes of all our roots, and separately those that split packets.
func (f *Traffic) classes() (all []delay.Class, cut map[delay.Class]bool) {
	cut = make(map[delay.Class]bool)
	minors := make(map[Direction][]uint16)
	for _, t := range f.shaped {
		for _, way := range directions() {
			if asked(t.due[way]) {
				minors[way] = append(minors[way], uint16(t.slot))
			}
		}
	}
	add := func(h *hold, minors ...uint16) {
		if !h.live() {
			return
		}
		for _, minor := range append(minors, qdisc.MinorDefault) {
			c := delay.Class{NetNS: h.of.NetNS, Index: h.index, Minor: minor}
			all = append(all, c)
			cut[c] = slices.ContainsFunc(h.plan.Classes, func(c model.Class) bool { return minorOf(c.Slot) == minor && c.Split > 0 })
		}
	}
	for _, u := range f.uplinks {
		add(u.out, slices.Clip(minors[Egress])...)
		add(u.in, slices.Clip(minors[Ingress])...)
	}
	for _, t := range f.shaped {
		for _, h := range t.holds {
			add(h)
		}
	}
	return all, cut
}

// fill fills in the delays of classes whose packets leave as they were enqueued. It omits classes that
// split packets, or did: the frames of a split packet are other skbs, at addresses without a stamp.
func (r *Reading) fill(meter *delay.Meter, cut map[delay.Class]bool) (err error) {
	for i, row := range r.Rows {
		if err == nil && row.Split == 0 && !cut[row.class] {
			r.Rows[i].Delays, err = meter.Read(row.class)
		}
	}
	if err == nil {
		r.Missed, err = meter.Missed()
	}
	return err
}
