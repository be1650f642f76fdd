package isolate

import (
	"errors"
	"slices"
	"strings"
	"time"

	"github.com/fairlead-project/fairlead/kernel"
	"github.com/fairlead-project/fairlead/kernel/journal"
	"github.com/fairlead-project/fairlead/kernel/netdev"
)

// Follow adapts to the traffic of the window that ends now.
func (is *Isolator) Follow(now time.Time) error {
	err := errors.Join(is.renew(), kernel.Tidy(is.cfg.Roots, is.vacated.next()))
	if is.cfg.Drop == nil {
		return err // nothing is counted
	}
	return errors.Join(err, is.counting(func(s *isolation) error {
		c, err := s.drops.Counters()
		if err != nil {
			return err
		}
		last := s.counted
		s.counted = flow{at: now, Counters: c}
		if last.at.IsZero() {
			return nil
		}
		w := window{now.Sub(last.at), c.Intruding - last.Intruding, c.Super - last.Super}
		return errors.Join(IgnoreGone(is.reshape(s, w)), IgnoreGone(is.takeTurns(s, c.Small-last.Small)))
	}))
}

// reshape sets the shape of a tenant's packets by its traffic.
func (is *Isolator) reshape(s *isolation, w window) error {
	before := s.control
	want := s.control.next(w)
	if want == before.shape {
		return nil
	}
	if want == super && !slices.ContainsFunc(is.cfg.Journal.Entries(), is.switchedOff(s)) {
		s.control = control{}
		return nil
	}
	if err := is.setShape(s, want); err != nil && !errors.Is(err, journal.ErrGone) {
		s.control = before // the next window tries again
		return err
	}
	return nil
}

// setShape switches TSO at the host ends of a tenant's devices off, or restores it. It depends on no
// setting that the container can change.
func (is *Isolator) setShape(s *isolation, to shape) error {
	// The ring must not cause drops while it is unused: so its count ends first, or starts last.
	if to == super {
		if err := s.drops.UseRing(false); err != nil {
			return err
		}
		return is.restore(is.switchedOff(s))
	}
	var errs []error
	for _, dev := range s.payer.Interfaces {
		if !dev.HasHostEnd() {
			continue
		}
		ns, err := is.cfg.Find.Open(dev.Host.NSPath, dev.Host.NetNS)
		if err == nil {
			err = is.turn([]journal.Setting{{Knob: ns.Offload(dev.Host.Index, netdev.TSO), Value: netdev.Off}}, is.owns(s.payer.ID))
			ns.Close()
		}
		errs = append(errs, err)
	}
	if err := errors.Join(errs...); err != nil {
		return err
	}
	return s.drops.UseRing(true)
}

// switchedOff matches the entries of TSO that we switched off at the host ends of a tenant's devices.
// If TSO was off before, there is no entry, and super-packets are not possible.
func (is *Isolator) switchedOff(s *isolation) func(journal.Entry) bool {
	return func(e journal.Entry) bool {
		return e.Owner == is.by(s.payer.ID) && e.Ref.Kind == netdev.KindOffload && strings.HasSuffix(e.Ref.Object, "/"+string(netdev.TSO))
	}
}
