package isolate

import (
	"errors"
	"strconv"
	"time"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/feature/netcpu/law"
	"github.com/fairlead-project/fairlead/kernel"
	"github.com/fairlead-project/fairlead/kernel/journal"
	"github.com/fairlead-project/fairlead/kernel/netdev"
)

// delayFor returns the time between polls at a rate of packets/s. It keeps the present one, 0 for
// none, if that is not far off.
func delayFor(rate float64, now time.Duration) time.Duration {
	want := min(deferMost, time.Duration(ring/2/rate*float64(time.Second)))
	if now > 0 && now <= deferMost && want < now*3/2 && now < want*3/2 {
		return now
	}
	return want.Round(time.Microsecond)
}

// deferPolls makes uplinks that bring a flood, of rate packets/s, poll by a timer: else a thread
// that finds time wakes up for each packet, and takes twice as long for it. With a rate of 0 polls
// are soon prompt again.
func (is *Isolator) deferPolls(now time.Time, rate float64) error {
	if rate == 0 {
		if is.flooded.IsZero() || now.Sub(is.flooded) < law.Calm/2 {
			return nil
		}
		is.flooded = time.Time{}
		for _, u := range is.host.devices {
			u.deferred = deferred{}
		}
		return is.promptPolls()
	}
	is.flooded = now
	var errs []error
	for key, u := range is.host.devices {
		delay := delayFor(rate, u.deferred.by)
		if _, heavy := is.worked.heavy[key]; !heavy || delay == u.deferred.by && now.Sub(u.deferred.at) < law.Long/4 {
			continue
		}
		u.deferred = deferred{now, delay}
		errs = append(errs, IgnoreGone(is.deferPollsOf(key, u)))
	}
	return errors.Join(errs...)
}

// deferred is when the delay of an uplink's polls was last set, and to what.
type deferred struct {
	at time.Time
	by time.Duration
}

// deferPollsOf delays the polls of one uplink, unless its operator has done so.
func (is *Isolator) deferPollsOf(key container.Device, u *uplinkDevice) error {
	ns, err := is.cfg.Find.Open(u.path, key.NetNS)
	if err != nil {
		return err
	}
	defer ns.Close()
	plan := deferral(ns, key.Index, u.deferred.by)
	for _, s := range plan {
		now, err := s.Knob.Read()
		if err != nil {
			return err
		}
		if is.cfg.Journal.Given(s.Knob.Ref(), now) != "0" {
			return nil
		}
	}
	return is.cfg.Journal.TurnAll(plan, is.by(0), u.deferred.at.Add(law.Long))
}

// deferral plans a delay of a device's polls: the time first, as the other part begins it.
func deferral(ns *netdev.NS, index int, delay time.Duration) []journal.Setting {
	return []journal.Setting{
		{Knob: ns.Defer(index, netdev.FlushTimeout), Value: strconv.FormatInt(delay.Nanoseconds(), 10)},
		{Knob: ns.Defer(index, netdev.HardIRQs), Value: "1"},
	}
}

// Close ends what needs an agent. Isolation stays, and returns to uplinks that rest. Without
// isolation, as for a doctor, which has no journal, there is nothing to end.
func (is *Isolator) Close() error {
	is.forgetAround()
	err := kernel.Tidy(is.cfg.Roots, append(is.vacated.next(), is.vacated.next()...))
	if is.host == nil {
		return err
	}
	if is.resting.rests {
		is.resting = restControl{}
		err = errors.Join(err, is.RenewUplinks(false))
	}
	is.held.close(func(heldFile) bool { return true })
	return errors.Join(err, is.promptPolls())
}

// promptPolls ends all delays.
func (is *Isolator) promptPolls() error {
	return is.restore(func(e journal.Entry) bool { return e.Owner == is.by(0) && e.Ref.Kind == netdev.KindDefer })
}
