package netcpu

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strconv"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/kernel"
	"github.com/fairlead-project/fairlead/kernel/cgroup"
	"github.com/fairlead-project/fairlead/kernel/journal"
	"github.com/fairlead-project/fairlead/kernel/netdev"
	"github.com/fairlead-project/fairlead/kernel/qdisc"
	"github.com/fairlead-project/fairlead/kernel/sched"
)

// uplinkGroup begins the name of the cgroup of the threads that poll devices
// which every container's packets come through. The host's network namespace
// follows: several agents may run on one machine, each in one of its own.
const uplinkGroup = "fairlead-uplink-"

// uplinkShares is the cpu.shares (v1) of that group where packets cannot be
// dropped early, against 1024 of an ordinary group: a flood then takes at most a
// tenth of a core from the others. With early drop the group has the usual
// weight, which nobody needs to be protected from, since what a container cannot
// take costs next to nothing. MEASURED.md, "The stage before the container", has
// what was measured; the weight without early drop is arithmetic.
const uplinkShares = 100

// uplinks is what is changed on the host while any container is isolated.
type uplinks struct {
	group   string
	devices map[deviceKey]*uplink
}

type deviceKey struct {
	netns uint64
	index int
}

// uplink is one device by which packets enter the host.
type uplink struct {
	name    string
	path    string // to its namespace
	threads []thread
	cpus    []int    // of its threads, where RPS had its packets; nil: all
	queues  []*queue // those that a container could be given; see queue.go
}

// claimUplinks moves the polling of the devices by which packets reach c into
// threads of the uplink group.
func (n *Netcpu) claimUplinks(ctx context.Context, c container.Container) error {
	self, err := netdev.Open(n.cfg.NetNS)
	if err != nil {
		return err
	}
	self.Close()
	if n.host == nil {
		group, err := n.makeUplinkGroup(self.Inode())
		if err != nil {
			return err
		}
		n.host = &uplinks{group: group, devices: make(map[deviceKey]*uplink)}
	}
	return n.eachUplink(ctx, c, func(ns *netdev.NS, path string, links []netdev.Link) error {
		for _, l := range links {
			err := n.claimOnce(ns, path, l)
			if err != nil && !errors.Is(err, journal.ErrGone) && !errors.Is(err, netdev.ErrNoLink) {
				return fmt.Errorf("uplink %s: %w", l.Name, err)
			}
		}
		return nil
	})
}

// claimOnce claims a device that is not yet. n.host is there.
func (n *Netcpu) claimOnce(ns *netdev.NS, path string, l netdev.Link) error {
	key := deviceKey{ns.Inode(), l.Index}
	if n.claimed(key) {
		return nil
	}
	u, err := n.claim(ns, path, l)
	if u != nil {
		n.host.devices[key] = u
	}
	return err
}

func (n *Netcpu) claimed(key deviceKey) bool { return n.host != nil && n.host.devices[key] != nil }

// unclaim forgets the threads and the queues of a device: they may be others by now.
func (n *Netcpu) unclaim(key deviceKey) error {
	if !n.claimed(key) {
		return nil
	}
	err := n.unwatchQueuesOf(n.host.devices[key])
	delete(n.host.devices, key)
	return err
}

// eachUplink calls do with the devices by which packets reach c and that poll,
// once for each namespace that may have some, with a path to it: those of the
// host's with hardware or an address, from where a bridge may be routed to, and the
// other ports of the bridges that c is at. Of a namespace that a container may have made nothing is an
// uplink: the container could have its own packets worked on at the host's expense.
// It goes on with the next namespace after an error.
func (n *Netcpu) eachUplink(ctx context.Context, c container.Container, do func(*netdev.NS, string, []netdev.Link) error) error {
	self, err := netdev.Open(n.cfg.NetNS)
	if err != nil {
		return err
	}
	self.Close()
	paths := map[uint64]string{self.Inode(): n.cfg.NetNS}
	bridges := make(map[uint64][]string)
	for _, dev := range c.Interfaces {
		h := dev.Host
		own := h.NetNS == self.Inode()
		if h.Master != "" && (own || h.Trusted && !n.aHome(h.NetNS)) {
			bridges[h.NetNS] = append(bridges[h.NetNS], h.Master)
			if paths[h.NetNS] == "" {
				paths[h.NetNS] = h.NSPath
			}
		}
	}
	in := func(path string, inode uint64) error {
		ns, err := n.find.Open(path, inode)
		if err != nil {
			return err
		}
		defer ns.Close()
		all, err := ns.Links(netdev.MostLinks)
		if err != nil {
			return err
		}
		reached := make(map[int]bool)
		for _, l := range all {
			reached[l.Index] = slices.Contains(bridges[inode], l.Name)
		}
		polls, err := polling(ns)
		if err != nil {
			return err
		}
		var up []netdev.Link
		for _, l := range all {
			if !isUplink(l, reached[l.Master]) {
				continue
			}
			itself, err := polls(l)
			if err != nil && !errors.Is(err, journal.ErrGone) && !errors.Is(err, netdev.ErrNoLink) {
				return fmt.Errorf("uplink %s: %w", l.Name, err)
			}
			if itself && err == nil {
				up = append(up, l)
			}
		}
		return do(ns, path, up)
	}
	var errs []error
	for inode, path := range paths {
		if err := ctx.Err(); err != nil {
			return errors.Join(append(errs, err)...)
		}
		errs = append(errs, in(path, inode))
	}
	return errors.Join(errs...)
}

