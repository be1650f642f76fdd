package drop

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/feature/netcpu/uplink"
	"github.com/fairlead-project/fairlead/kernel/journal"
	"github.com/fairlead-project/fairlead/kernel/netdev"
	"github.com/fairlead-project/fairlead/kernel/qdisc"
)

// PointsConfig is what NewPoints needs.
type PointsConfig struct {
	Programs *Programs
	Uplinks  *uplink.Finder
	Find     *netdev.Finder
	Log      *slog.Logger

	// XDP names the uplinks of the host's own namespace at which packets are dropped
	// in the driver, where it can.
	XDP []string
}

// Points are the uplinks at which packets are dropped, for all tenants. A nil
// *Points drops nothing anywhere.
type Points struct {
	cfg PointsConfig
	at  map[uplink.Key]*point // by tc while there is a tenant, by XDP from then on

	showing sync.Mutex // of shown alone: an Open may wait long for a driver
	shown   []Point
}

// point is one of them, at one of two hooks.
type point struct {
	name   string
	host   bool // in the host's own namespace
	tc     *qdisc.Attachment
	driver *driver
	why    string // XDP was asked for, and is not used or not as it should be; "" otherwise
}

func (d *point) close() error {
	if d.driver != nil {
		return d.driver.link.Close()
	}
	return d.tc.Close()
}

// NewPoints makes one that is at no uplink yet.
func NewPoints(cfg PointsConfig) *Points { return &Points{cfg: cfg, at: make(map[uplink.Key]*point)} }

// Open begins the early drop at the uplinks of c, where it has not begun yet. It
// drops for all tenants. It goes on after an error. A driver may have made the NAPIs
// of the devices in reset anew, and so their threads; some of these devices may be
// others now, or none.
func (p *Points) Open(ctx context.Context, c container.Container) (reset []uplink.Key, err error) {
	if p == nil {
		return nil, nil
	}
	defer p.show()
	host, err := p.cfg.Uplinks.Host()
	if err != nil {
		return nil, err
	}
	seen := make(map[uint64]bool)
	err = p.cfg.Uplinks.Each(ctx, c, func(ns *netdev.NS, _ string, links []netdev.Link) error {
		seen[ns.Inode()] = true
		var errs []error
		for _, l := range links {
			key := uplink.Key{NetNS: ns.Inode(), Index: l.Index}
			again, err := p.openAt(ns, key, l, key.NetNS == host)
			if again {
				reset = append(reset, key)
			}
			if err != nil && !errors.Is(err, journal.ErrGone) && !errors.Is(err, netdev.ErrNoLink) { // it has gone meanwhile
				errs = append(errs, fmt.Errorf("uplink %s: %w", l.Name, err))
			}
		}
		gone, err := p.dropGone(ns, links)
		reset = append(reset, gone...)
		return errors.Join(append(errs, err)...)
	})
	gone, lost := p.dropGoneNamespaces(seen)
	return append(reset, gone...), errors.Join(err, lost)
}

// openAt begins to drop at an uplink, or sees that it goes on. reset is as Open has it.
func (p *Points) openAt(ns *netdev.NS, key uplink.Key, l netdev.Link, host bool) (reset bool, err error) {
	if d := p.at[key]; d != nil {
		err := p.hold(d, l)
		if !errors.Is(err, journal.ErrGone) {
			return false, err
		}
		// Another device has the number now.
		if err := p.shut(key); err != nil {
			return true, err
		}
		reset = true
	}
	d, err := p.attach(ns, l, host)
	if err != nil {
		return reset, err
	}
	p.at[key] = d
	return reset || d.driver != nil, nil
}

// hold has a point go on for its uplink as that is now. journal.ErrGone means that
// the point is at no device any more.
func (p *Points) hold(d *point, l netdev.Link) error {
	d.name = l.Name
	if d.driver == nil {
		return d.tc.Hold()
	}
	err := d.driver.hold(p.cfg.Programs, l)
	if errors.Is(err, journal.ErrGone) {
		return err
	}
	// Packets to the address that it does not know are dropped later, as they
	// would be without it: no reason to refuse a container.
	if err == nil {
		d.why = ""
	} else if why := err.Error(); why != d.why {
		d.why = why
		p.cfg.Log.Warn("dropping by XDP as before", "feature", p.cfg.Programs.cfg.Feature, "uplink", l.Name, "err", err)
	}
	return nil
}

// shut ends the dropping at a device that has gone.
func (p *Points) shut(key uplink.Key) error {
	d := p.at[key]
	delete(p.at, key)
	return d.close()
}

