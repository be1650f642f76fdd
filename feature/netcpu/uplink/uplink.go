// Package uplink finds the devices that packets pass before they reach a container's own device. It
// changes nothing. Package isolate makes threads poll these devices, and package drop drops packets
// at them.
//
// feature/traffic uses the word uplink for other devices: see docs/ARCHITECTURE.md.
package uplink

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/kernel/journal"
	"github.com/fairlead-project/fairlead/kernel/netdev"
	"github.com/fairlead-project/fairlead/tenant/identity"
)

// Uplink is a device that packets pass on their way to a container.
type Uplink struct {
	Key  container.Device
	Link netdev.Link
	NS   *netdev.NS // open during the call
	Path string     // to NS
	Host bool       // NS is the host's network namespace
}

// Finder finds uplinks. It is safe for concurrent use.
type Finder struct {
	NetNS   string // path to the host's network namespace
	Find    *netdev.Finder
	Who     *identity.Identity // knows the namespaces of containers
	Monitor *netdev.Monitor    // may be nil
}

// Host returns the inode of the host's network namespace.
func (f *Finder) Host() (uint64, error) {
	ns, err := netdev.Open(f.NetNS)
	if err != nil {
		return 0, err
	}
	defer ns.Close()
	return ns.Inode(), nil
}

// Links lists the devices of the host's namespace. Each change of a device makes a new list.
func (f *Finder) Links() ([]netdev.Link, error) {
	ns, err := netdev.Open(f.NetNS)
	if err != nil {
		return nil, err
	}
	defer ns.Close()
	return f.Monitor.Links(ns, netdev.MostLinks)
}

// Each calls do with the uplinks of c. These are devices that poll: in the host's namespace hardware
// and devices with an address, from which packets may be routed to a bridge, and the ports of c's
// bridges. A device in a namespace that a container may have made is never an uplink, because the
// container could make the host pay for its packets. Each continues after an error. A device that has
// gone is no error.
func (f *Finder) Each(ctx context.Context, c container.Container, do func(Uplink) error) error {
	host, err := f.Host()
	if err != nil {
		return err
	}
	paths := map[uint64]string{host: f.NetNS}
	bridges := make(map[uint64][]string)
	for _, dev := range c.Interfaces {
		h := dev.Host
		if h.Master != "" && (h.NetNS == host || h.Trusted && !f.Who.Home(h.NetNS)) {
			bridges[h.NetNS] = append(bridges[h.NetNS], h.Master)
			if paths[h.NetNS] == "" {
				paths[h.NetNS] = h.NSPath
			}
		}
	}
	var errs []error
	for inode, path := range paths {
		if err := ctx.Err(); err != nil {
			return errors.Join(append(errs, err)...)
		}
		ns, err := f.Find.Open(path, inode)
		if err != nil {
			errs = append(errs, err)
			continue
		}
		all, err := f.Monitor.Links(ns, netdev.MostLinks)
		if err != nil {
			errs = append(errs, err)
			ns.Close()
			continue
		}
		links, err := uplinks(ns, all, bridges[inode])
		errs = append(errs, err)
		for _, l := range links {
			err := do(Uplink{Key: container.Device{NetNS: inode, Index: l.Index}, Link: l, NS: ns, Path: path, Host: inode == host})
			if err != nil && !errors.Is(err, journal.ErrGone) && !errors.Is(err, netdev.ErrNoLink) { // not just gone
				errs = append(errs, fmt.Errorf("uplink %s: %w", l.Name, err))
			}
		}
		ns.Close()
	}
	return errors.Join(errs...)
}

// uplinks returns the uplinks among all devices of one namespace. bridges are the bridges that reach
// the container.
func uplinks(ns *netdev.NS, all []netdev.Link, bridges []string) (up []netdev.Link, err error) {
	reached := make(map[int]bool)
	for _, l := range all {
		reached[l.Index] = slices.Contains(bridges, l.Name)
	}
	polls, err := Polling(ns)
	if err != nil {
		return nil, err
	}
	for _, l := range all {
		if !isEntry(l, reached[l.Master]) {
			continue
		}
		itself, err := polls(l)
		if errors.Is(err, journal.ErrGone) || errors.Is(err, netdev.ErrNoLink) {
			continue
		}
		if err != nil {
			return nil, fmt.Errorf("uplink %s: %w", l.Name, err)
		}
		if itself {
			up = append(up, l)
		}
	}
	return up, nil
}

// isEntry reports whether packets from outside may enter the host by a device, if it polls. Such a
// device is hardware, has an address of the host (a tunnel, or a veth that leads to another host), or
// is a port of a bridge that reaches the container. The host end of another container's veth may be
// such a port, too, but does not poll.
func isEntry(l netdev.Link, port bool) bool {
	if !l.Up || l.Name == "lo" {
		return false
	}
	return l.Kind == "device" || len(l.Addrs) > 0 || port
}

// Polling returns a function that reports whether a device of a namespace has its own NAPI. Packets of
// a device without one arrive in the poll of another device: those of a container's veth in the poll of
// the sender's device. Polling asks the kernel once for all devices, because a bridge has a port for
// each container.
func Polling(ns *netdev.NS) (func(netdev.Link) (bool, error), error) {
	napis, err := ns.NAPIs(0)
	if errors.Is(err, netdev.ErrNoNAPIList) {
		return func(l netdev.Link) (bool, error) {
			if l.Kind != "veth" {
				return l.Kind == "device", nil
			}
			gro, err := ns.Offload(l.Index, netdev.GRO).Read()
			return err == nil && gro != netdev.Off, err
		}, nil
	}
	polls := make(map[int]bool)
	for _, n := range napis {
		polls[n.Device] = true
	}
	return func(l netdev.Link) (bool, error) { return polls[l.Index], nil }, err
}
