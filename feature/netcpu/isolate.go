package netcpu

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/kernel/cgroup"
	"github.com/fairlead-project/fairlead/kernel/journal"
	"github.com/fairlead-project/fairlead/kernel/netdev"
	"github.com/fairlead-project/fairlead/kernel/sched"
)

// isolate brings one container's devices and threads to where they belong. It
// may be called again at any time and then only repairs.
func (n *Netcpu) isolate(ctx context.Context, c container.Container) error {
	t := n.tenants[c.NetNS]
	if t != nil && t.owner != c.ID {
		// The namespace is charged to the container that was first in it, as
		// the kernel cannot tell whose socket a packet is for before it has
		// done the work.
		n.join(t, c)
		return nil
	}
	ns, err := n.find.Open(filepath.Join(n.cfg.Roots.Proc, strconv.Itoa(c.PID), "ns", "net"), c.NetNS)
	if err != nil {
		return fmt.Errorf("netcpu isolate: %w", err)
	}
	defer ns.Close() // an open namespace would outlive its container

	if t == nil {
		t = &tenant{netns: c.NetNS, owner: c.ID, members: make(map[container.ID]container.Container)}
	}
	group, err := n.payer(c)
	if err != nil {
		return fmt.Errorf("netcpu isolate: %w", err)
	}
	if moved := t.group != "" && (t.group != group || t.cpuset != c.Cgroup.CPUSet); moved {
		// Nothing may be left where it was. What it had of the uplinks it can
		// earn again.
		if err := errors.Join(n.movedAlong(t.group, group), n.movedAlong(t.cpuset, c.Cgroup.CPUSet), n.takeQueues(t)); err != nil {
			return fmt.Errorf("netcpu isolate: %w", err)
		}
	}
	var threads []thread
	var skipped []error
	for _, dev := range c.Interfaces {
		if err := ctx.Err(); err != nil {
			return err
		}
		if !ownNAPI(dev) {
			skipped = append(skipped, fmt.Errorf("%s: %w", dev.Name, errNoOwnNAPI))
			continue
		}
		polling, err := n.placeDevice(ns, dev, t.control.shape, group, c)
		if err != nil {
			return fmt.Errorf("netcpu isolate: %s: %w", dev.Name, err)
		}
		threads = append(threads, polling...)
	}
	if err := n.dropStale(t, c, group, threads); err != nil {
		return fmt.Errorf("netcpu isolate: %w", err)
	}
	if len(threads) == 0 && len(skipped) > 0 {
		return fmt.Errorf("netcpu isolate: %w", errors.Join(skipped...))
	}
	if err := n.weigh(c); err != nil {
		return fmt.Errorf("netcpu isolate: %w", err)
	}
	if err := n.allowQueues(t, c); err != nil {
		return fmt.Errorf("netcpu isolate: %w", err)
	}
	t.threads, t.group, t.cpuset = threads, group, c.Cgroup.CPUSet
	n.tenants[c.NetNS] = t
	n.join(t, c)
	// One that is charged in the same namespace has its packets paid for now.
	if err := errors.Join(n.unguard(c.NetNS), n.watch(ns, t, c)); err != nil {
		return fmt.Errorf("netcpu isolate: %w", err)
	}
	// In this order: some drivers make their NAPIs, and so the threads, anew for XDP.
	if err := errors.Join(n.openDoors(ctx, c), n.claimUplinks(ctx, c)); err != nil {
		return fmt.Errorf("netcpu isolate: %w", err)
	}
	return nil
}

// ownNAPI says whether a device has a polling of its own: a veth does, if its
// other end can be found.
func ownNAPI(dev container.Interface) bool { return dev.Kind == "veth" && dev.Host.NetNS != 0 }

// errNoOwnNAPI says why a device cannot be isolated: a macvlan is polled by the
// device below it, together with everybody else's packets.
var errNoOwnNAPI = errors.New("no veth with a host end that can be found: it has no polling of its own to move")

// thread makes one device of a container poll in threads and returns them.
//
// A veth does that for every packet only if GRO is on at the receiving end and
// TSO off at the sending one (veth.c: veth_gro_requested,
// veth_skb_is_eligible_for_gro). RPS would hand the packets on to a softirq.
func (n *Netcpu) thread(ns *netdev.NS, dev container.Interface, s shape, id container.ID) ([]sched.Thread, error) {
	if err := n.turn(ns.Offload(dev.Index, netdev.GRO), netdev.GRO.On(), id); err != nil {
		return nil, err
	}
	if err := n.stopRPS(ns, dev.Index, id); err != nil {
		return nil, err
	}
	if err := n.setTSO(dev.Host, s, id); err != nil {
		return nil, err
	}
	return n.threaded(ns, dev.Index, dev.Name, id)
}

