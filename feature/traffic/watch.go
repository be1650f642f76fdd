package traffic

import (
	"errors"
	"time"

	"github.com/fairlead-project/fairlead/kernel/netdev"
)

// lookPause is the least time between two looks at the IFBs of a namespace whose
// owner may change devices as often as it likes.
const lookPause = 20 * time.Millisecond

// watch reports changed devices in a namespace with IFBs, or in which packets are
// split.
type watch struct {
	ns   *netdev.NS
	stop func() error
}

func (w *watch) close() error { return errors.Join(w.stop(), w.ns.Close()) }

// watch begins to watch a namespace. Packets that are led to an IFB that has gone
// or is down are lost, and so are frames that are longer than those into which
// packets are split.
func (f *Traffic) watch(ns *netdev.NS) error {
	inode := ns.Inode()
	if f.watches[inode] != nil {
		return nil
	}
	own, err := ns.Dup()
	if err != nil {
		return err
	}
	w := &watch{ns: own}
	w.stop, err = own.Watch(func() {
		f.lookAfter(inode)
		time.Sleep(lookPause)
	})
	if err != nil {
		return errors.Join(err, own.Close())
	}
	f.watches[inode] = w
	return nil
}

// led calls fn for all IFBs in a namespace to which packets are led.
func (f *Traffic) led(inode uint64, fn func(*ingress)) {
	for _, u := range f.uplinks {
		if f.host != nil && f.host.Inode() == inode && u.ingress.inbound.Len() > 0 {
			fn(&u.ingress)
		}
	}
	for _, t := range f.tenants {
		if s := t.sends[inode]; s != nil && s.inbound.Len() > 0 {
			fn(&s.ingress)
		}
	}
}

// lookAfter stops leading packets to IFBs that no longer accept any, and stops
// the drops of frames at a device whose MTU was raised.
func (f *Traffic) lookAfter(inode uint64) {
	f.mu.Lock()
	defer f.mu.Unlock()
	w := f.watches[inode]
	if w == nil {
		return
	}
	list := func() ([]netdev.Link, error) { return w.ns.Links(netdev.MostLinks) }
	if f.host != nil && f.host.Inode() == inode {
		list = f.listing.Links
	}
	links, err := list()
	up := make(map[int]bool)
	for _, l := range links {
		up[l.Index] = l.Up
	}
	f.led(inode, func(i *ingress) {
		if err != nil || up[i.index] {
			return
		}
		f.cfg.Log.Warn("someone has removed or set down an IFB: what it shaped is not shaped until the next change", "index", i.index, "for", i.link.Name)
		if err := i.close(); err != nil {
			f.cfg.Log.Error("packets may still be led to an IFB that takes none", "for", i.link.Name, "err", err)
		}
	})
	if f.host != nil && f.host.Inode() == inode {
		if err := f.widen(); err != nil {
			f.cfg.Log.Error("frames may be dropped: an uplink's MTU was raised", "err", err)
		}
	}
}

// cuts says whether the packets of some class at an uplink are split.
func (f *Traffic) cuts() bool {
	for _, u := range f.uplinks {
		if u.cuts() || u.ingress.cuts() {
			return true
		}
	}
	return false
}

// widen splits packets into frames of the uplinks' present MTU where that was
// raised, because longer frames would be dropped. It does no more: a plan for the
// new MTU may be refused, and is left to the next round.
func (f *Traffic) widen() error {
	var errs []error
	for index, u := range f.uplinks {
		if !u.cuts() && !u.ingress.cuts() {
			continue
		}
		l, err := f.host.Link(index)
		if errors.Is(err, netdev.ErrNoLink) {
			continue // and nothing of it is left
		}
		if err != nil {
			errs = append(errs, err)
			continue
		}
		frame := linkOf(l).Frame()
		errs = append(errs, u.widen(f.host, frame), u.ingress.widen(f.host, frame))
	}
	return errors.Join(errs...)
}

// unwatch ends the watches of namespaces in which no packets are led to IFBs, or
// split, any more.
func (f *Traffic) unwatch() error {
	var errs []error
	for inode, w := range f.watches {
		used := f.host != nil && f.host.Inode() == inode && f.cuts()
		f.led(inode, func(*ingress) { used = true })
		if !used {
			delete(f.watches, inode)
			errs = append(errs, w.close())
		}
	}
	return errors.Join(errs...)
}