// dropGone lets go of what was at uplinks of a namespace that have gone; up are
// some that have not.
func (p *Points) dropGone(ns *netdev.NS, up []netdev.Link) (gone []uplink.Key, err error) {
	var errs []error
	for key := range p.at {
		if key.NetNS != ns.Inode() || slices.ContainsFunc(up, func(l netdev.Link) bool { return l.Index == key.Index }) {
			continue
		}
		if _, err := ns.Link(key.Index); errors.Is(err, netdev.ErrNoLink) {
			gone = append(gone, key)
			errs = append(errs, p.shut(key))
		}
	}
	return gone, errors.Join(errs...)
}

// dropGoneNamespaces does that for namespaces that have gone, but for those that were
// just seen.
func (p *Points) dropGoneNamespaces(seen map[uint64]bool) (gone []uplink.Key, err error) {
	var errs []error
	for key := range p.at {
		if seen[key.NetNS] {
			continue
		}
		ns, err := p.cfg.Find.Open("", key.NetNS)
		if err == nil {
			ns.Close()
			seen[key.NetNS] = true
		} else if errors.Is(err, netdev.ErrNoNS) {
			gone = append(gone, key)
			errs = append(errs, p.shut(key))
		}
	}
	return gone, errors.Join(errs...)
}

// attach begins to drop at an uplink: in its driver if the operator wants that there
// and it can, else by tc. A driver that has refused is asked again when the point
// opens the next time, not at each Apply: a try may disturb the device, too.
func (p *Points) attach(ns *netdev.NS, l netdev.Link, host bool) (*point, error) {
	d := &point{name: l.Name, host: host}
	var err error
	if host && slices.Contains(p.cfg.XDP, l.Name) { // names are those of the host's own namespace
		if d.driver, err = p.cfg.Programs.attachXDP(ns, l.Index); err == nil {
			return d, nil
		}
		if errors.Is(err, journal.ErrGone) || errors.Is(err, netdev.ErrNoLink) {
			return nil, err
		}
		d.why = err.Error()
		p.cfg.Log.Warn("dropping by tc, not by XDP", "feature", p.cfg.Programs.cfg.Feature, "uplink", l.Name, "err", err)
	}
	d.tc, err = p.cfg.Programs.attachTC(ns, l.Index)
	return d, err
}

// Rest ends the dropping by tc, unless there still is a tenant to drop for. In
// drivers it stays, with nothing to do: an end and a beginning reset most devices,
// and containers whose mode is auto have many of both.
func (p *Points) Rest() error {
	if p == nil || len(p.cfg.Programs.used) > 0 {
		return nil
	}
	return p.close(func(d *point) bool { return d.driver == nil })
}

// Close ends it everywhere.
func (p *Points) Close() error {
	if p == nil {
		return nil
	}
	return p.close(func(*point) bool { return true })
}

func (p *Points) close(match func(*point) bool) error {
	defer p.show()
	var errs []error
	for key, d := range p.at {
		if match(d) {
			errs = append(errs, d.close())
			delete(p.at, key)
		}
	}
	return errors.Join(errs...)
}

// Where a Point drops.
const (
	ByXDP = "xdp" // in the driver, before there is an skb
	ByTC  = "tc"  // at the ingress hook
)

// Point says where packets are dropped at one uplink.
type Point struct {
	Netns  uint64 // inode of the uplink's network namespace; 0 where By is ""
	Device string
	By     string // ByXDP or ByTC; "": PointsConfig.XDP names it, but it is no uplink
	// Why is what keeps it from being ByXDP where PointsConfig.XDP asks for that, or
	// from following a change of the device since it is.
	Why string
}

// List returns the uplinks at which packets are dropped at present, by name, and
// what PointsConfig.XDP has beside them: none before there was a tenant. Those ByTC
// go with the last tenant, those ByXDP with Close. List does not wait for an Open and
// may be called at any time. The list is the caller's.
func (p *Points) List() []Point {
	if p == nil {
		return nil
	}
	p.showing.Lock()
	defer p.showing.Unlock()
	return slices.Clone(p.shown)
}

// show has List give what there is now.
func (p *Points) show() {
	var list []Point
	for key, d := range p.at {
		shown := Point{Netns: key.NetNS, Device: d.name, By: ByTC, Why: d.why}
		if d.driver != nil {
			shown.By = ByXDP
		}
		list = append(list, shown)
	}
	for _, name := range p.cfg.XDP {
		there := false
		for _, d := range p.at {
			there = there || d.host && d.name == name
		}
		if len(p.at) > 0 && !there {
			list = append(list, Point{Device: name, Why: "no device of this name polls packets that such a container may get"})
		}
	}
	slices.SortFunc(list, func(a, b Point) int {
		return cmp.Or(cmp.Compare(a.Device, b.Device), cmp.Compare(a.Netns, b.Netns))
	})
	p.showing.Lock()
	defer p.showing.Unlock()
	p.shown = list
}
