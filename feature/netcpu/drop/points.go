package drop

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/datapath/ends"
	"github.com/fairlead-project/fairlead/feature/netcpu/uplink"
	"github.com/fairlead-project/fairlead/kernel/journal"
	"github.com/fairlead-project/fairlead/kernel/netdev"
)

// point is an uplink at which packets are dropped, at one of two hooks.
type point struct {
	name   string
	path   string // to its namespace
	host   bool   // in the host's own namespace
	tc     ends.Set
	driver *driver
	why    string // XDP was asked for, and is not used or not as it should be; "" otherwise
}

func (p *point) close() error {
	if p.driver != nil {
		return p.driver.link.Close()
	}
	return p.tc.Close()
}

// Open begins the early drop at the uplinks of c, where it has not begun yet. It
// drops for all tenants. It goes on after an error. Some drivers make their NAPIs, and
// so the threads that poll, anew for XDP.
func (d *Dropper) Open(ctx context.Context, c container.Container) error {
	if d == nil {
		return nil
	}
	defer d.show()
	listed := make(map[ends.Device]bool)
	err := d.cfg.Uplinks.Each(ctx, c, func(u uplink.Uplink) error {
		listed[u.Key] = true
		return d.openAt(u)
	})
	return errors.Join(err, d.shutGone(listed))
}

// openAt begins to drop at an uplink, or sees that it goes on.
func (d *Dropper) openAt(u uplink.Uplink) error {
	if p := d.points[u.Key]; p != nil {
		p.name = u.Link.Name
		if p.driver == nil {
			return d.attachTC(p, u.Key)
		}
		err := d.hold(p, u.Link)
		if !errors.Is(err, journal.ErrGone) {
			return err
		}
		// Another device has the number now.
		if err := d.shut(u.Key); err != nil {
			return err
		}
	}
	p, err := d.attach(u)
	if err != nil {
		return err
	}
	d.points[u.Key] = p
	return nil
}

// hold has a point in a driver go on for its uplink as that is now. journal.ErrGone
// means that the point is at no device any more.
func (d *Dropper) hold(p *point, l netdev.Link) error {
	err := p.driver.hold(d, l)
	if errors.Is(err, journal.ErrGone) {
		return err
	}
	// Packets to the address that it does not know are dropped later, as they
	// would be without it: no reason to refuse a container.
	if err == nil {
		p.why = ""
	} else if why := err.Error(); why != p.why {
		p.why = why
		d.cfg.Log.Warn("dropping by XDP as before", "feature", d.cfg.Feature, "uplink", l.Name, "err", err)
	}
	return nil
}

// shut ends the dropping at a device that has gone.
func (d *Dropper) shut(key ends.Device) error {
	p := d.points[key]
	delete(d.points, key)
	return p.close()
}

// shutGone lets go of what was at devices that have gone, or whose namespace has;
// listed are some that have not.
func (d *Dropper) shutGone(listed map[ends.Device]bool) error {
	var errs []error
	for key, p := range d.points {
		if listed[key] {
			continue
		}
		ns, err := d.cfg.Find.Open(p.path, key.NetNS)
		if err == nil {
			_, err = ns.Link(key.Index)
			ns.Close()
		}
		if errors.Is(err, netdev.ErrNoNS) || errors.Is(err, netdev.ErrNoLink) {
			errs = append(errs, d.shut(key))
		}
	}
	return errors.Join(errs...)
}

// attach begins to drop at an uplink: in its driver if the operator wants that there
// and it can, else by tc. A driver that has refused is asked again when the point
// opens the next time, not at each Apply: a try may disturb the device, too.
func (d *Dropper) attach(u uplink.Uplink) (*point, error) {
	p := &point{name: u.Link.Name, path: u.Path, host: u.Host}
	var err error
	if u.Host && slices.Contains(d.cfg.XDP, u.Link.Name) { // names are those of the host's own namespace
		if p.driver, err = d.attachXDP(u.NS, u.Link.Index); err == nil {
			return p, nil
		}
		if errors.Is(err, journal.ErrGone) || errors.Is(err, netdev.ErrNoLink) {
			return nil, err
		}
		p.why = err.Error()
		d.cfg.Log.Warn("dropping by tc, not by XDP", "feature", d.cfg.Feature, "uplink", u.Link.Name, "err", err)
	}
	return p, d.attachTC(p, u.Key)
}

// attachTC begins to drop at an uplink by tc, or sees that it goes on.
func (d *Dropper) attachTC(p *point, at ends.Device) error {
	place := ends.Place{Device: at, Path: p.path, Stage: ends.Drop, Name: "drop", Owner: journal.Owner{Feature: d.cfg.Feature}}
	if err := p.tc.Put(d.cfg.Ends, place, d.tc.Clone); err != nil {
		return fmt.Errorf("early drop: %w", err)
	}
	return nil
}

// Rest ends the dropping by tc, unless there still is a tenant to drop for. In
// drivers it stays, with nothing to do: an end and a beginning reset most devices,
// and containers whose mode is auto have many of both.
func (d *Dropper) Rest() error {
	if d == nil || d.counted > 0 {
		return nil
	}
	return d.close(func(p *point) bool { return p.driver == nil })
}

func (d *Dropper) close(match func(*point) bool) error {
	defer d.show()
	var errs []error
	for key, p := range d.points {
		if match(p) {
			errs = append(errs, d.shut(key))
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
	By     string // ByXDP or ByTC; "": Config.XDP names it, but it is no uplink
	// Why is what keeps it from being ByXDP where Config.XDP asks for that, or
	// from following a change of the device since it is.
	Why string
}

// Points returns the uplinks at which packets are dropped at present, by name, and
// what Config.XDP has beside them: none before there was a tenant. Those ByTC
// go with the last tenant, those ByXDP with Close. Points does not wait for an Open and
// may be called at any time. The list is the caller's.
func (d *Dropper) Points() []Point {
	if d == nil {
		return nil
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	return slices.Clone(d.shown)
}

// show has Points give what there is now.
func (d *Dropper) show() {
	var list []Point
	for key, p := range d.points {
		shown := Point{Netns: key.NetNS, Device: p.name, By: ByTC, Why: p.why}
		if p.driver != nil {
			shown.By = ByXDP
		}
		list = append(list, shown)
	}
	for _, name := range d.cfg.XDP {
		there := false
		for _, p := range d.points {
			there = there || p.host && p.name == name
		}
		if len(d.points) > 0 && !there {
			list = append(list, Point{Device: name, Why: "no device of this name polls packets that such a container may get"})
		}
	}
	slices.SortFunc(list, func(a, b Point) int {
		return cmp.Or(cmp.Compare(a.Device, b.Device), cmp.Compare(a.Netns, b.Netns))
	})
	d.mu.Lock()
	defer d.mu.Unlock()
	d.shown = list
}
