package overlay

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strconv"
	"time"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/feature/overlay/network"
	"github.com/fairlead-project/fairlead/kernel/conntrack"
	"github.com/fairlead-project/fairlead/kernel/journal"
	"github.com/fairlead-project/fairlead/kernel/netdev"
	"github.com/fairlead-project/fairlead/policy"
)

// lookEvery is the interval of looks at what the kernel does not report: programs that others
// attach by tcx, threads that poll.
const lookEvery = 5 * time.Second

// open makes the cache, and starts what keeps it valid.
func (f *Overlay) open() (err error) {
	if f.cache != nil {
		return nil
	}
	if f.cache, err = openCache(f.cfg.Identity.Maps()); err != nil {
		return err
	}
	f.mtus = make(map[uint32]uint32)
	if f.unwatch, err = f.watch(f.host, ""); err != nil {
		return errors.Join(err, f.shut())
	}
	ctx, cancel := context.WithCancel(context.Background())
	f.stop = cancel
	c := f.cache
	f.done.Go(func() { f.beat(ctx) })
	f.done.Go(func() {
		answer := func(list []asked) (yes []bool) {
			f.beating.Turn(func() { yes = f.answer(list) })
			return yes
		}
		if err := c.asks(ctx, answer); err != nil && ctx.Err() == nil {
			f.cfg.Log.Error("flows of overlay networks are fast no longer", "err", err)
		}
	})
	return c.beat()
}

// shut removes everything from the kernel.
func (f *Overlay) shut() error {
	if f.cache == nil {
		return nil
	}
	errs := []error{f.at.Close()}
	if f.unwatch != nil {
		errs = append(errs, f.unwatch())
		f.unwatch = nil
	}
	if f.stop != nil {
		f.stop()
		f.stop = nil
	}
	for k := range f.slots {
		f.cfg.Identity.Release(k)
		delete(f.slots, k)
	}
	c := f.cache
	f.cache, f.mtus = nil, nil
	return errors.Join(append(errs, c.close())...)
}

// beat vouches for the cache as long as this feature works: not while another call hangs.
func (f *Overlay) beat(ctx context.Context) {
	tick := time.NewTicker(beat)
	defer tick.Stop()
	last := f.cfg.Now()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		f.beating.Turn(func() {
			if !f.mu.TryLock() {
				return
			}
			defer f.mu.Unlock()
			f.beating.Begin()
			defer f.beating.End()
			if ctx.Err() != nil {
				return
			}
			if err := f.cache.beat(); err != nil {
				f.cfg.Log.Warn("heartbeat of overlay networks", "err", err)
			}
			if now := f.cfg.Now(); now.Sub(last) >= lookEvery || f.lost() {
				last = now
				f.again("look")
			}
		})
	}
}

// lost reports whether a program was detached.
func (f *Overlay) lost() bool {
	if f.at.Lost() {
		return true
	}
	for _, o := range f.force {
		if o.at.Lost() {
			return true
		}
	}
	return false
}

// again is a round without a caller that waits.
func (f *Overlay) again(why string) {
	was := f.states()
	if err := f.round(why); err != nil {
		f.cfg.Log.Warn("follow overlay networks", "err", err)
	}
	for id, state := range f.states() {
		if was[id] != state {
			f.changed(id)
		}
	}
}

// followEvery is the least time between two looks because of changes in one namespace.
const followEvery = 100 * time.Millisecond

// watch follows what may make packets go another way in a namespace, until path ceases to lead there.
func (f *Overlay) watch(ns *netdev.NS, path string) (stop func() error, err error) {
	netns := ns.Inode()
	about := netdev.Interest{Pause: followEvery, Path: path, Causes: []netdev.Cause{
		netdev.LinkChanged, netdev.AddressChanged, netdev.RouteChanged, netdev.NeighbourChanged,
		netdev.FDBChanged, netdev.FilterChanged, netdev.NFTChanged, netdev.PolicyChanged,
	}}
	return f.cfg.Roots.Monitor.Watch(ns, about, func(changes []netdev.Change) {
		f.looking.Turn(func() { f.follow(netns, changes) })
	})
}

