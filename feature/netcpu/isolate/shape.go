package isolate

import (
	"errors"
	"time"

	"github.com/fairlead-project/fairlead/kernel"
	"github.com/fairlead-project/fairlead/kernel/journal"
)

// Follow adapts to the window that ends now.
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
	if want == super {
		off, err := is.switchedOff(s)
		if !off {
			s.control = control{}
			return err
		}
	}
	if err := is.setShape(s, want); err != nil && !errors.Is(err, journal.ErrGone) {
		s.control = before // so that the next window tries again
		return err
	}
	return nil
}

// setShape switches TSO at the host ends of a tenant's devices.
func (is *Isolator) setShape(s *isolation, to shape) error {
	// While the ring is not in use it must cause no drops: so the count ends first, or starts last.
	if to == super {
		if err := s.drops.UseRing(false); err != nil {
			return err
		}
	}
	mine := is.owns(s.payer.ID)
	err := is.eachEnd(s, func(e *hostEnd) error { return is.turn(e.sending(to), mine) })
	if err != nil {
		return err
	}
	if to == single {
		return s.drops.UseRing(true)
	}
	return nil
}

// switchedOff reports whether TSO is off at any host end of a tenant because of us. If it was off
// before, super-packets are not possible.
func (is *Isolator) switchedOff(s *isolation) (off bool, err error) {
	err = is.eachEnd(s, func(e *hostEnd) error {
		off = off || e.switchedOff
		return nil
	})
	return off, err
}

// eachEnd calls do with the host end of each veth of a tenant. It goes on after an error.
func (is *Isolator) eachEnd(s *isolation, do func(*hostEnd) error) error {
	var errs []error
	for _, dev := range s.payer.Interfaces {
		if !dev.HasHostEnd() {
			continue
		}
		e, err := is.lookAtEnd(dev.Host)
		if err == nil {
			err = do(e)
			e.close()
		}
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}
