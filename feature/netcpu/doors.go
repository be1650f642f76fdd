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
	tc     *qdisc.Attachment
	driver *driver
	why    string // XDP was asked for and is not used; "" otherwise
}

func (d *door) hold(e *early, l netdev.Link) error {
	d.name = l.Name
	if d.driver != nil {
		return d.driver.hold(e, l.MAC)
	}
	return d.tc.Hold()
}

func (d *door) close() error {
	if d.driver != nil {
		return d.driver.link.Close()
	}
	return d.tc.Close()
}

// openDoors begins the early drop at the devices by which packets reach c,
// where it has not begun yet. It drops for all containers that are watched.
func (n *Netcpu) openDoors(ctx context.Context, c container.Container) error {
	if n.early == nil {
		return nil
	}
	return n.eachUplink(ctx, c, func(ns *netdev.NS, links []netdev.Link) error {
		for _, l := range links {
			key := deviceKey{ns.Inode(), l.Index}
			if d := n.doors[key]; d != nil {
				if err := d.hold(n.early, l); err != nil {
					return fmt.Errorf("uplink %s: %w", l.Name, err)
				}
				continue
			}
			d, err := n.open(ns, l)
			if errors.Is(err, journal.ErrGone) || errors.Is(err, netdev.ErrNoLink) {
				continue // it has gone meanwhile
			}
			if err != nil {
				return fmt.Errorf("uplink %s: %w", l.Name, err)
			}
			n.doors[key] = d
		}
		return n.forgetDoors(ns, links)
	})
}

// forgetDoors lets go of what was at uplinks of a namespace that have gone; up are
// some that have not.
func (n *Netcpu) forgetDoors(ns *netdev.NS, up []netdev.Link) error {
	var errs []error
	for key, d := range n.doors {
		if key.netns != ns.Inode() || slices.ContainsFunc(up, func(l netdev.Link) bool { return l.Index == key.index }) {
			continue
		}
		if _, err := ns.Link(key.index); errors.Is(err, netdev.ErrNoLink) {
			errs = append(errs, d.close())
			delete(n.doors, key)
		}
	}
	return errors.Join(errs...)
}

// open begins to drop at an uplink: in its driver if the operator wants that there
// and it can, else by tc. A driver that has refused is asked again when the doors
// open the next time, not at each Apply: a try may disturb the device, too.
func (n *Netcpu) open(ns *netdev.NS, l netdev.Link) (*door, error) {
	d := &door{name: l.Name}
	var err error
	if n.atDriver(ns, l.Name) {
		if d.driver, err = n.early.driver(ns, l.Index); err == nil {
			return d, nil
		}
		if errors.Is(err, journal.ErrGone) {
			return nil, err
		}
		d.why = err.Error()
		n.cfg.Log.Warn("dropping by tc, not by XDP", "feature", name, "uplink", l.Name, "err", err)
	}
	d.tc, err = n.early.uplink(ns, l.Index)
	return d, err
}

// atDriver says whether the operator wants packets dropped in the driver of a device:
// names are those of the host's own namespace.
func (n *Netcpu) atDriver(ns *netdev.NS, device string) bool {
	if !slices.Contains(n.cfg.XDP, device) {
		return false
	}
	host, err := netdev.Open(n.cfg.NetNS)
	if err != nil {
		return false
	}
	defer host.Close()
	return host.Inode() == ns.Inode()
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
	// Why is what keeps it from being ByXDP where Config.XDP asks for that.
	Why string
}

// Doors gives the uplinks at which packets are dropped at present, by name, and
// what Config.XDP has beside them: none before a container is isolated or charged.
// Those ByTC go with the last such container, those ByXDP with Close.
func (n *Netcpu) Doors() []Door {
	n.mu.Lock()
	defer n.mu.Unlock()
	var list []Door
	for key, d := range n.doors {
		door := Door{Netns: key.netns, Device: d.name, By: ByTC, Why: d.why}
		if d.driver != nil {
			door.By = ByXDP
		}
		list = append(list, door)
	}
	for _, name := range n.cfg.XDP {
		named := func(d Door) bool { return d.Device == name && (d.By == ByXDP || d.Why != "") }
		if len(n.doors) > 0 && !slices.ContainsFunc(list, named) {
			list = append(list, Door{Device: name, Why: "no device of this name polls packets that such a container may get"})
		}
	}
	slices.SortFunc(list, func(a, b Door) int {
		return cmp.Or(cmp.Compare(a.Device, b.Device), cmp.Compare(a.Netns, b.Netns))
	})
	return list
}