// isUplink says whether packets from outside may enter the host by a device, if
// it polls: it is hardware, has an address of the host (a tunnel's, or that of a
// veth which leads to another host), or is a port of a bridge that reaches the
// container. The host end of another container's veth may be such a port, too, but
// does not poll. The uplinks of feature/traffic are others: see docs/ARCHITECTURE.md.
func isUplink(l netdev.Link, port bool) bool {
	if !l.Up || l.Name == "lo" {
		return false
	}
	return l.Kind == "device" || len(l.Addrs) > 0 || port
}

// polling gives what says whether a device of a namespace has polling of its own.
// If not, its packets come in with somebody else's: those of a container's veth
// with its sender's. The kernel is asked once for all of them, as a bridge has a
// port for each container.
func polling(ns *netdev.NS) (func(netdev.Link) (bool, error), error) {
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

func (n *Netcpu) claim(ns *netdev.NS, path string, l netdev.Link) (*uplink, error) {
	cpus, err := n.steered(ns, l.Index)
	if err != nil {
		return nil, err
	}
	if err := n.stopRPS(ns, l.Index, 0); err != nil {
		return nil, err
	}
	threads, err := n.threaded(ns, l.Index, l.Name, 0)
	if err != nil {
		return nil, err
	}
	u := &uplink{name: l.Name, path: path, cpus: cpus}
	for _, t := range threads {
		if err := errors.Join(n.moveUplink(t), n.steer(t, cpus), n.hasten(t, 0)); err != nil {
			return nil, err
		}
		u.threads = append(u.threads, thread{t, l.Name})
	}
	if n.early == nil {
		return u, nil
	}
	u.queues, err = n.watchQueues(ns, l.Index, u.threads)
	return u, err
}

// moveUplink moves a thread of an uplink into the uplink group. An agent that
// was killed may have given it to a container that has ended since, whose cgroup
// then could not go.
func (n *Netcpu) moveUplink(t sched.Thread) error {
	groups := map[string]string{n.layout.CPU: n.host.group}
	if set := n.layout.CPUSet; set != "" && set != n.layout.CPU {
		groups[set] = set // all CPUs
	}
	for hierarchy, group := range groups {
		knob := sched.Group(n.cfg.Roots.Proc, n.layout, t, hierarchy)
		was, err := knob.Read()
		if err != nil {
			return err
		}
		if was == group {
			continue
		}
		if err := n.turn(knob, group, 0); err != nil {
			return err
		}
		left := journal.Outcome{Entry: journal.Entry{Ref: knob.Ref(), Wrote: was}}
		if err := kernel.Tidy(n.cfg.Roots, []journal.Outcome{left}); err != nil {
			return err
		}
	}
	return nil
}

func (n *Netcpu) makeUplinkGroup(netns uint64) (string, error) {
	dir := filepath.Join(n.layout.CPU, uplinkGroup+strconv.FormatUint(netns, 10))
	if err := n.turn(cgroup.Group(dir), cgroup.Present, 0); err != nil {
		return "", err
	}
	if n.early != nil {
		return dir, nil
	}
	return dir, n.setWeight(dir, uplinkShares, 0)
}

// releaseUplinks undoes all of it.
func (n *Netcpu) releaseUplinks() error {
	errs := []error{n.unwatchQueues()}
	n.host = nil
	return errors.Join(append(errs, n.restore(func(e journal.Entry) bool { return e.Owner.Container == 0 && e.Ref.Kind != qdisc.KindFilter }))...)
}

// unwatchQueues ends the counting of what the queues of the uplinks bring.
func (n *Netcpu) unwatchQueues() error {
	if n.host == nil {
		return nil
	}
	var errs []error
	for _, u := range n.host.devices {
		errs = append(errs, n.unwatchQueuesOf(u))
	}
	return errors.Join(errs...)
}

func (n *Netcpu) unwatchQueuesOf(u *uplink) error {
	var errs []error
	for _, q := range u.queues {
		errs = append(errs, n.early.unwatchQueue(q.napi))
	}
	u.queues = nil
	return errors.Join(errs...)
}
