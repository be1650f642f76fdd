package traffic

import (
	"errors"
	"math"
	"slices"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/feature/traffic/model"
	"github.com/fairlead-project/fairlead/kernel/bpf"
	"github.com/fairlead-project/fairlead/kernel/journal"
	"github.com/fairlead-project/fairlead/kernel/qdisc"
	"github.com/fairlead-project/fairlead/tenant"
	"github.com/fairlead-project/fairlead/tenant/identity"
)

// reorder makes a change of priority effective for tenants that are sending. HTB keeps a class in
// its old place while packets wait in it, which is for ever if the sender never pauses. So reorder
// sends such a tenant's packets through a second class, which starts in the new place, until the
// tenant's own class is empty. Packets may overtake each other meanwhile. The second class goes
// when bring enforces the same plans, and has time to send its packets until then.
func (f *Traffic) reorder(plans map[int]model.Plan) error {
	late := make(map[identity.Slot]bool)
	for index, u := range f.uplinks {
		p, planned := plans[index]
		if !planned || !u.out.live() || u.out.kind != qdisc.KindHTB || p.Link.HFSC {
			continue
		}
		if !ordered(*u.out.plan) && !ordered(p) { // all levels were equal, and are
			continue
		}
		d, err := qdisc.Open(f.host, index)
		if err != nil {
			return err
		}
		minors, err := d.Late(classes(p))
		d.Close()
		if err != nil {
			continue // bring notices, and reports it
		}
		for _, m := range minors {
			late[identity.Slot(m)] = true
		}
	}
	var errs []error
	beside := make(map[*shaped]identity.Slot)
	for _, t := range f.shaped {
		if !late[t.slot] {
			continue
		}
		id := math.MaxUint64 - container.ID(t.slot) // no container's
		s, _ := f.cfg.Identity.Tell(name, identity.Member{ID: id, Tenant: tenant.Key{Container: id}})
		defer f.cfg.Identity.Forget(name, id)
		if s == identity.Nobody {
			continue // all slots are taken: it has to wait until its queue is empty
		}
		beside[t] = s
	}
	if len(beside) == 0 {
		return nil
	}
	aside := func(emptied func(t *shaped) identity.Slot) error {
		var errs []error
		for index, u := range f.uplinks {
			if p, planned := plans[index]; planned && u.out.live() {
				errs = append(errs, u.out.bring(f.cfg.Journal, f.host, with(p, beside, emptied), journal.Owner{Feature: name}, f.cfg.Now()))
			}
		}
		return errors.Join(errs...)
	}
	if err := aside(func(t *shaped) identity.Slot { return t.slot }); err != nil {
		return err
	}
	var minors []uint16
	for t, s := range beside {
		errs = append(errs, f.number(t, s))
		minors = append(minors, uint16(t.slot))
	}
	for index, u := range f.uplinks {
		if u.out.live() {
			errs = append(errs, f.drain(f.host, index, u.out.kind, minors...))
		}
	}
	for t := range beside {
		errs = append(errs, f.number(t, t.slot))
	}
	return errors.Join(append(errs, aside(func(t *shaped) identity.Slot { return beside[t] }))...)
}

// with returns a plan with a second, equal class for each of some tenants. The one of the two to be
// emptied gets its ceil as its rate, so that it is served first.
func with(p model.Plan, beside map[*shaped]identity.Slot, emptied func(*shaped) identity.Slot) model.Plan {
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

// number makes a tenant's packets carry a slot, its own or another, wherever they are numbered
// already.
func (f *Traffic) number(t *shaped, s identity.Slot) error {
	return errors.Join(f.programs.setClass(t.slot, s), t.at.Vary(identify, bpf.Vars{trafficVarFlSlot: uint32(s)}))
}
