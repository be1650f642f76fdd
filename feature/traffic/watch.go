package traffic

import (
	"errors"
	"time"

	"github.com/fairlead-project/fairlead/kernel/netdev"
)

// lookPause is the least between two looks after the IFBs of a namespace, in
// which whoever lives there may change devices as often as it likes.
const lookPause = 20 * time.Millisecond

// watch is what tells of changed devices in a namespace where there are IFBs.
type watch struct {
	ns   *netdev.NS
	stop func() error
}

func (w *watch) close() error { return errors.Join(w.stop(), w.ns.Close()) }

// watch begins to look after the IFBs of a namespace: packets that are led to
// one that has gone, or that is down, are lost.
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
		if f.host != nil && f.host.Inode() == inode && u.ingress.inbound != nil {
			fn(&u.ingress)
		}
	}
	for _, t := range f.tenants {
		for key, e := range t.ends {
			if key.netns == inode && e.sends.inbound != nil {
				fn(&e.sends)
			}
		}
	}
}

// lookAfter ends that packets are led to IFBs that do not take any more.
func (f *Traffic) lookAfter(inode uint64) {
	f.mu.Lock()
	defer f.mu.Unlock()
	w := f.watches[inode]
	if w == nil {
		return
	}
	f.led(inode, func(i *ingress) {
		l, err := w.ns.Link(i.index)
		if err == nil && l.Up || err != nil && !errors.Is(err, netdev.ErrNoLink) {
			return
		}
		f.cfg.Log.Warn("someone has removed or set down an IFB: what it shaped is not shaped until the next change", "index", i.index, "for", i.link.Name)
		if err := i.close(); err != nil {
			f.cfg.Log.Error("packets may still be led to an IFB that takes none", "for", i.link.Name, "err", err)
		}
	})
}

// unwatch ends the watches of namespaces in which no packets are led to IFBs
// any more.
func (f *Traffic) unwatch() error {
	var errs []error
	for inode, w := range f.watches {
		used := false
		f.led(inode, func(*ingress) { used = true })
		if !used {
			delete(f.watches, inode)
			errs = append(errs, w.close())
		}
	}
	return errors.Join(errs...)
}
