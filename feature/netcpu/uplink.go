package netcpu

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"slices"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/kernel/cgroup"
	"github.com/fairlead-project/fairlead/kernel/journal"
	"github.com/fairlead-project/fairlead/kernel/netdev"
)

// uplinkGroup is the cgroup of the threads that poll devices which every
// container's packets come through.
const uplinkGroup = "fairlead-uplink"

// uplinkShares is its cpu.shares (v1), against 1024 of an ordinary group: at
// the worst it takes 2 % of a core from the others, and whatever is idle.
// Measured in README.md, "The stage before the container".
const uplinkShares = 20

// uplinks is what is changed on the host while any container is isolated.
type uplinks struct {
	group   string
	threads []thread
	claimed map[deviceKey]bool
}

type deviceKey struct {
	netns uint64
	index int
}

// claimUplinks moves the polling of the devices by which packets reach c into
// threads of the uplink group. These are the other ports of its bridges and the
// hardware of the host's namespace, from where a bridge may be routed to.
func (n *Netcpu) claimUplinks(ctx context.Context, c container.Container) error {
	if n.host == nil {
		group, err := n.makeUplinkGroup()
		if err != nil {
			return err
		}
		n.host = &uplinks{group: group, claimed: make(map[deviceKey]bool)}
	}
	self, err := netdev.Open(n.cfg.NetNS)
	if err != nil {
		return err
	}
	self.Close()
	masters := map[uint64][]string{self.Inode(): nil}
	paths := map[uint64]string{self.Inode(): n.cfg.NetNS}
	for _, dev := range c.Interfaces {
		if h := dev.Host; h.NetNS != 0 && h.Master != "" {
			masters[h.NetNS] = append(masters[h.NetNS], h.Master)
			if paths[h.NetNS] == "" {
				paths[h.NetNS] = h.NSPath
			}
		}
	}
	for inode, bridges := range masters {
		if err := ctx.Err(); err != nil {
			return err
		}
		if err := n.claimIn(paths[inode], inode, bridges); err != nil {
			return err
		}
	}
	return nil
}

func (n *Netcpu) claimIn(path string, inode uint64, bridges []string) error {
	ns, err := n.open(path, inode)
	if err != nil {
		return err
	}
	defer ns.Close()
	links, err := ns.Links()
	if err != nil {
		return err
	}
	for _, l := range links {
		key := deviceKey{inode, l.Index}
		if n.host.claimed[key] || !isUplink(l, links, bridges) {
			continue
		}
		polls, err := polling(ns, l)
		if err == nil && polls {
			err = n.claim(ns, l)
		}
		if errors.Is(err, journal.ErrGone) || errors.Is(err, netdev.ErrNoLink) {
			continue
		}
		if err != nil {
			return fmt.Errorf("uplink %s: %w", l.Name, err)
		}
		if !polls {
			continue
		}
		if n.early != nil {
			if err := n.early.uplink(ns, l.Index); err != nil {
				return fmt.Errorf("uplink %s: %w", l.Name, err)
			}
		}
		n.host.claimed[key] = true
	}
	return nil
}

// polling says whether a device has polling of its own. If not, its packets come
// in with somebody else's: those of a container's veth with its sender's.
func polling(ns *netdev.NS, l netdev.Link) (bool, error) {
	napis, err := ns.NAPIs(l.Index)
	if !errors.Is(err, netdev.ErrNoNAPIList) {
		return len(napis) > 0, err
	}
	if l.Kind != "veth" {
		return l.Kind == "device", nil
	}
	gro, err := ns.Offload(l.Index, netdev.GRO).Read()
	return gro != netdev.Off, err
}

// isUplink says whether packets from outside enter the host by a device: it is
// hardware, or a port of one of the bridges that does not lead to a container
// of this host. A veth whose other end is in a namespace that has a number
// here may be either; only one that polls (NAPI) is worth a thread, and the
// host end of a container's veth does not.
func isUplink(l netdev.Link, all []netdev.Link, bridges []string) bool {
	if !l.Up || l.Name == "lo" {
		return false
	}
	if l.Kind == "device" {
		return true
	}
	i := slices.IndexFunc(all, func(m netdev.Link) bool { return m.Index == l.Master })
	return i >= 0 && slices.Contains(bridges, all[i].Name)
}

func (n *Netcpu) claim(ns *netdev.NS, l netdev.Link) error {
	if err := n.stopRPS(ns, l.Index, 0); err != nil {
		return err
	}
	tids, err := n.threaded(ns, l.Index, l.Name, 0)
	if err != nil {
		return err
	}
	for _, tid := range tids {
		if err := n.move(tid, n.layout.CPU, n.host.group, 0); err != nil {
			return err
		}
		n.host.threads = append(n.host.threads, thread{tid, l.Name})
	}
	return nil
}

func (n *Netcpu) makeUplinkGroup() (string, error) {
	dir := filepath.Join(n.layout.CPU, uplinkGroup)
	if err := n.turn(cgroup.Group(dir), cgroup.Present, 0); err != nil {
		return "", err
	}
	return dir, n.setWeight(dir, uplinkShares, 0)
}

// releaseUplinks undoes all of it.
func (n *Netcpu) releaseUplinks() error {
	n.host = nil
	var err error
	if n.early != nil {
		err = n.early.releaseUplinks()
	}
	return errors.Join(err, n.restore(func(e journal.Entry) bool { return e.Owner.Container == 0 }))
}
