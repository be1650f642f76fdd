package netcpu

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/feature"
	"github.com/fairlead-project/fairlead/feature/netcpu/uplink"
	"github.com/fairlead-project/fairlead/kernel/journal"
	"github.com/fairlead-project/fairlead/kernel/netdev"
	"github.com/fairlead-project/fairlead/policy"
)

// uncovered returns a feature.ErrPartly if packets of an isolated container may enter the host by a
// device that does not poll. No thread of ours handles them: they take time from any context.
func (n *Netcpu) uncovered(ctx context.Context, c container.Container) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	self, err := netdev.Open(n.cfg.NetNS)
	if err != nil {
		return err
	}
	defer self.Close()
	links, err := n.uplinks.Links()
	if err != nil {
		return err
	}
	polls, err := uplink.Polling(self)
	if err != nil {
		return err
	}
	neighbours := []container.Container{c}
	if n.cfg.Containers != nil {
		neighbours = append(neighbours, n.cfg.Containers.Running()...)
	}
	leads := func(l netdev.Link) bool { // to a container of this host
		return slices.ContainsFunc(neighbours, func(c container.Container) bool {
			return slices.ContainsFunc(c.Interfaces, func(i container.Interface) bool {
				return i.Host.NetNS == self.Inode() && i.Host.Index == l.Index
			})
		})
	}
	var names []string
	mend := "a NIC whose driver has NAPI"
	for _, l := range links {
		if !entrance(l) || leads(l) {
			continue
		}
		itself, err := polls(l)
		if errors.Is(err, journal.ErrGone) || errors.Is(err, netdev.ErrNoLink) {
			continue
		}
		if err != nil {
			return err
		}
		if itself {
			continue
		}
		names = append(names, l.Name)
		switch l.Kind {
		case "veth":
			mend = fmt.Sprintf("GRO at it (ethtool -K %s gro on)", l.Name)
		case "macvlan", "ipvlan":
			mend = "an agent on the host that has the device below it"
		}
	}
	if len(names) == 0 {
		return nil
	}
	return fmt.Errorf("netcpu isolate: %w: packets come in by %s, which does not poll: the work on them before they reach the container's own device is done in others' time; possible with: %s",
		feature.ErrPartly, strings.Join(names, ", "), mend)
}

// Notify implements feature.Notifier.
func (n *Netcpu) Notify(changed func(container.ID)) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.changed = changed
	_ = n.follow() // the first look
}

// follow requests that policy be applied again to every container in a mode beyond observe, if an
// uplink has come or gone or another process has detached a program. The caller holds mu.
func (n *Netcpu) follow() error {
	if n.changed == nil {
		return nil
	}
	links, err := n.uplinks.Links()
	if err != nil {
		return err
	}
	was := n.entrances
	n.entrances = "lo\n"
	for _, l := range links {
		if entrance(l) {
			n.entrances += fmt.Sprintln(l.Name, l.Index, l.Master)
		}
	}
	if was == "" || was == n.entrances && !n.dropper.Lost() {
		return nil
	}
	for _, t := range n.tenants.Tenants() {
		for _, m := range t.Members() {
			if m.Settings.NetCPU != policy.NetCPUObserve {
				n.changed(m.Container.ID)
			}
		}
	}
	return nil
}

// entrance reports whether packets from outside enter the host's namespace by a device. Such a
// device is hardware, or has an address and a peer or lower device in another namespace, like eth0
// of a host that is itself a container.
func entrance(l netdev.Link) bool {
	if !l.Up || l.Name == "lo" {
		return false
	}
	switch l.Kind {
	case "device":
		return true
	case "veth", "macvlan", "ipvlan":
		// Every device that is up has a link-local address, which shows nothing.
		return slices.ContainsFunc(l.Addrs, func(cidr string) bool {
			p, err := netip.ParsePrefix(cidr)
			return err == nil && !p.Addr().IsLinkLocalUnicast()
		})
	}
	return false
}