// follow first invalidates what was learnt before a change, and then looks at the host again.
func (f *Overlay) follow(netns uint64, changes []netdev.Change) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.cache == nil || f.host == nil {
		return
	}
	changes = slices.DeleteFunc(changes, func(c netdev.Change) bool { return f.ours(netns, c) })
	if len(changes) == 0 {
		return
	}
	for _, o := range f.force {
		if o.NetNS != netns && netns != f.host.Inode() {
			continue
		}
		f.raise(o, string(changes[0].Cause))
		// Packets under way may have passed before the change: learning goes on after the round,
		// which takes longer than they do.
		if err := f.write(o, f.flags(o)|netPaused); err != nil {
			f.cfg.Log.Error("forget what was learnt", "network", o.Name, "err", err)
		}
	}
	f.again(string(changes[0].Cause))
}

// ours reports whether a change is at a device that only this feature uses.
func (f *Overlay) ours(netns uint64, c netdev.Change) bool {
	if c.Device == 0 {
		return false
	}
	for _, o := range f.force {
		if netns == o.NetNS && uint32(c.Device) == o.value.Inside && o.value.Inside != 0 ||
			netns == f.host.Inode() && uint32(c.Device) == o.value.Outside && o.value.Outside != 0 {
			return c.Cause == netdev.LinkChanged || c.Cause == netdev.AddressChanged || c.Cause == netdev.FilterChanged
		}
	}
	return false
}

// flags returns the flags of a network as bring has left it.
func (f *Overlay) flags(o *force) uint32 {
	if o.err != nil || f.killed[f.nameOf(o.Network)] != "" {
		return 0
	}
	return netOn
}

// answer prepares conntrack for flows.
func (f *Overlay) answer(list []asked) []bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	yes := make([]bool, len(list))
	for _, o := range f.force {
		var at []int
		var tuples []conntrack.Tuple
		for i, a := range list {
			if a.network == o.number {
				at, tuples = append(at, i), append(tuples, a.tuple)
			}
		}
		if len(at) == 0 || o.table == nil {
			continue
		}
		found, err := o.table.BeLiberal(tuples)
		if err != nil {
			f.cfg.Log.Warn("make conntrack ready", "network", o.Name, "err", err)
		}
		for i := range found {
			yes[at[i]] = found[i]
		}
	}
	return yes
}

// find finds the networks of ends.
func (f *Overlay) find(list []container.End) ([]network.Network, error) {
	h, err := f.reader.Read(list)
	if err != nil {
		return nil, err
	}
	return network.Find(h), nil
}

// look reads the state of an end.
func (f *Overlay) look(e fastEnd) (s network.EndState, err error) {
	m := e.of.Members()[0].Container
	inside, err := f.reader.Find.Open(filepath.Join(f.cfg.Roots.Proc, strconv.Itoa(m.PID), "ns", "net"), m.NetNS)
	if err != nil {
		return s, err
	}
	defer inside.Close()
	if s, err = f.reader.End(e.End, inside); err != nil {
		return s, fmt.Errorf("look at %s: %w", e.Name, err)
	}
	s.Send, s.Arrive = atSend, atArrive
	for _, t := range e.of.Members() {
		s.Watched = s.Watched || t.Settings.Latency != nil && *t.Settings.Latency
		// No event reports that threads poll from now on, except that it is asked for.
		s.Threaded = s.Threaded || t.InForce() == policy.NetCPUIsolate
	}
	return s, nil
}

// undo undoes the journal entry of a knob.
func (f *Overlay) undo(ref journal.Ref) error {
	return f.restore(func(e journal.Entry) bool { return e.Ref == ref })
}
