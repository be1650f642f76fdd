package netcpu

import (
	"context"
	"errors"
	"fmt"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/kernel/journal"
	"github.com/fairlead-project/fairlead/kernel/netdev"
	"github.com/fairlead-project/fairlead/kernel/qdisc"
)

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
				if err := d.Hold(); err != nil {
					return fmt.Errorf("uplink %s: %w", l.Name, err)
				}
				continue
			}
			door, err := n.early.uplink(ns, l.Index)
			if errors.Is(err, journal.ErrGone) {
				continue // it has gone meanwhile
			}
			if err != nil {
				return fmt.Errorf("uplink %s: %w", l.Name, err)
			}
			n.doors[key] = door
		}
		return nil
	})
}

// closeDoors ends it, unless there still is a container to drop for.
func (n *Netcpu) closeDoors() error {
	if n.early != nil && len(n.early.used) > 0 {
		return nil
	}
	var errs []error
	for key, door := range n.doors {
		errs = append(errs, door.Close())
		delete(n.doors, key)
	}
	return errors.Join(errs...)
}

// doors are the programs that drop at uplinks.
type doors map[deviceKey]*qdisc.Attachment
