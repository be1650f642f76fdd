package netcpu

import (
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/kernel/journal"
	"github.com/fairlead-project/fairlead/kernel/netdev"
	"github.com/fairlead-project/fairlead/kernel/sched"
)

// renew places threads again where a device has others by now. A link that goes
// down and up, GRO that is switched off and on, and most drivers when they are
// set up anew, end a NAPI and make another: its thread begins in the group of all.
// A container can do so at its own devices at any time.
func (n *Netcpu) renew() error {
	var errs []error
	for _, t := range n.tenants {
		if err := passing(n.renewTenant(t)); err != nil {
			errs = append(errs, fmt.Errorf("place the threads of container %v again: %w", t.owner, err))
		}
	}
	if n.host == nil {
		return errors.Join(errs...)
	}
	for key, u := range n.host.devices {
		if err := passing(n.renewUplink(key, u)); err != nil {
			errs = append(errs, fmt.Errorf("place the threads of uplink %s again: %w", u.name, err))
		}
	}
	return errors.Join(errs...)
}

func (n *Netcpu) renewTenant(t *tenant) error {
	c := t.members[t.owner]
	ns, err := n.find.Open(filepath.Join(n.cfg.Roots.Proc, strconv.Itoa(c.PID), "ns", "net"), c.NetNS)
	if err != nil {
		return err
	}
	defer ns.Close()
	var errs []error
	for _, dev := range c.Interfaces {
		if !ownNAPI(dev) {
			continue
		}
		old := slices.DeleteFunc(slices.Clone(t.threads), func(th thread) bool { return th.device != dev.Name })
		if same, err := n.stillPoll(ns, dev.Index, old); same || err != nil {
			errs = append(errs, passing(err))
			continue
		}
		threads, err := n.placeDevice(ns, dev, t.control.shape, t.group, c)
		if err != nil {
			errs = append(errs, passing(err)) // the next window tries again
			continue
		}
		t.threads = slices.DeleteFunc(t.threads, func(th thread) bool { return th.device == dev.Name })
		t.threads = append(t.threads, threads...)
		errs = append(errs, n.forgetThreads(old, threads))
	}
	return errors.Join(errs...)
}

func (n *Netcpu) renewUplink(key deviceKey, u *uplink) error {
	ns, err := n.find.Open(u.path, key.netns)
	if errors.Is(err, netdev.ErrNoNS) {
		return n.unclaim(key)
	}
	if err != nil {
		return err
	}
	defer ns.Close()
	same, err := n.stillPoll(ns, key.index, u.threads)
	if errors.Is(err, netdev.ErrNoLink) {
		return n.unclaim(key)
	}
	if same || err != nil {
		return err
	}
	l, err := ns.Link(key.index)
	if err != nil {
		return err
	}
	if err := n.unwatchQueuesOf(u); err != nil {
		return err
	}
	now, err := n.claim(ns, u.path, l)
	if now == nil {
		return err // as it is known now it differs in the next window, too
	}
	n.host.devices[key] = now
	return errors.Join(err, n.forgetThreads(u.threads, now.threads))
}

// stillPoll says whether those that poll a device are the threads that were
// placed. One that is down has none to be placed.
func (n *Netcpu) stillPoll(ns *netdev.NS, index int, threads []thread) (bool, error) {
	napis, err := ns.NAPIs(index)
	listed := !errors.Is(err, netdev.ErrNoNAPIList)
	if err != nil && listed {
		return false, err
	}
	same := len(threads) > 0 && (!listed || len(napis) == len(threads))
	for _, t := range threads {
		same = same && (!listed || slices.ContainsFunc(napis, func(napi netdev.NAPI) bool { return napi.Thread == t.TID }))
		// The number may be another thread's by now.
		now, err := sched.Find(n.cfg.Roots.Proc, t.TID)
		same = same && err == nil && now == t.Thread
	}
	if same {
		return true, nil
	}
	l, err := ns.Link(index)
	return err == nil && !l.Up, err
}

// forgetThreads undoes what was changed of threads that no longer poll: that is to
// drop the notes of those that have ended.
func (n *Netcpu) forgetThreads(old, now []thread) error {
	return n.restore(func(e journal.Entry) bool {
		switch e.Ref.Kind {
		case sched.KindKthread, sched.KindAffinity, sched.KindSlice:
		default:
			return false
		}
		of := func(t thread) bool {
			return strings.HasPrefix(e.Ref.Object+":", fmt.Sprintf("%d:%d:", t.TID, t.Start))
		}
		return slices.ContainsFunc(old, of) && !slices.ContainsFunc(now, of)
	})
}

// placeDevice makes one device of a container poll in threads, and places them.
func (n *Netcpu) placeDevice(ns *netdev.NS, dev container.Interface, s shape, group string, c container.Container) ([]thread, error) {
	polling, err := n.thread(ns, dev, s, c.ID)
	if err != nil {
		return nil, err
	}
	if err := n.makePayer(group, c); err != nil {
		return nil, err
	}
	var threads []thread
	for _, th := range polling {
		if err := errors.Join(n.place(th, group, c.Cgroup.CPUSet, c.ID), n.hasten(th, c.ID)); err != nil {
			return nil, err
		}
		threads = append(threads, thread{th, dev.Name})
	}
	return threads, nil
}
