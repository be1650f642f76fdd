package netcpu

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/kernel/journal"
	"github.com/fairlead-project/fairlead/kernel/netdev"
	"github.com/fairlead-project/fairlead/kernel/qdisc"
)

// doors are the uplinks at which is dropped.
type doors map[deviceKey]*door

// door drops at one uplink, at one of two places.
type door struct {
	name   string
	host   bool // in the host's own namespace
	tc     *qdisc.Attachment
	driver *driver
	why    string // XDP was asked for, and is not used or not as it should be; "" otherwise
}

func (d *door) close() error {
	if d.driver != nil {
		return d.driver.link.Close()
	}
	return d.tc.Close()
}

// openDoors begins the early drop at the devices by which packets reach c,
// where it has not begun yet. It drops for all containers that are watched. It goes
// on after an error.
func (n *Netcpu) openDoors(ctx context.Context, c container.Container) error {
	if n.early == nil {
		return nil
	}
	defer n.showDoors()
	host, err := netdev.Open(n.cfg.NetNS)
	if err != nil {
		return err
	}
	host.Close()
	seen := make(map[uint64]bool)
	err = n.eachUplink(ctx, c, func(ns *netdev.NS, path string, links []netdev.Link) error {
		seen[ns.Inode()] = true
		var errs []error
		for _, l := range links {
			err := n.openDoor(ns, path, l, ns.Inode() == host.Inode())
			if err != nil && !errors.Is(err, journal.ErrGone) && !errors.Is(err, netdev.ErrNoLink) { // it has gone meanwhile
				errs = append(errs, fmt.Errorf("uplink %s: %w", l.Name, err))
			}
		}
		return errors.Join(append(errs, n.forgetDoors(ns, links))...)
	})
	return errors.Join(err, n.forgetNamespaces(seen))
}

// openDoor begins to drop at an uplink, or sees that it goes on. A driver may have
// made its NAPIs anew, and so their threads: a device whose threads are placed is
// claimed again then.
func (n *Netcpu) openDoor(ns *netdev.NS, path string, l netdev.Link, host bool) error {
	key := deviceKey{ns.Inode(), l.Index}
	claimed := n.claimed(key)
	if d := n.doors[key]; d != nil {
		err := n.hold(d, l)
		if !errors.Is(err, journal.ErrGone) {
			return err
		}
		// Another device has the number now.
		if err := n.shut(key); err != nil {
			return err
		}
	}
	d, err := n.open(ns, l, host)
	if err != nil {
		return err
	}
	n.doors[key] = d
	if d.driver != nil {
		err = n.unclaim(key)
	}
	if claimed && !n.claimed(key) {
		err = errors.Join(err, n.claimOnce(ns, path, l))
	}
	return err
}

// hold has a door go on for its uplink as that is now. journal.ErrGone means that
// the door is at no device any more.
func (n *Netcpu) hold(d *door, l netdev.Link) error {
	d.name = l.Name
	if d.driver == nil {
		return d.tc.Hold()
	}
	err := d.driver.hold(n.early, l)
	if errors.Is(err, journal.ErrGone) {
		return err
	}
	// Packets to the address that it does not know are dropped later, as they
	// would be without it: no reason to refuse a container.
	if err == nil {
		d.why = ""
	} else if why := err.Error(); why != d.why {
		d.why = why
		n.cfg.Log.Warn("dropping by XDP as before", "feature", name, "uplink", l.Name, "err", err)
	}
	return nil
}

// shut closes a door of a device that has gone.
func (n *Netcpu) shut(key deviceKey) error {
	d := n.doors[key]
	delete(n.doors, key)
	return errors.Join(d.close(), n.unclaim(key))
}

// forgetDoors lets go of what was at uplinks of a namespace that have gone; up are
// some that have not.
func (n *Netcpu) forgetDoors(ns *netdev.NS, up []netdev.Link) error {
	var errs []error
	for key := range n.doors {
		if key.netns != ns.Inode() || slices.ContainsFunc(up, func(l netdev.Link) bool { return l.Index == key.index }) {
			continue
		}
		if _, err := ns.Link(key.index); errors.Is(err, netdev.ErrNoLink) {
			errs = append(errs, n.shut(key))
		}
	}
	return errors.Join(errs...)
}

