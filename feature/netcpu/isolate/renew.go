package isolate

import (
	"errors"
	"fmt"
	"slices"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/feature/netcpu/law"
	"github.com/fairlead-project/fairlead/feature/netcpu/uplink"
	"github.com/fairlead-project/fairlead/kernel/journal"
	"github.com/fairlead-project/fairlead/kernel/netdev"
	"github.com/fairlead-project/fairlead/kernel/sched"
)

// renew places threads again if a device has new threads or another process has changed our settings.
// A link that goes down and up, GRO that is switched off and on, and a reconfiguration in most drivers
// replace a NAPI: its new thread starts in the root cgroup. A container can cause that at its own
// devices at any time. The next window sees that the old thread has ended. renew finds an added queue,
// which does not affect the others, or a changed quota within law.Calm.
func (is *Isolator) renew() error {
	changed, err := is.changed()
	errs := []error{err}
	for _, s := range is.isolated {
		again := slices.Contains(changed, is.by(s.payer.ID))
		if s.asked++; s.asked < int(law.Calm/law.Window) && !again && live(is.cfg.Roots.Proc, s.threads) {
			continue
		}
		s.asked = 0
		if err := errors.Join(IgnoreGone(is.heed(s, s.payer)), IgnoreGone(is.renewTenant(s, again))); err != nil {
			errs = append(errs, fmt.Errorf("place the threads of container %v again: %w", s.payer.ID, err))
		}
	}
	return errors.Join(append(errs, is.RenewUplinks(slices.Contains(changed, is.by(0))))...)
}

// changed returns the owners of settings that others have changed. No event reports a change of a thread
// or of a held file. Offloads are slow to read, so they are read only when a device has changed.
func (is *Isolator) changed() ([]journal.Owner, error) {
	if is.Idle() {
		return nil, nil
	}
	kinds := []string{sched.KindKthread, sched.KindSlice, sched.KindNice}
	links, err := is.cfg.Uplinks.Links()
	if err != nil {
		return nil, err
	}
	if len(links) > 0 && is.links != &links[0] {
		is.links, kinds = &links[0], append(kinds, netdev.KindOffload)
	}
	by, _, err := is.cfg.Journal.Overwritten(func(r journal.Ref) (journal.Knob, error) {
		if r.Kind == netdev.KindOffload {
			return netdev.OpenKnob(is.cfg.Find, r)
		}
		return sched.OpenKnob(is.cfg.Roots.Proc, is.cfg.Layout, r)
	}, func(e journal.Entry) bool {
		return e.Owner.Feature == is.cfg.Feature && slices.Contains(kinds, e.Ref.Kind)
	})
	return append(by, is.held.changed()...), err
}

// RenewUplinks places the threads of uplinks again; with again, also those that have not changed.
func (is *Isolator) RenewUplinks(again bool) error {
	if is.host == nil || is.resting.rests {
		return nil
	}
	errs := []error{IgnoreGone(is.weighUplinks())}
	for key, u := range is.host.devices {
		if err := IgnoreGone(is.renewUplink(key, u, again)); err != nil {
			errs = append(errs, fmt.Errorf("place the threads of uplink %s again: %w", u.name, err))
		}
	}
	return errors.Join(errs...)
}

// live reports whether there are threads and all of them still exist. It is far cheaper than a list of
// the NAPIs in a tenant's namespace.
func live(proc string, threads []thread) bool {
	return len(threads) > 0 && !slices.ContainsFunc(threads, func(th thread) bool {
		// Another thread may have the TID by now.
		now, err := sched.Find(proc, th.TID)
		return err != nil || now != th.Thread
	})
}

func (is *Isolator) renewTenant(s *isolation, again bool) error {
	ns, err := is.open(s.payer)
	if err != nil {
		return err
	}
	defer ns.Close()
	for _, dev := range s.payer.Interfaces {
		if !dev.HasHostEnd() {
			continue
		}
		same, err := is.stillPoll(ns, dev.Index, slices.DeleteFunc(slices.Clone(s.threads), func(th thread) bool { return th.device != dev.Name }))
		if IgnoreGone(err) != nil {
			return err
		}
		again = again || err == nil && !same
	}
	if again { // a device that fails has no thread in s.threads, so the next window tries again
		s.threads, err = is.bringVeths(ns, s.payer, s.control.shape, s.at)
	}
	return err
}

func (is *Isolator) renewUplink(key container.Device, u *uplinkDevice, again bool) error {
	ns, err := is.cfg.Find.Open(u.path, key.NetNS)
	if errors.Is(err, netdev.ErrNoNS) {
		return is.unclaim(key)
	}
	if err != nil {
		return err
	}
	defer ns.Close()
	same, err := is.stillPoll(ns, key.Index, u.threads)
	if errors.Is(err, netdev.ErrNoLink) {
		return is.unclaim(key)
	}
	if same && !again || err != nil {
		return err
	}
	l, err := ns.Link(key.Index)
	if err != nil {
		return err
	}
	if err := is.forgetQueuesOf(u); err != nil {
		return err
	}
	// If claim fails, the known threads still differ in the next window.
	return is.claim(uplink.Uplink{Key: key, Link: l, NS: ns, Path: u.path})
}

// stillPoll reports whether the placed threads live and each listed NAPI of the device has one of them.
// It is also true for a device that is down, which has no threads to place.
func (is *Isolator) stillPoll(ns *netdev.NS, index int, threads []thread) (bool, error) {
	napis, err := ns.NAPIs(index)
	listed := !errors.Is(err, netdev.ErrNoNAPIList)
	if err != nil && listed {
		return false, err
	}
	unplaced := func(napi netdev.NAPI) bool {
		return !slices.ContainsFunc(threads, func(t thread) bool { return t.TID == napi.Thread })
	}
	same := !listed || !slices.ContainsFunc(napis, unplaced)
	if same && live(is.cfg.Roots.Proc, threads) {
		return true, nil
	}
	l, err := ns.Link(index)
	return err == nil && !l.Up, err
}
