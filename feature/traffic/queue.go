package traffic

import (
	"errors"
	"fmt"
	"math"
	"reflect"
	"slices"
	"time"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/feature/traffic/model"
	"github.com/fairlead-project/fairlead/kernel"
	"github.com/fairlead-project/fairlead/kernel/bpf"
	"github.com/fairlead-project/fairlead/kernel/journal"
	"github.com/fairlead-project/fairlead/kernel/netdev"
	"github.com/fairlead-project/fairlead/kernel/qdisc"
	"github.com/fairlead-project/fairlead/policy"
	"github.com/fairlead-project/fairlead/tenant"
	"github.com/fairlead-project/fairlead/tenant/identity"
)

// queue is a device with our root qdisc, present or planned.
type queue struct {
	link    model.Link
	index   int
	claimed bool        // its root qdisc is ours
	kind    qdisc.Kind  // the kind of our root qdisc
	lost    bool        // our root qdisc was replaced by another
	theirs  string      // the foreign qdisc that limits the device at least as much as ours would; empty: none
	plan    *model.Plan // in force or wanted; nil: none
	brought bool        // the kernel has confirmed the plan
	dispute dispute
	cut     bool // classes split packets into frames, or have since the root became ours
}

const (
	linkHeader = 14    // bytes of a frame beyond the MTU
	maxGSO     = 65536 // GSO_LEGACY_MAX_SIZE: the default of a device
)

// linkOf describes a device, except for its rate.
func linkOf(l netdev.Link) model.Link {
	mtu := l.MTU + linkHeader
	return model.Link{Name: l.Name, MTU: mtu, MaxPacket: max(maxGSO, mtu)}
}

// Errors that last until the host is changed.
var (
	errShaped   = errors.New("it already has a shaper of somebody else")
	errFiltered = errors.New("it has a filter of somebody else, which packets would not meet")
	errReplaced = errors.New("someone has replaced the root qdisc, which is left alone")
)

// lasting reports whether retrying is useless.
func lasting(err error) bool {
	return errors.Is(err, errShaped) || errors.Is(err, errFiltered) || errors.Is(err, errReplaced) || errors.Is(err, errLeft) || errors.Is(err, qdisc.ErrKept)
}

// replaced returns the error for a device with a root qdisc that is no longer ours. by owned it.
func replaced(by journal.Owner) error {
	if by.Container != 0 { // at the end of a veth
		return fmt.Errorf("%w: the ceil does not hold there until that one is removed", errReplaced)
	}
	return fmt.Errorf("%w: nothing is guaranteed there until that one, or all containers' policy, is removed", errReplaced)
}

// bring makes the device's root qdisc ours, with the classes of p below it. It redoes what other
// software has removed or changed since, unless that keeps happening: errLeft.
func (q *queue) bring(j *journal.Journal, ns *netdev.NS, p model.Plan, by journal.Owner, now time.Time) error {
	known := q.brought && reflect.DeepEqual(*q.plan, p)
	q.plan, q.brought = &p, false
	if q.lost {
		if value, err := qdisc.Root(ns, q.index).Read(); err != nil || value != qdisc.Default {
			return errors.Join(replaced(by), err)
		}
		q.claimed, q.lost = false, false
	}
	kind := kindOf(p)
	if err := q.claim(j, ns, kind, p.Root.Ceil, by); err != nil {
		return err
	}
	d, err := qdisc.Open(ns, q.index)
	if err != nil {
		return err
	}
	defer d.Close()
	counted := false // the dispute has counted this change: it counts once, however far it went
	if known {
		differs, err := d.Differs(kind, classes(p))
		switch {
		case err != nil: // Bring reports it
		case !differs && !q.cut:
			q.brought = true
			return nil
		case differs && !q.dispute.again(now):
			q.brought = true
			return left("its classes were changed")
		}
		counted = differs
	}
	q.cut = q.cut || p.Split > 0
	_, err = d.Bring(kind, classes(p))
	if !errors.Is(err, qdisc.ErrNotOurs) {
		q.brought = err == nil
		return err
	}
	value, err := qdisc.Root(ns, q.index).Read()
	switch {
	case err != nil:
		return err
	case value != qdisc.Default:
		q.lost = true
		return replaced(by)
	case !counted && !q.dispute.again(now):
		q.brought = true
		return left("the root qdisc was removed")
	}
	q.claimed = false
	return q.bring(j, ns, p, by, now)
}

