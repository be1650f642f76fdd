package traffic

import (
	"errors"
	"math"
	"slices"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/container/slot"
	"github.com/fairlead-project/fairlead/feature/traffic/model"
	"github.com/fairlead-project/fairlead/kernel/journal"
	"github.com/fairlead-project/fairlead/kernel/qdisc"
)

// reorder sees that a change of priority counts for those who are sending. HTB
// keeps a class in its old place for as long as packets wait in it, and with a
// sender that never pauses that is for ever. So such a tenant's packets are sent
// through another class for a moment, which has the new place from its beginning,
// until its own class is empty. They may overtake each other meanwhile. That other
// class goes when bring puts the same plans into force, which gives it the time to
// send what waits in it.
func (f *Traffic) reorder(plans map[int]model.Plan) error {
	late := make(map[slot.Slot]bool)
	for index, u := range f.uplinks {
		p, planned := plans[index]
		if !planned || !u.claimed || u.lost || u.kind != qdisc.KindHTB || p.Link.HFSC {
			continue
		}
		if !u.ordered && !ordered(p) { // all levels were one, and are
			continue
		}
		d, err := qdisc.Open(f.host, index)
		if err != nil {
			return err
		}
		minors, err := d.Late(classes(p))
		d.Close()
		if err != nil {
			continue // bring finds out, and tells
		}
		for _, m := range minors {
			late[slot.Slot(m)] = true
		}
	}
	var errs []error
	beside := make(map[*tenant]slot.Slot)
	for _, t := range f.tenants {
		if !late[t.slot] {
			continue
		}
		key := slot.Tenant{NetNS: math.MaxUint64, Container: container.ID(t.slot)} // nobody's
		s, err := f.cfg.Slots.Take(key)
		if err != nil {
			continue // there are that many tenants: it has to wait for its queue
		}
		defer f.cfg.Slots.Release(key)
		beside[t] = s
	}
	if len(beside) == 0 {
		return nil
	}
	aside := func(emptied func(t *tenant) slot.Slot) error {
		var errs []error
		for index, u := range f.uplinks {
			if p, planned := plans[index]; planned && u.claimed && !u.lost {
				errs = append(errs, u.bring(f.cfg.Journal, f.host, with(p, beside, emptied), journal.Owner{Feature: name}))
			}
		}
		return errors.Join(errs...)
	}
	if err := aside(func(t *tenant) slot.Slot { return t.slot }); err != nil {
		return err
	}
	var minors []uint16
	for t, s := range beside {
		errs = append(errs, f.number(t, s))
		minors = append(minors, uint16(t.slot))
	}
	for index, u := range f.uplinks {
		if u.claimed && !u.lost {
			errs = append(errs, f.drain(f.host, index, u.kind, minors...))
		}
	}
	for t := range beside {
		errs = append(errs, f.number(t, t.slot))
	}
	return errors.Join(append(errs, aside(func(t *tenant) slot.Slot { return beside[t] }))...)
}

// with gives a plan that has one class more for each of some tenants, which is
// as their own. The one of the two that is to be emptied has all of its ceil for
// a rate, so that nobody is before it.
func with(p model.Plan, beside map[*tenant]slot.Slot, emptied func(*tenant) slot.Slot) model.Plan {
	p.Classes = slices.Clone(p.Classes)
	for t, s := range beside {
		i := slices.IndexFunc(p.Classes, func(c model.Class) bool { return c.Slot == t.slot })
		if i < 0 {
			continue
		}
		c := p.Classes[i]
		c.Slot = s
		p.Classes = append(p.Classes, c)
		last := &p.Classes[i]
		if emptied(t) == s {
			last = &p.Classes[len(p.Classes)-1]
		}
		last.HTB.Rate, last.HTB.Burst = last.HTB.Ceil, last.HTB.CBurst
	}
	return p
}

// number has the packets of a tenant carry a slot, which may be another than its
// own, wherever they are numbered already.
func (f *Traffic) number(t *tenant, s slot.Slot) error {
	program, err := f.programs.identity(s)
	if err != nil {
		return err
	}
	defer program.Close()
	var errs []error
	for id := range t.members {
		errs = append(errs, f.programs.Cgroups.Put(uint64(id), uint32(s)))
	}
	for _, e := range t.ends {
		if e.sent == nil {
			continue
		}
		if err := e.sent.Replace(program); err != nil {
			// It may say one thing or the other: the next round attaches it anew.
			errs = append(errs, err, detach(&e.sent))
		}
	}
	return errors.Join(errs...)
}
