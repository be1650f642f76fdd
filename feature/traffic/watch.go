package traffic

import (
	"errors"
	"time"

	"github.com/fairlead-project/fairlead/kernel/netdev"
)

// lookPause is the least time between two looks at a namespace's devices, whose owner may change
// them at any rate.
const lookPause = 20 * time.Millisecond

// watch begins to watch a namespace with anything of ours for changes of devices and their qdiscs.
func (f *Traffic) watch(ns *netdev.NS) error {
	inode := ns.Inode()
	if f.watches[inode] != nil {
		return nil
	}
	about := netdev.Interest{Causes: []netdev.Cause{netdev.LinkChanged, netdev.QdiscChanged, netdev.FilterChanged}, Pause: lookPause}
	stop, err := f.cfg.Roots.Monitor.Watch(ns, about, func(changes []netdev.Change) {
		f.looking.Turn(func() {
			f.lookAfter(inode, changes)
		})
	})
	if err != nil {
		return err
	}
	f.watches[inode] = stop
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
	for inode, stop := range f.watches {
		if !used[inode] {
			delete(f.watches, inode)
			errs = append(errs, stop())
		}
	}
	return errors.Join(errs...)
}