// live reports whether the classes are ours.
func (q *queue) live() bool { return q.claimed && !q.lost }

// widen raises the length of the frames that packets are split into.
func (q *queue) widen(ns *netdev.NS, frame int) error {
	if !q.live() || q.plan.Split == 0 || q.plan.Split >= frame {
		return nil
	}
	d, err := qdisc.Open(ns, q.index)
	if err != nil {
		return err
	}
	defer d.Close()
	err = d.Widen(q.kind, frame)
	if errors.Is(err, journal.ErrGone) || errors.Is(err, qdisc.ErrNotOurs) {
		return nil // the next look notices
	}
	if err != nil {
		return err
	}
	p := *q.plan // in force as of this call
	p.Classes = slices.Clone(p.Classes)
	for i, c := range p.Classes {
		if c.Split > 0 {
			p.Classes[i].Split = max(c.Split, frame)
		}
	}
	p.Split, q.plan = frame, &p
	return nil
}

// ordered reports whether a plan has classes at different levels.
func ordered(p model.Plan) bool {
	return slices.ContainsFunc(p.Classes, func(c model.Class) bool { return c.HTB.Prio != p.Classes[0].HTB.Prio })
}

// classes lists the classes of a plan.
func classes(p model.Plan) []qdisc.Class {
	out := make([]qdisc.Class, 0, len(p.Classes)+1)
	out = append(out, qdisc.Class{Minor: qdisc.MinorTop, HTB: p.Root, HFSC: p.Top})
	for _, c := range p.Classes {
		out = append(out, qdisc.Class{Minor: minorOf(c.Slot), HTB: c.HTB, HFSC: c.HFSC, Split: c.Split})
	}
	return out
}

// minorOf returns the minor of the class of a slot.
func minorOf(s identity.Slot) uint16 {
	if s == identity.Nobody {
		return qdisc.MinorDefault
	}
	return uint16(s)
}

// kindOf returns the kind of qdisc that enforces a plan.
func kindOf(p model.Plan) qdisc.Kind {
	if p.Link.HFSC {
		return qdisc.KindHFSC
	}
	return qdisc.KindHTB
}

func limitText(l qdisc.Limit) string {
	if l.Rate == 0 {
		return l.Kind
	}
	return l.Kind + " of " + policy.FormatRate(l.Rate)
}

// claim makes the device's root qdisc ours, without classes. Packets in a root of ours of another kind
// are lost. A foreign root that limits the device to less than most, in bit/s, stays.
func (q *queue) claim(j *journal.Journal, ns *netdev.NS, kind qdisc.Kind, most uint64, by journal.Owner) error {
	if q.claimed && q.kind == kind {
		return nil
	}
	root := qdisc.Root(ns, q.index)
	value, err := root.Read()
	if err != nil {
		return err
	}
	if l, limits := qdisc.Limits(value); limits && l.Rate < most {
		mend := "its removal"
		if by.Container == 0 {
			mend += fmt.Sprintf(", and its rate given by the agent's flag --uplink %s=RATE", q.link.Name)
		}
		return fmt.Errorf("%w (%s), which is left in place; possible with: %s", errShaped, limitText(l), mend)
	}
	// An earlier agent may have turned the knobs for a container that has ended.
	knobs := q.knobs(ns)
	if err := j.Reassign(func(e journal.Entry) bool {
		return e.Owner.Feature == by.Feature && slices.Contains(knobs, e.Ref)
	}, by); err != nil {
		return err
	}
	length := qdisc.QueueLen(ns, q.index)
	if n, err := length.Read(); err != nil {
		return err
	} else if n == "0" {
		if err := j.Turn(length, qdisc.DefaultQueueLen, by); err != nil {
			return err
		}
	}
	if err := j.Turn(root, qdisc.Ours(kind), by); err != nil {
		return err
	}
	q.claimed, q.kind = true, kind
	return nil
}

