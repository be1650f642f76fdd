package traffic

import (
	"errors"
	"slices"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/feature/traffic/model"
	"github.com/fairlead-project/fairlead/hook"
	"github.com/fairlead-project/fairlead/kernel/journal"
	"github.com/fairlead-project/fairlead/kernel/netdev"
	"github.com/fairlead-project/fairlead/kernel/qdisc"
)

// ingress redirects what devices receive to the queue of an IFB. The devices are an uplink, or the
// host ends of a tenant's veths, which receive what it sends.
type ingress struct {
	queue            // of the IFB; its index is 0 while there is none
	inbound hook.Set // redirects packets there
}

// close stops the redirection to the IFB, which stays.
func (i *ingress) close() error { return i.inbound.Close() }

// lead redirects what the devices at receive to an IFB named for device of, whose queue follows the
// plan. program redirects the packets.
func (f *Traffic) lead(ns *netdev.NS, of int, at []int, i *ingress, p model.Plan, by journal.Owner, program string) error {
	if err := f.watch(ns); err != nil {
		return err
	}
	ifb := ns.IFB(of)
	if i.index != 0 {
		index, err := ns.Index(netdev.IFBName(of))
		if err != nil && !errors.Is(err, netdev.ErrNoLink) {
			return err
		}
		if index != i.index && !i.dispute.again(f.cfg.Now()) {
			return errors.Join(left("the IFB was removed"), i.close())
		}
	}
	if err := f.cfg.Journal.Turn(ifb, netdev.OurIFB, by); err != nil {
		return err
	}
	index, err := ns.Index(netdev.IFBName(of))
	if err != nil {
		return err
	}
	if i.index != index { // new, or the last one was removed
		if err := f.unqueue(ns, i); err != nil {
			return err
		}
		i.index = index
	}
	if err := i.bring(f.cfg.Journal, ns, p, by, f.cfg.Now()); err != nil {
		if i.lost {
			err = errors.Join(err, i.close())
		}
		return err
	}
	if l, err := ns.Link(index); err != nil {
		return err
	} else if !l.Up {
		if !i.dispute.again(f.cfg.Now()) {
			return errors.Join(left("the IFB was set down"), i.close())
		}
		if err := ns.RaiseIFB(of); err != nil {
			return err
		}
	}
	errs := []error{i.inbound.Drop(func(d container.Device, _ bool, _ string) bool { return !slices.Contains(at, d.Index) })}
	for _, dev := range at {
		place := hook.Place{
			Device: container.Device{NetNS: ns.Inode(), Index: dev}, Stage: hook.Ceil, Name: "inbound", Owner: journal.Owner{Feature: name},
		}
		errs = append(errs, i.inbound.PutCopy(f.cfg.Ends, place, f.programs.leading(program, index)))
	}
	return errors.Join(errs...)
}

// unqueue forgets the IFB.
func (f *Traffic) unqueue(ns *netdev.NS, i *ingress) error {
	err := i.close()
	if i.index != 0 {
		err = errors.Join(err, f.undo(i.knobs(ns)...))
	}
	i.index, i.claimed, i.lost, i.brought = 0, false, false, false
	return err
}

// unlead undoes lead, also that of an earlier agent. Waiting packets are delivered.
func (f *Traffic) unlead(ns *netdev.NS, of int, i *ingress) error {
	errs := []error{i.close()}
	if i.claimed && !i.lost {
		errs = append(errs, f.drain(ns, i.index, i.kind))
	}
	if i.index == 0 {
		index, err := ns.Index(netdev.IFBName(of))
		if err != nil && !errors.Is(err, netdev.ErrNoLink) {
			return err
		}
		i.index = index
	}
	refs := append(i.knobs(ns), ns.IFB(of).Ref())
	err := f.undo(refs...)
	if err == nil { // else the next call goes on
		i.forget()
		i.index = 0
	}
	return errors.Join(append(errs, err, f.unwatch())...)
}

// drain waits briefly until our root of a device, or some of its classes, are empty.
func (f *Traffic) drain(ns *netdev.NS, index int, kind qdisc.Kind, minors ...uint16) error {
	d, err := qdisc.Open(ns, index)
	if err != nil {
		return err
	}
	defer d.Close()
	if err := d.Drain(kind, minors...); err != nil && !errors.Is(err, journal.ErrGone) && !errors.Is(err, qdisc.ErrNotOurs) {
		return err
	}
	return nil
}
