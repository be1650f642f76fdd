package traffic

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/kernel/netdev"
	"github.com/fairlead-project/fairlead/kernel/qdisc"
)

const (
	// lookEvery is the interval at which lookAround checks what netlink does not report.
	lookEvery = 2 * time.Second
	// tenantPause is the shortest time between two looks at one tenant because of netlink events: every
	// change of the container's own device causes one. An earlier event waits for the next periodic look.
	tenantPause = 500 * time.Millisecond
)

// Notify implements feature.Notifier.
func (f *Traffic) Notify(changed func(container.ID)) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.changed = changed
}

// lookAgain calls lookAround every lookEvery until done is closed.
func (f *Traffic) lookAgain(done chan struct{}) {
	tick := time.NewTicker(lookEvery)
	defer tick.Stop()
	for {
		select {
		case <-done:
			return
		case <-tick.C:
			f.looking.Turn(f.lookAround)
		}
	}
}

// lookAround restores what other software undid without a netlink event: detached programs, and the
// sysctl. Apply, which the agent repeats every few minutes, checks the rest.
func (f *Traffic) lookAround() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.looking.Begin()
	defer f.looking.End()
	if f.host == nil || f.programs == nil {
		return
	}
	value, err := qdisc.ForwardPriority(f.cfg.Roots.Proc, f.host).Read()
	forward := f.forwards && err == nil && value != "0"
	for _, u := range f.uplinks {
		if forward || u.out.set.Lost() || u.in.set.Lost() {
			f.restoreUplink(u)
		}
	}
	for _, t := range f.shaped {
		if t.touched || t.lost() {
			f.reidentify(t)
		}
	}
}

// lost reports whether a program of the tenant was detached.
func (t *shaped) lost() bool {
	lost := t.at.Lost()
	for _, h := range t.holds {
		lost = lost || h.set.Lost()
	}
	return lost || t.socket != nil && t.socket.detached()
}

// lookAfter restores what other software undid at changed devices of a namespace, and notifies the
// tenants if uplinks appear, disappear or change. First it ends redirection to an IFB that is down or
// gone, and drops at a device with a raised MTU.
func (f *Traffic) lookAfter(inode uint64, changes []netdev.Change) {
	told := func(index int) bool { return netdev.Concern(changes, index) }
	f.mu.Lock()
	defer f.mu.Unlock()
	f.looking.Begin()
	defer f.looking.End()
	if f.watches[inode] == nil || f.programs == nil {
		return
	}
	for h := range f.all() {
		if h.of.NetNS != inode || !h.ifb() || h.set.Len()+len(h.led) == 0 || !told(h.index) {
			continue
		}
		if err := f.spare(h); err != nil {
			f.cfg.Log.Error("packets may still be led to an IFB that takes none", "for", h.link.Name, "err", err)
		}
	}
	if f.host != nil && f.host.Inode() == inode {
		if slices.ContainsFunc(changes, func(c netdev.Change) bool { return c.Cause == netdev.LinkChanged || c.Cause == netdev.Overrun }) {
			was := f.links()
			if err := f.widen(); err != nil {
				f.cfg.Log.Error("uplinks are not known, or frames may be dropped where an MTU was raised", "err", err)
			}
			if f.links() != was { // Apply divides them
				f.tellAll()
			}
		}
		for _, u := range f.uplinks {
			if told(u.out.index) || u.in.index != 0 && told(u.in.index) {
				f.restoreUplink(u)
			}
		}
	}
	for _, t := range f.shaped {
		touched := slices.ContainsFunc(t.Ends(), func(e container.End) bool { return e.NetNS == inode && told(e.Index) })
		for at, h := range t.holds {
			touched = touched || at.NetNS == inode && h.index != 0 && told(h.index)
		}
		switch {
		case !touched:
		case time.Since(t.looked) < tenantPause:
			t.touched = true
		default:
			f.reidentify(t)
		}
	}
}

// spare ends the redirection to an IFB that is down or gone.
func (f *Traffic) spare(h *hold) error {
	ns, err := f.find.Open(h.path, h.of.NetNS)
	if err != nil {
		return nil // the namespace has gone with its packets
	}
	defer ns.Close()
	if l, err := ns.Link(h.index); l.Up || err != nil && !errors.Is(err, netdev.ErrNoLink) {
		return nil
	}
	f.cfg.Log.Warn("somebody has removed or set down an IFB", "index", h.index, "for", h.link.Name)
	return h.part(ns)
}

// links describes the uplinks, for comparison.
func (f *Traffic) links() (all string) {
	for _, index := range slices.Sorted(maps.Keys(f.uplinks)) {
		all += fmt.Sprint(index, f.uplinks[index].out.link)
	}
	return all
}

// restoreUplink restores an uplink's plans. It notifies all tenants if the result changes.
func (f *Traffic) restoreUplink(u *uplink) {
	was := u.whys()
	for _, h := range []*hold{u.out, u.in} {
		if h.plan != nil {
			h.why = f.renew(h, h.plan)
		}
	}
	if u.whys() != was {
		f.tellAll()
	}
}

// reidentify restores a tenant's devices. It notifies the tenant if the result changes.
func (f *Traffic) reidentify(t *shaped) {
	was := t.unheld()
	t.touched, t.looked = false, time.Now()
	if err := f.identify(context.Background(), t); err != nil || t.unheld() != was {
		f.tell(t)
	}
}

// unheld describes what the tenant's devices enforce and do not enforce, for comparison.
func (t *shaped) unheld() (all string) {
	for _, way := range directions() {
		for _, h := range t.holding(way) {
			all += fmt.Sprint(way, h.link.Name, h.why, h.theirs, h.before)
		}
	}
	return all
}

func (f *Traffic) tellAll() {
	for _, t := range f.shaped {
		f.tell(t)
	}
}

// tell makes the agent check the status of a tenant's containers again.
func (f *Traffic) tell(t *shaped) {
	for _, id := range t.IDs() {
		if f.changed != nil {
			f.changed(id)
		}
	}
}

// lookPause is the shortest time between two looks at a namespace's devices. Their owner may change
// them at any rate.
const lookPause = 20 * time.Millisecond

// watch watches a namespace where we changed something for changes of devices and qdiscs.
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

// unwatch ends the watches of namespaces where nothing of ours is left.
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