// knobs lists the knobs that claim may have turned.
func (q *queue) knobs(ns *netdev.NS) []journal.Ref {
	return []journal.Ref{qdisc.QueueLen(ns, q.index).Ref(), qdisc.Root(ns, q.index).Ref()}
}

// A device is brought back to its plan at most disputes times within disputeTime. After that it is left
// as it is.
const (
	disputes    = 3
	disputeTime = time.Hour
)

// errLeft reports a device where other software keeps undoing our changes.
var errLeft = errors.New("somebody has undone it again and again, and it is left so for an hour")

// left wraps errLeft with the change that was undone.
func left(what string) error {
	return fmt.Errorf("%w (%s, %d times); possible with: an end to what does so, and the policy set anew", errLeft, what, disputes)
}

// dispute counts how often other software undid a change. The zero value counts from 0.
type dispute struct{ at []time.Time }

// again counts one more undoing, and reports whether to redo the change.
func (d *dispute) again(now time.Time) bool {
	d.at = slices.DeleteFunc(d.at, func(t time.Time) bool { return now.Sub(t) >= disputeTime })
	if len(d.at) >= disputes {
		return false
	}
	d.at = append(d.at, now)
	return true
}

// undo restores only the given knobs.
func (f *Traffic) undo(refs ...journal.Ref) error {
	return f.restore(func(e journal.Entry) bool { return slices.Contains(refs, e.Ref) })
}

// restore undoes this feature's matching changes; nil: all.
func (f *Traffic) restore(match func(journal.Entry) bool) error {
	_, err := f.cfg.Journal.Restore(kernel.Opener(f.cfg.Roots), func(e journal.Entry) bool {
		return e.Owner.Feature == name && (match == nil || match(e))
	})
	if err != nil {
		return fmt.Errorf("traffic: %w", err)
	}
	return nil
}

// release undoes everything after the last tenant.
func (f *Traffic) release() error {
	var errs []error
	for _, u := range f.uplinks {
		errs = append(errs, u.close())
	}
	clear(f.uplinks)
	f.divides, f.forwards = nil, false
	err := errors.Join(append(errs, f.unwatch(), f.restore(nil))...)
	f.unreleased = err != nil
	return err
}

// reorder makes a change of priority effective for tenants that are sending. HTB keeps a class in its
// old place while packets wait in it, which is for ever if the sender never pauses. So reorder sends
// such a tenant's packets through a second class, which starts in the new place, until the tenant's own
// class is empty. Packets may overtake each other meanwhile. bring removes the second class when it
// enforces the same plans, which leaves the class time to send its packets.
func (f *Traffic) reorder(plans map[int]model.Plan) error {
	late := make(map[identity.Slot]bool)
	for index, u := range f.uplinks {
		p, planned := plans[index]
		if !planned || !u.out.live() || u.out.kind != qdisc.KindHTB || p.Link.HFSC {
			continue
		}
		if !ordered(*u.out.plan) && !ordered(p) { // no level has changed
			continue
		}
		d, err := qdisc.Open(f.host, index)
		if err != nil {
			return err
		}
		minors, err := d.Late(classes(p))
		d.Close()
		if err != nil {
			continue // bring notices and reports it
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
		id := math.MaxUint64 - container.ID(t.slot) // no container has it
		s, _ := f.cfg.Identity.Tell(name, identity.Member{ID: id, Tenant: tenant.Key{Container: id}})
		defer f.cfg.Identity.Forget(name, id)
		if s == identity.Nobody {
			continue // all slots are taken: the tenant must wait until its queue is empty
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

// with returns a plan with a second, equal class for each of some tenants. The class that is to be
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

// number changes the slot that a tenant's packets carry, wherever they carry one already.
func (f *Traffic) number(t *shaped, s identity.Slot) error {
	return errors.Join(f.programs.setClass(t.slot, s), t.at.Vary(identify, bpf.Vars{trafficVarFlSlot: uint32(s)}))
}
