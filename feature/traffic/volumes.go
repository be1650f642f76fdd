package traffic

import (
	"cmp"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/feature"
	"github.com/fairlead-project/fairlead/feature/traffic/volume"
	"github.com/fairlead-project/fairlead/kernel/journal"
	"github.com/fairlead-project/fairlead/kernel/netdev"
	"github.com/fairlead-project/fairlead/policy"
)

const (
	countEvery = 10 * time.Second // at most so much is lost of a device that goes without a word
	countPause = time.Second      // the least time between two counts, when containers come and go
	saveEvery  = 30 * time.Second
)

// volumes counts what containers send and receive at the ends of their devices. It does not depend
// on the rest of the feature, whose mutex may be held for long.
type volumes struct {
	containers feature.Containers
	find       *netdev.Finder
	listing    *netdev.Listing
	netns      string
	proc       string
	log        *slog.Logger
	now        func() time.Time
	loop       feature.Loop
	wake       chan struct{} // capacity 1: containers have come or gone

	mu       sync.Mutex
	ledger   *volume.Ledger
	host     uint64                         // inode of the host's namespace
	cookie   uint64                         // its number in the ledger
	accounts map[container.ID]string        // of those that run
	limits   map[container.ID]policy.Volume // of those that run and have one
	decided  map[decided]policy.Decision
	failed   string // last error in the log
	saved    time.Time
	closed   bool
}

// decided is what a decision is about.
type decided struct {
	id  container.ID
	key string
}

// newVolumes opens the ledger. It returns nil if volumes are not to be counted.
func newVolumes(cfg Config, f *Traffic) (*volumes, error) {
	if cfg.Volumes == "" || cfg.Containers == nil {
		return nil, nil
	}
	zone, err := time.LoadLocation(cmp.Or(cfg.VolumeZone, "UTC"))
	if err != nil {
		return nil, fmt.Errorf("volume-zone: %w", err)
	}
	boot, err := journal.BootID(cfg.Roots.Proc)
	if err != nil {
		return nil, err
	}
	v := &volumes{
		containers: cfg.Containers, find: f.find, listing: f.listing, netns: cfg.NetNS, proc: cfg.Roots.Proc, log: cfg.Log, now: cfg.Now,
		loop: feature.Loop{Name: "volumes"}, wake: make(chan struct{}, 1),
		host: f.host.Inode(), cookie: numberOf(f.host),
		accounts: make(map[container.ID]string), limits: make(map[container.ID]policy.Volume), decided: make(map[decided]policy.Decision),
	}
	v.ledger, err = volume.Open(volume.Config{Path: cfg.Volumes, Boot: boot, Zone: zone, Now: cfg.Now, Uptime: uptime})
	if err != nil {
		cfg.Log.Error("volumes begin anew: their file cannot be used, and was set aside", "err", err)
	}
	for _, d := range v.ledger.Held() {
		v.decided[decided{d.Container, d.Key}] = d
	}
	return v, nil
}

// uptime is the time since the boot.
func uptime() time.Duration {
	var ts unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_BOOTTIME, &ts); err != nil {
		return 0 // every kernel has it
	}
	return time.Duration(ts.Nano())
}

// numberOf is the number of a namespace in the ledger: before Linux 5.14 its inode, which may be
// used again.
func numberOf(ns *netdev.NS) uint64 {
	if cookie, err := ns.Cookie(); err == nil {
		return cookie
	}
	return ns.Inode()
}

// run counts until done is closed.
func (v *volumes) run(host *netdev.NS, done chan struct{}) {
	stop, err := host.WatchCounters(func(list []netdev.Told) { v.loop.Turn(func() { v.told(list) }) })
	if err != nil {
		v.log.Error("the last bytes of containers that end are not counted", "err", err)
		stop = func() error { return nil }
	}
	defer stop()
	for {
		pause := countEvery
		v.loop.Turn(func() {
			v.count()
			pause = v.pause()
		})
		tick := time.NewTimer(pause)
		select {
		case <-done:
			tick.Stop()
			return
		case <-tick.C:
		case <-v.wake:
			tick.Stop()
			select {
			case <-done:
				return
			case <-time.After(countPause):
			}
		}
	}
}

// pause returns the time until the next count, at the latest at the end of a day, so that the day
// gets what is its own.
func (v *volumes) pause() time.Duration {
	v.mu.Lock()
	defer v.mu.Unlock()
	return min(countEvery, max(v.ledger.End(policy.Daily).Sub(v.now()), countPause))
}

// again has containers counted that have just come.
func (v *volumes) again() {
	if v == nil {
		return
	}
	select {
	case v.wake <- struct{}{}:
	default:
	}
}

// told books what the kernel tells of devices of the host's namespace.
func (v *volumes) told(list []netdev.Told) {
	v.mu.Lock()
	defer v.mu.Unlock()
	for _, t := range list {
		v.ledger.Told(volume.Device{NetNS: v.cookie, Index: t.Index}, volume.Amount{Sent: t.RxBytes, Received: t.TxBytes}, t.Removed)
	}
}

