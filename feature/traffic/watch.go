package traffic

import (
	"errors"
	"time"

	"github.com/fairlead-project/fairlead/kernel/netdev"
)

// lookPause is the least time between two looks at a namespace's devices, whose owner may change
// them at any rate.
const lookPause = 20 * time.Millisecond

// watch reports changes of devices and their qdiscs in a namespace with anything of ours.
type watch struct {
	ns   *netdev.NS
	stop func() error
}

func (w *watch) close() error { return errors.Join(w.stop(), w.ns.Close()) }

// watch begins to watch a namespace.
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
	about := netdev.Interest{Causes: []netdev.Cause{netdev.LinkChanged, netdev.QdiscChanged, netdev.FilterChanged}, Pause: lookPause}
	w.stop, err = f.cfg.Roots.Monitor.Watch(own, about, func(changes []netdev.Change) {
		f.looking.Turn(func() {
			f.lookAfter(inode, changes)
		})
	})
	if err != nil {
		return errors.Join(err, own.Close())
	}
	f.watches[inode] = w
	return nil
}

// unwatch ends the watches of namespaces with nothing of ours left.
func (f *Traffic) unwatch() error {
	used := make(map[uint64]bool)
	if f.host != nil {
		used[f.host.Inode()] = f.needed(Egress) || f.needed(Ingress)
	}
	for _, t := range f.shaped {
		for at := range t.holds {
			used[at.NetNS] = true
		}
	}
	var errs []error
	for inode, w := range f.watches {
		if !used[inode] {
			delete(f.watches, inode)
			errs = append(errs, w.close())
		}
	}
	return errors.Join(errs...)
}
