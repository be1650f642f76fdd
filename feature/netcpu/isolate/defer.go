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

// delayFor returns the time between polls for a rate in packets/s. It keeps the present delay now (0:
// none) if that is close.
func delayFor(rate float64, now time.Duration) time.Duration {
	want := min(deferMost, time.Duration(ring/2/rate*float64(time.Second)))
	if now > 0 && now <= deferMost && want < now*3/2 && now < want*3/2 {
		return now
	}
	return want.Round(time.Microsecond)
}

// deferPolls makes uplinks poll by a timer while they bring a flood of rate packets/s. Otherwise their
// threads wake up for each packet, which takes twice the CPU time. A rate of 0 ends the delays after a
// while.
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

// deferred records the last change of the delay between an uplink's polls.
type deferred struct {
	at time.Time
	by time.Duration
}

// deferPollsOf delays the polls of one uplink, unless the operator has set a delay.
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

// deferral plans a delay between a device's polls. The second setting starts it, with the timeout.
func deferral(ns *netdev.NS, index int, delay time.Duration) []journal.Setting {
	return []journal.Setting{
		{Knob: ns.Defer(index, netdev.FlushTimeout), Value: strconv.FormatInt(delay.Nanoseconds(), 10)},
		{Knob: ns.Defer(index, netdev.HardIRQs), Value: "1"},
	}
}

// Close ends the measures that need a running agent, such as delayed polls. Containers stay isolated,
// and threads poll resting uplinks again. Without isolation (a doctor has no journal) nothing ends.
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

// promptPolls ends all delays between polls.
func (is *Isolator) promptPolls() error {
	return is.restore(func(e journal.Entry) bool { return e.Owner == is.by(0) && e.Ref.Kind == netdev.KindDefer })
}
