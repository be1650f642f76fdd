package drop

import (
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"slices"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/feature/netcpu/uplink"
	"github.com/fairlead-project/fairlead/hook"
	"github.com/fairlead-project/fairlead/kernel/bpf"
	"github.com/fairlead-project/fairlead/kernel/journal"
	"github.com/fairlead-project/fairlead/kernel/netdev"
)

// point is an uplink with early drop by tc or by XDP.
type point struct {
	name   string
	path   string // of its namespace
	host   bool   // in the host's network namespace
	tc     hook.Set
	driver *driver
	why    string // why configured XDP is not used, or is outdated; "" otherwise
}

func (p *point) close() error {
	if p.driver != nil {
		return bpf.Unlink(p.driver.link)
	}
	return p.tc.Close()
}

// Lost reports whether another process has detached a tcx program, which no event reports, or whether
// its device has gone.
func (d *Dropper) Lost() (lost bool) {
	if d == nil {
		return false
	}
	for _, p := range d.points {
		lost = lost || p.tc.Lost()
	}
	for _, t := range d.tenants {
		lost = lost || t.counts.Lost()
	}
	return lost
}

// Open starts early drop at the uplinks of c, for all tenants, unless it has begun. It continues after
// an error. For XDP some drivers recreate their NAPIs, and so the threads that poll.
func (d *Dropper) Open(ctx context.Context, c container.Container) error {
	if d == nil {
		return nil
	}
	defer d.show()
	listed := make(map[container.Device]bool)
	links, err := d.cfg.Uplinks.Links()
	if err != nil {
		return err
	}
	errs := []error{d.holdTunnels(links)}
	err = d.cfg.Uplinks.Each(ctx, c, func(u uplink.Uplink) error {
		listed[u.Key] = true
		return d.openAt(u)
	})
	return errors.Join(append(errs, err, d.shutGone(listed))...)
}

// holdTunnels updates the MAC addresses of the host's tunnel devices in fl_tunnels.
func (d *Dropper) holdTunnels(links []netdev.Link) error {
	now := make(map[uint64]bool)
	for _, l := range links {
		if mac, err := net.ParseMAC(l.MAC); err == nil && len(mac) == 6 && l.IsTunnel() {
			now[binary.NativeEndian.Uint64(append(mac, 0, 0))] = true
		}
	}
	var errs []error
	for mac := range d.tunnels {
		if !now[mac] {
			errs = append(errs, d.maps.FlTunnels.Delete(mac))
		}
	}
	for mac := range now {
		errs = append(errs, d.maps.FlTunnels.Put(mac, uint8(1)))
	}
	d.tunnels = now
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("tell the addresses of tunnels: %w", err)
	}
	return nil
}

// openAt starts early drop at an uplink, or repairs it.
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
		// Another device may have the index now.
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

// hold updates a point with XDP to the present state of its uplink. journal.ErrGone means that its
// device has gone.
func (d *Dropper) hold(p *point, l netdev.Link) error {
	err := p.driver.hold(d, l)
	if errors.Is(err, journal.ErrGone) {
		return err
	}
	// With an outdated address, packets are dropped later, as without XDP. That is no reason to refuse
	// a container.
	if err == nil {
		p.why = ""
	} else if why := err.Error(); why != p.why {
		p.why = why
		d.cfg.Log.Warn("dropping by XDP as before", "feature", d.cfg.Feature, "uplink", l.Name, "err", err)
	}
	return nil
}

// shut ends early drop at a device.
func (d *Dropper) shut(key container.Device) error {
	p := d.points[key]
	delete(d.points, key)
	return p.close()
}

// shutGone closes points at devices that have gone, alone or with their namespace. The devices in listed
// exist.
func (d *Dropper) shutGone(listed map[container.Device]bool) error {
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

// attach starts early drop at an uplink: in its driver if the operator wants that and the driver can,
// otherwise by tc. After a refusal it does not try the driver again until the point is opened anew,
// because a try may disturb the device.
func (d *Dropper) attach(u uplink.Uplink) (*point, error) {
	p := &point{name: u.Link.Name, path: u.Path, host: u.Host}
	var err error
	if u.Host && slices.Contains(d.cfg.XDP, u.Link.Name) { // Config.XDP names devices of the host's namespace
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

// attachTC starts early drop by tc at an uplink, or repairs it.
func (d *Dropper) attachTC(p *point, at container.Device) error {
	place := hook.Place{Device: at, Path: p.path, Stage: hook.Drop, Name: "drop", Owner: journal.Owner{Feature: d.cfg.Feature}}
	if err := p.tc.Put(d.cfg.Ends, place, d.tc.Clone); err != nil {
		return fmt.Errorf("early drop: %w", err)
	}
	return nil
}

// Rest ends early drop by tc, unless there still is a tenant. XDP programs stay attached, without effect:
// attaching and detaching reset most devices, and containers in mode auto would cause both often.
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

// Hooks at which a Point drops.
const (
	ByXDP = "xdp" // in the driver, before there is an skb
	ByTC  = "tc"  // at the ingress hook
)

// Point is the early drop at one uplink.
type Point struct {
	Netns  uint64 // inode of the uplink's network namespace; 0 if By is ""
	Device string
	By     string // ByXDP or ByTC; "": Config.XDP names the device, but it is no uplink
	// Why says why it is not ByXDP although Config.XDP names it, or why XDP has not followed a change
	// of the device.
	Why string
}

// Points returns the uplinks with early drop, and the other names in Config.XDP, sorted by name. The
// list is empty before the first tenant. Points ByTC go with the last tenant, those ByXDP with Close.
// Points is safe for concurrent use and does not wait for an Open. The caller owns the list.
func (d *Dropper) Points() []Point {
	if d == nil {
		return nil
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	return slices.Clone(d.shown)
}

// show updates the result of Points.
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