// count books what all devices have counted, and writes the file now and then.
func (v *volumes) count() {
	running := v.containers.Running()
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.closed {
		return
	}
	v.loop.Begin()
	defer v.loop.End()
	errs := []error{v.book(running)}
	if now := time.Now(); now.Sub(v.saved) >= saveEvery {
		v.saved = now
		errs = append(errs, v.ledger.Save())
	}
	text := ""
	if err := errors.Join(errs...); err != nil {
		text = err.Error()
	}
	if text != "" && text != v.failed {
		v.log.Error("volumes are not counted in full", "err", text)
	}
	v.failed = text
}

// claim is a device with its account.
type claim struct {
	container.End
	account string
	fresh   bool // made after the last agent has looked
}

// book books what all devices have counted. v.mu is held.
func (v *volumes) book(running []container.Container) error {
	if v.ledger.Top() < 0 { // the first agent of all
		links, err := v.listing.Links()
		if err != nil {
			return err
		}
		top := 0
		for _, l := range links {
			top = max(top, l.Index)
		}
		v.ledger.Seen(top)
	}
	known := make(map[uint64]bool) // namespaces that were looked at before
	for d := range v.ledger.Devices() {
		known[d.NetNS] = true
	}
	found := make(map[volume.Device]bool)
	claims := v.claims(running)
	var errs []error
	for _, inode := range slices.Sorted(maps.Keys(claims)) {
		if err := v.inside(claims[inode][0].Path, inode, func(ns *netdev.NS, number uint64) error {
			return v.bookAt(ns, number, known[number], claims[inode], found)
		}); err != nil && !errors.Is(err, netdev.ErrNoNS) {
			errs = append(errs, err)
		}
	}
	return errors.Join(append(errs, v.inside(v.netns, v.host, func(ns *netdev.NS, number uint64) error {
		return v.rest(ns, number, found)
	}))...)
}

// inside calls fn in a namespace.
func (v *volumes) inside(path string, inode uint64, fn func(ns *netdev.NS, number uint64) error) error {
	ns, err := v.find.Open(path, inode)
	if err != nil {
		return err
	}
	defer ns.Close()
	if inode == v.host {
		return fn(ns, v.cookie)
	}
	return fn(ns, numberOf(ns))
}

// bookAt books the devices of one namespace.
func (v *volumes) bookAt(ns *netdev.NS, number uint64, known bool, claims []claim, found map[volume.Device]bool) error {
	read := ns.Counters
	if number == v.cookie { // a device of nearly each container is here
		all, err := ns.AllCounters(netdev.MostLinks)
		if err != nil {
			return err
		}
		read = func(index int) (netdev.Counters, error) {
			if c, there := all[index]; there {
				return c, nil
			}
			return netdev.Counters{}, netdev.ErrNoLink
		}
	}
	var errs []error
	for _, c := range claims {
		now, err := read(c.Index)
		if errors.Is(err, netdev.ErrNoLink) {
			continue // it has just gone
		}
		if err != nil {
			errs = append(errs, err)
			continue
		}
		fresh := c.fresh
		switch {
		case number == v.cookie:
			fresh = c.Index > v.ledger.Top()
			v.ledger.Seen(c.Index)
		case !c.Host: // in the container's own namespace
			fresh = fresh || known
		}
		d := volume.Device{NetNS: number, Index: c.Index}
		found[d] = true
		errs = append(errs, v.ledger.Count(d, c.account, amountOf(now, c.Host), fresh))
	}
	return errors.Join(errs...)
}

// amountOf turns the counters of a device into those of its container. What a host end receives is
// what the container sends.
func amountOf(c netdev.Counters, hostEnd bool) volume.Amount {
	if hostEnd {
		return volume.Amount{Sent: c.RxBytes, Received: c.TxBytes}
	}
	return volume.Amount{Sent: c.TxBytes, Received: c.RxBytes}
}

// rest books those devices of the host's namespace that no container has at present: one with
// NET_ADMIN may have hidden its end of a veth in another namespace.
func (v *volumes) rest(ns *netdev.NS, number uint64, found map[volume.Device]bool) error {
	var errs []error
	for d, account := range v.ledger.Devices() {
		if d.NetNS != number || found[d] {
			continue
		}
		now, err := ns.Counters(d.Index)
		switch {
		case errors.Is(err, netdev.ErrNoLink):
			v.ledger.Gone(d)
		case err != nil:
			errs = append(errs, err)
		default:
			errs = append(errs, v.ledger.Count(d, account, amountOf(now, true), false))
		}
	}
	return errors.Join(errs...)
}

// close writes the file for the last time.
func (v *volumes) close() error {
	if v == nil {
		return nil
	}
	v.count()
	v.mu.Lock()
	defer v.mu.Unlock()
	v.closed = true
	return v.ledger.Save()
}