// stopRPS makes no receive queue of a device hand its packets to another CPU.
func (n *Netcpu) stopRPS(ns *netdev.NS, index int, id container.ID) error {
	return eachRPS(ns, index, func(rps journal.Knob, mask string) error {
		return n.turn(rps, noCPUs(mask), id)
	})
}

// eachRPS calls do with the RPS of each receive queue of a device and what it is, until do
// gives an error.
func eachRPS(ns *netdev.NS, index int, do func(rps journal.Knob, mask string) error) error {
	link, err := ns.Link(index)
	if err != nil {
		return err
	}
	for q := range link.RxQueues {
		rps := ns.RPS(index, q)
		mask, err := rps.Read()
		if q > 0 && errors.Is(err, journal.ErrGone) {
			// A veth is made with a queue for each CPU and uses one; sysfs
			// shows only those in use.
			return nil
		}
		if err != nil {
			return err
		}
		if err := do(rps, mask); err != nil {
			return err
		}
	}
	return nil
}

// noCPUs gives the empty CPU mask in the width of mask.
func noCPUs(mask string) string {
	return strings.Map(func(r rune) rune {
		if r == ',' {
			return r
		}
		return '0'
	}, mask)
}

// charged returns the cgroup whose share of the CPU pays for a container's
// packets: its own in the hierarchy of the cpu controller; for a pod's container
// the pod's, whose containers share one network.
func charged(c container.Container) (string, error) {
	switch {
	case c.Cgroup.CPU == "":
		return "", errors.New("the container's cpu cgroup is not known")
	case c.Pod != "":
		return filepath.Dir(c.Cgroup.CPU), nil
	}
	return c.Cgroup.CPU, nil
}

// payer returns the cgroup that the threads of c go into. On v1 that is its account.
//
// On v2 it is a child of that, named fairlead. A group with threads in it could no
// longer hand controllers down, as a systemd inside the container wants its own
// to; and one that does so, as a pod's, may hold none. What the child's threads do
// is the account's in both cases: in the first the child has no share of its own,
// in the second it competes with the containers at the usual weight.
func (n *Netcpu) payer(c container.Container) (string, error) {
	dir, err := charged(c)
	if err != nil || n.layout.CPU != n.layout.V2 {
		return dir, err
	}
	// Without the controller the time would be a group's further up, which
	// others share.
	if _, err := cgroup.Weight(dir); err != nil {
		return "", fmt.Errorf("%s could not be charged for its packets: %w", dir, err)
	}
	return filepath.Join(dir, "fairlead"), nil
}

// makePayer makes that cgroup, where it is not the container's own.
func (n *Netcpu) makePayer(group string, c container.Container) error {
	if dir, err := charged(c); err != nil || dir == group {
		return err
	}
	return n.turn(cgroup.Group(group), cgroup.Present, c.ID)
}

// watch begins the early drop for those devices of a tenant that have none yet.
func (n *Netcpu) watch(ns *netdev.NS, t *tenant, c container.Container) (err error) {
	if n.early == nil {
		return nil
	}
	if t.early == nil {
		if t.early, err = n.early.add(t.owner); err != nil {
			return err
		}
	}
	return n.watchDevices(t.early, ns, c)
}

// bill has what is dropped for a tenant's sake charged to whom its packets are
// charged to. That can be another container than the one whose thread it is, and
// changes with those who are in the namespace.
func (n *Netcpu) bill(t *tenant) error {
	if t == nil || t.early == nil || n.meter == nil {
		return nil
	}
	slot := uint32(0)
	if id, ok := n.meter.Holder(t.netns); ok {
		slot, _ = n.meter.Slot(id) // 0 if it was forgotten meanwhile
	}
	return n.early.bill(t.early, slot)
}

// watchDevices watches the veths of a container.
func (n *Netcpu) watchDevices(w *watched, ns *netdev.NS, c container.Container) error {
	for _, dev := range c.Interfaces {
		if !ownNAPI(dev) {
			continue
		}
		if l := w.at(ns, dev.Index); l != nil {
			if err := l.Hold(); err != nil {
				return err
			}
			continue
		}
		if err := n.watchDevice(w, ns, dev); err != nil {
			return err
		}
	}
	return nil
}

func (n *Netcpu) watchDevice(w *watched, ns *netdev.NS, dev container.Interface) error {
	host, err := n.find.Open(dev.Host.NSPath, dev.Host.NetNS)
	if err != nil {
		return err
	}
	defer host.Close()
	return n.early.device(w, ns, dev.Index, host, dev.Host.Index)
}
