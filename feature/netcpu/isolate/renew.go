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

// renew places threads again if a device has new ones, or others have changed what they have. A link
// that goes down and up, GRO that is switched off and on, and most drivers on reconfiguration replace a
// NAPI: its new thread starts in the root group. A container can do so at its own devices at any time.
// The next window sees the end of the old thread; an added queue does not affect the others, and takes
// law.Calm, as does a changed quota.
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

// changed returns the owners of what others have changed. Nothing tells of threads and of what is held; offloads,
// which take long to read, are part of a device that has changed.
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

// RenewUplinks is renew for the uplinks; again: also for what has not changed.
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

// live reports whether there are threads, and all still exist. It is far cheaper than listing the
// NAPIs in a tenant's namespace.
func live(proc string, threads []thread) bool {
	return len(threads) > 0 && !slices.ContainsFunc(threads, func(th thread) bool {
		// The number may be another thread's by now.
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
	if again { // the next window tries again without the threads of a device that fails
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
	// On failure the device, as known now, differs in the next window too.
	return is.claim(uplink.Uplink{Key: key, Link: l, NS: ns, Path: u.path})
}

// stillPoll reports whether the placed threads live, and each listed NAPI of a device has one of them.
// A device that is down has none to place.
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