// forgetNamespaces does that for namespaces that have gone, but for those that were
// just seen.
func (n *Netcpu) forgetNamespaces(seen map[uint64]bool) error {
	var errs []error
	for key := range n.doors {
		if seen[key.netns] {
			continue
		}
		ns, err := n.find.Open("", key.netns)
		if err == nil {
			ns.Close()
			seen[key.netns] = true
		} else if errors.Is(err, netdev.ErrNoNS) {
			errs = append(errs, n.shut(key))
		}
	}
	return errors.Join(errs...)
}

// open begins to drop at an uplink: in its driver if the operator wants that there
// and it can, else by tc. A driver that has refused is asked again when the doors
// open the next time, not at each Apply: a try may disturb the device, too.
func (n *Netcpu) open(ns *netdev.NS, l netdev.Link, host bool) (*door, error) {
	d := &door{name: l.Name, host: host}
	var err error
	if host && slices.Contains(n.cfg.XDP, l.Name) { // names are those of the host's own namespace
		if d.driver, err = n.early.driver(ns, l.Index); err == nil {
			return d, nil
		}
		if errors.Is(err, journal.ErrGone) || errors.Is(err, netdev.ErrNoLink) {
			return nil, err
		}
		d.why = err.Error()
		n.cfg.Log.Warn("dropping by tc, not by XDP", "feature", name, "uplink", l.Name, "err", err)
	}
	d.tc, err = n.early.uplink(ns, l.Index)
	return d, err
}

// restDoors ends it by tc, unless there still is a container to drop for. In
// drivers it stays, with nothing to do: an end and a beginning reset most devices,
// and containers whose mode is auto have many of both.
func (n *Netcpu) restDoors() error {
	if n.early != nil && len(n.early.used) > 0 {
		return nil
	}
	return n.closeDoors(func(d *door) bool { return d.driver == nil })
}

func (n *Netcpu) closeDoors(match func(*door) bool) error {
	defer n.showDoors()
	var errs []error
	for key, d := range n.doors {
		if match(d) {
			errs = append(errs, d.close())
			delete(n.doors, key)
		}
	}
	return errors.Join(errs...)
}

// Where a Door drops.
const (
	ByXDP = "xdp" // in the driver, before there is an skb
	ByTC  = "tc"  // at the ingress hook
)

// Door says where packets are dropped at one uplink.
type Door struct {
	Netns  uint64 // inode of the uplink's network namespace; 0 where By is ""
	Device string
	By     string // ByXDP or ByTC; "": Config.XDP names it, but it is no uplink
	// Why is what keeps it from being ByXDP where Config.XDP asks for that, or
	// from following a change of the device since it is.
	Why string
}

// Doors gives the uplinks at which packets are dropped at present, by name, and
// what Config.XDP has beside them: none before a container is isolated or charged.
// Those ByTC go with the last such container, those ByXDP with Close. It does not
// wait for an Apply. The list is the caller's.
func (n *Netcpu) Doors() []Door {
	n.showing.Lock()
	defer n.showing.Unlock()
	return slices.Clone(n.shown)
}

// showDoors has Doors give what there is now.
func (n *Netcpu) showDoors() {
	var list []Door
	for key, d := range n.doors {
		shown := Door{Netns: key.netns, Device: d.name, By: ByTC, Why: d.why}
		if d.driver != nil {
			shown.By = ByXDP
		}
		list = append(list, shown)
	}
	for _, name := range n.cfg.XDP {
		there := false
		for _, d := range n.doors {
			there = there || d.host && d.name == name
		}
		if len(n.doors) > 0 && !there {
			list = append(list, Door{Device: name, Why: "no device of this name polls packets that such a container may get"})
		}
	}
	slices.SortFunc(list, func(a, b Door) int {
		return cmp.Or(cmp.Compare(a.Device, b.Device), cmp.Compare(a.Netns, b.Netns))
	})
	n.showing.Lock()
	defer n.showing.Unlock()
	n.shown = list
}
