package traffic

import (
	"errors"
	"fmt"

	"github.com/cilium/ebpf"

	"github.com/fairlead-project/fairlead/feature/traffic/model"
	"github.com/fairlead-project/fairlead/kernel/journal"
	"github.com/fairlead-project/fairlead/kernel/netdev"
	"github.com/fairlead-project/fairlead/kernel/qdisc"
)

// ingress is what an uplink receives, led through the queue of an IFB.
type ingress struct {
	queue                 // of the IFB; its index is 0 while there is none
	program *ebpf.Program // fl_inbound
	inbound *qdisc.Attachment
}

// close ends that packets are led to the IFB, which stays.
func (i *ingress) close() error {
	err := detach(&i.inbound)
	if i.program != nil {
		err = errors.Join(err, i.program.Close())
		i.program = nil
	}
	i.index, i.claimed, i.lost = 0, false, false
	return err
}

// receive puts the plan of what an uplink receives into force.
func (f *Traffic) receive(u *uplink, plans map[int]model.Plan) error {
	i := &u.ingress
	by := journal.Owner{Feature: name}
	if plans == nil {
		return f.unshare(u)
	}
	if err := f.cfg.Journal.Turn(f.host.IFB(u.index), netdev.OurIFB, by); err != nil {
		return err
	}
	index, err := f.host.Index(netdev.IFBName(u.index))
	if err != nil {
		return err
	}
	if i.index != index { // new, or someone has removed the last one
		if err := i.close(); err != nil {
			return err
		}
		i.index = index
	}
	// Without it what is routed would lose its tag on the way.
	if err := f.cfg.Journal.Turn(qdisc.ForwardPriority(f.host), "0", by); err != nil {
		return err
	}
	if err := i.bring(f.cfg.Journal, f.host, plans[u.index], by); err != nil {
		if i.lost {
			err = errors.Join(err, detach(&i.inbound))
		}
		return fmt.Errorf("what it receives: %w", err)
	}
	if l, err := f.host.Link(index); err != nil {
		return err
	} else if !l.Up {
		return fmt.Errorf("what it receives is not shared: someone has set %s down", l.Name)
	}
	if err := f.watch(); err != nil {
		return err
	}
	if i.inbound == nil {
		if i.program, err = f.programs.inbound(index); err != nil {
			return err
		}
	}
	// The last on the hook: who is before it (an early drop) decides first, and
	// who would come after it would see nothing.
	return f.put(&i.inbound, qdisc.Hook{NS: f.host, Index: u.index, Last: true, Name: "inbound"}, i.program)
}

// watch begins to look after the IFBs: packets that are led to one that has gone,
// or that is down, are lost.
func (f *Traffic) watch() (err error) {
	if f.unwatch == nil {
		f.unwatch, err = f.host.Watch(f.lookAfter)
	}
	return err
}

// lookAfter ends the sharing at uplinks whose IFB does not take packets any more.
func (f *Traffic) lookAfter() {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, u := range f.uplinks {
		if f.host == nil || u.ingress.inbound == nil {
			continue
		}
		l, err := f.host.Link(u.ingress.index)
		if err == nil && l.Up || err != nil && !errors.Is(err, netdev.ErrNoLink) {
			continue
		}
		f.cfg.Log.Warn("someone has removed or set down an IFB: what the uplink receives is not shared until the next change", "device", netdev.IFBName(u.index), "uplink", u.link.Name)
		if err := u.ingress.close(); err != nil {
			f.cfg.Log.Error("packets may still be led to an IFB that takes none", "uplink", u.link.Name, "err", err)
		}
	}
}

// stopWatch ends watch.
func (f *Traffic) stopWatch() error {
	if f.unwatch == nil {
		return nil
	}
	err := f.unwatch()
	f.unwatch = nil
	return err
}

// unshare ends the sharing of what an uplink receives. What waits is delivered.
func (f *Traffic) unshare(u *uplink) error {
	i := &u.ingress
	index, kind, claimed := i.index, i.kind, i.claimed && !i.lost
	errs := []error{i.close()}
	if index == 0 {
		return errors.Join(errs...)
	}
	if claimed {
		errs = append(errs, f.drain(index, kind))
	}
	q := queue{index: index}
	errs = append(errs, f.undo(append(q.knobs(f.host), f.host.IFB(u.index).Ref())...))
	return errors.Join(errs...)
}

// drain waits, for a moment, until all has left our root of a device.
func (f *Traffic) drain(index int, kind qdisc.Kind) error {
	d, err := qdisc.Open(f.host, index)
	if err != nil {
		return err
	}
	defer d.Close()
	if err := d.Drain(kind); err != nil && !errors.Is(err, journal.ErrGone) && !errors.Is(err, qdisc.ErrNotOurs) {
		return err
	}
	return nil
}
