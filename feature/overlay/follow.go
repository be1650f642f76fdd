package overlay

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"path/filepath"
	"slices"
	"strconv"
	"time"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/feature/overlay/network"
	"github.com/fairlead-project/fairlead/kernel/conntrack"
	"github.com/fairlead-project/fairlead/kernel/netdev"
	"github.com/fairlead-project/fairlead/policy"
)

// lookEvery is the interval of looks at changes without an event: programs that others attach by tcx,
// and threads that poll.
const lookEvery = 5 * time.Second

// open makes the cache, and starts the goroutines that keep it valid.
func (f *Overlay) open() (err error) {
	if f.cache != nil {
		return nil
	}
	if f.cache, err = openCache(f.cfg.Identity.Maps()); err != nil {
		return err
	}
	f.by = make(map[uint32]overlayUplink)
	if f.unwatch, err = f.watch(f.host, ""); err != nil {
		return errors.Join(err, f.shut())
	}
	ctx, cancel := context.WithCancel(context.Background())
	f.stop = cancel
	c := f.cache
	f.done.Go(func() { f.beat(ctx, c) })
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
	f.cache, f.by = nil, nil
	return errors.Join(append(errs, c.close())...)
}

// beat renews the cache, and runs rounds that are due. It does not wait for f.mu, so long rounds do not
// stop learning. It stops renewing the cache only if the feature hangs.
func (f *Overlay) beat(ctx context.Context, c *cache) {
	tick := time.NewTicker(beat)
	defer tick.Stop()
	free, last := time.Now(), f.cfg.Now()
	for n := 0; ; n++ {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		if time.Since(free) < patience {
			if err := c.beat(); err != nil && ctx.Err() == nil {
				f.cfg.Log.Warn("heartbeat of overlay networks", "err", err)
			}
		}
		if n%10 == 0 {
			if err := c.sweep(); err != nil && ctx.Err() == nil {
				f.cfg.Log.Warn("sweep flows of overlay networks", "err", err)
			}
		}
		f.beating.Turn(func() {
			if !f.mu.TryLock() {
				return
			}
			defer f.mu.Unlock()
			f.beating.Begin()
			defer f.beating.End()
			free = time.Now()
			switch now := f.cfg.Now(); {
			case ctx.Err() != nil:
			case now.Sub(last) >= lookEvery || n%5 == 0 && f.lost():
				last = now
				for _, o := range f.force {
					clear(o.states)
				}
				f.again("look")
			case f.due != "" && now.Sub(f.looked) >= raiseEvery:
				f.again(f.due)
			}
		})
	}
}

// lost reports whether a program was detached.
func (f *Overlay) lost() bool {
	return f.at.Lost() || slices.ContainsFunc(slices.Collect(maps.Values(f.force)), func(o *force) bool { return o.at.Lost() })
}

// again runs a round without a caller that waits for it.
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

// followEvery is the shortest time between two looks because of changes in one namespace.
const followEvery = 100 * time.Millisecond

// watch watches a namespace for changes of packets' paths, until path ceases to lead there.
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

// fickle lists changes that containers, or a busy host, can cause at will.
var fickle = []netdev.Cause{netdev.NFTChanged, netdev.NeighbourChanged, netdev.FDBChanged, netdev.Overrun}

// raiseEvery is the shortest time between two invalidations of a network because of such a change, and
// between two looks at the host. A change in between takes effect once the earlier leases have expired.
const raiseEvery = time.Second

// follow first invalidates what was learnt before a change, and then reads the host again.
func (f *Overlay) follow(netns uint64, changes []netdev.Change) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.cache == nil || f.host == nil {
		return
	}
	why := ""
	for _, c := range changes {
		if f.concerns(netns, c) {
			why = string(c.Cause)
		}
	}
	if why != "" {
		f.again(why)
	}
}

// concerns invalidates what a change affects, and reports whether to read the host now. A change that
// is on no flow's path affects nothing.
func (f *Overlay) concerns(netns uint64, c netdev.Change) (now bool) {
	for _, n := range f.nets {
		here, host := netns == n.NetNS, netns == f.host.Inode()
		o, end := f.force[keyOf(n)], container.Device{NetNS: netns, Index: c.Device}
		often := slices.Contains(fickle, c.Cause)
		switch {
		case o == nil: // the host is read within a second if the network is not fast
			continue
		case c.Device == 0 && (here || host), here && c.Device == n.Index,
			host && slices.ContainsFunc(n.Uplinks, func(u network.Uplink) bool { return u.Index == c.Device }):
			if !often || c.Cause == netdev.Overrun {
				clear(o.states)
			}
		case c.Cause == netdev.FDBChanged: // of a port other than the tunnel, or of the bridge itself
			continue
		case here && (c.Device == n.Bridge || o.bridges(c.Device)):
			often = often || c.Cause == netdev.LinkChanged // any other port can cause it
			clear(o.states)
		case slices.Contains(n.Ends, end):
			delete(o.states, end)
			if c.Cause != netdev.FilterChanged {
				// The container controls the other end, and 15 s after a port came up its bridge reports it once
				// more. If anything is different, the look invalidates what was learnt there.
				now = now || f.cfg.Now().Sub(f.looked) >= raiseEvery
				continue
			}
		default:
			continue
		}
		if often && f.cfg.Now().Sub(o.raised) < raiseEvery {
			continue
		}
		now = true
		f.invalidate(o, string(c.Cause))
	}
	if !now { // the look may wait a second: this may be a new tunnel, or lead to one
		f.due = string(c.Cause)
	}
	return now
}

// bridges reports whether a device is the bridge of one of a network's ends.
func (o *force) bridges(device int) bool {
	return slices.ContainsFunc(slices.Collect(maps.Values(o.states)), func(s network.EndState) bool { return s.Bridge == device })
}

// invalidate invalidates everything that was learnt of a network.
func (f *Overlay) invalidate(o *force, why string) {
	f.raise(o, why)
	if err := f.write(o, f.flags(o)); err != nil {
		f.cfg.Log.Error("forget what was learnt", "network", o.Name, "err", err)
	}
}

// flags returns the flags of a network after bring.
func (f *Overlay) flags(o *force) uint32 {
	if o.err != nil || f.killed[f.nameOf(o.Network)] != "" {
		return 0
	}
	return netOn
}

// answer prepares conntrack for flows.
func (f *Overlay) answer(list []asked) []bool {
	f.asking.Lock()
	defer f.asking.Unlock()
	yes := make([]bool, len(list))
	for number, table := range f.tables {
		var at []int
		var tuples []conntrack.Tuple
		for i, a := range list {
			if a.network == number {
				at, tuples = append(at, i), append(tuples, a.tuple)
			}
		}
		if len(at) == 0 {
			continue
		}
		found, err := table.BeLiberal(tuples)
		if err != nil {
			f.cfg.Log.Warn("make conntrack ready", "network", number, "err", err)
		}
		for i, is := range found {
			yes[at[i]] = is
		}
	}
	return yes
}

// find finds the networks of some ends.
func (f *Overlay) find(list []container.End) ([]network.Network, error) {
	h, err := f.reader.Read(list)
	if err != nil {
		return nil, err
	}
	return network.Find(h), nil
}

// look returns the state of an end. It reads the state if it is not known.
func (f *Overlay) look(o *force, e fastEnd) (s network.EndState, err error) {
	s, known := o.states[e.Device]
	if !known {
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
		o.states[e.Device] = s
	}
	for _, t := range e.of.Members() {
		s.Watched = s.Watched || t.Settings.Latency != nil && *t.Settings.Latency
		// No event reports that threads start to poll, so policy that asks for it counts.
		s.Threaded = s.Threaded || t.InForce() == policy.NetCPUIsolate
	}
	return s, nil
}
