package latency

import (
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/fairlead-project/fairlead/kernel/bpf"
	"github.com/fairlead-project/fairlead/kernel/irq"
	"github.com/fairlead-project/fairlead/tenant"
)

// An attached program costs every packet of the host something, even if it returns at once: 0.3 to 0.5
// us each time that a packet is received. So while a CPU receives many packets, of any container, the
// programs are attached for only a part of each second. While the host is watched they stay attached.
const (
	fullRate = 4 // times the budget: packets a second and CPU up to which the programs stay attached
	look     = 100 * time.Millisecond
	cycle    = time.Second            // from one look to the next
	quiet    = 250 * time.Millisecond // interval of the check for a flood
)

// dutyCycle attaches and detaches the programs until stop is closed.
func (f *Latency) dutyCycle(stop <-chan struct{}) {
	for wait := quiet; ; {
		select {
		case <-stop:
			return
		case <-time.After(wait):
		}
		f.reading.Turn(func() {
			f.mu.Lock()
			defer f.mu.Unlock()
			if f.stop == stop && f.meter != nil {
				var err error
				if wait, err = f.nextPhase(); err != nil {
					f.cfg.Log.Warn("measure in a flood", "err", err)
				}
			}
		})
	}
}

// nextPhase attaches or detaches the programs, and returns the length of the phase.
func (f *Latency) nextPhase() (time.Duration, error) {
	now, m := time.Now(), f.meter
	if err := f.schedule(now, false); err != nil {
		return quiet, err
	}
	rate, err := m.rate(f.cfg.Roots.Proc, now)
	if err != nil {
		return cycle, errors.Join(err, m.resume())
	}
	if m.links == nil {
		m.look = lookFor(rate, f.cfg.Budget)
		return m.look, m.resume()
	}
	if rate <= fullRate*float64(f.cfg.Budget) || f.watches(now) {
		return quiet, nil
	}
	return cycle - m.look, m.rest()
}

// lookFor returns how long the programs are attached in each second at a rate of packets. A CPU
// receives at most twice the budget in that time.
func lookFor(rate float64, budget uint32) time.Duration {
	return min(look, time.Duration(2*float64(budget)/max(rate, 1)*float64(cycle)))
}

// resume attaches the programs. Earlier stamps are void.
func (m *meter) resume() (err error) {
	if m.links != nil {
		return nil
	}
	now := bpf.Clock()
	// Packets that arrive now may have started before.
	if err := errors.Join(m.maps.Attached.Set(now), m.maps.Passed.Set(now)); err != nil {
		return fmt.Errorf("attach: %w", err)
	}
	// From the end of the path to its beginning, so that no packet begins without an end.
	if m.links, err = bpf.Attach(m.programs.Xmit, m.programs.Receive, m.programs.Poll, m.programs.Queue); err != nil {
		return err
	}
	if !m.since.IsZero() {
		m.rested += time.Since(m.since)
		m.since = time.Time{}
	}
	return errors.Join(m.queue(), m.listen())
}

// rest detaches the programs.
func (m *meter) rest() error {
	err := m.links.Close()
	m.links, m.since = nil, time.Now()
	for _, s := range m.sockets {
		if s.link != nil {
			err = errors.Join(err, bpf.Unlink(s.link))
			s.link = nil
		}
	}
	return errors.Join(err, m.queue())
}

// rate returns the packets per second since the last call, of the CPU with the most: the packets that
// the kernel counts as received, for every container, and those that our programs passed over, for
// packets that tasks in the host's network send.
func (m *meter) rate(proc string, now time.Time) (float64, error) {
	received, err := irq.Packets(proc)
	if err != nil {
		return 0, err
	}
	events, _, err := m.passed()
	if err != nil {
		return 0, err
	}
	for cpu := range received {
		if cpu < len(events) {
			received[cpu] += uint32(events[cpu])
		}
	}
	was, over := m.received, now.Sub(m.counted)
	m.received, m.counted = received, now
	return busiest(was, received) / over.Seconds(), nil
}

// busiest returns the largest difference of the counters of a CPU, which wrap around.
func busiest(was, now map[int]uint32) (most float64) {
	for cpu, n := range now {
		if before, ok := was[cpu]; ok {
			most = max(most, float64(n-before))
		}
	}
	return most
}

// unwatched returns the total time for which the programs were detached.
func (m *meter) unwatched() time.Duration {
	if m.since.IsZero() {
		return m.rested
	}
	return m.rested + time.Since(m.since)
}

// Waits need programs at every task switch and every softirq of the host, which slow these down. The
// host is watched as long as an operator asks. A container that asks on its own socket has it watched
// for one spell in each span. mostSpells limits the spells of all such containers in a span.
const (
	spell      = 10 * time.Second
	span       = time.Minute
	mostSpells = 2
	mostSelf   = 16 // tenants recorded at their own request at the same time
)

// spells holds the beginning of each tenant's last spell.
type spells map[tenant.Key]time.Time

// assign begins spells for tenants that ask, as far as the limits permit. The tenant that has
// waited longest comes first.
func (s spells) assign(asking []tenant.Key, now time.Time) {
	recent := 0
	for t, began := range s {
		switch past := now.Sub(began); {
		case past < span:
			recent++
		case past > 10*span:
			delete(s, t)
		}
	}
	asking = slices.DeleteFunc(slices.Clone(asking), func(t tenant.Key) bool { return now.Sub(s[t]) < span })
	slices.SortFunc(asking, func(a, b tenant.Key) int { return s[a].Compare(s[b]) })
	for _, t := range asking[:min(len(asking), max(mostSpells-recent, 0))] {
		s[t] = now
	}
}

// on reports whether a tenant's spell is running.
func (s spells) on(t tenant.Key, now time.Time) bool { return now.Sub(s[t]) < spell }

// watches reports whether the host should be watched. f.mu is held.
func (f *Latency) watches(now time.Time) bool {
	for key, m := range f.measured {
		if m.traced && (m.asked.After(now) || m.askedSelf.After(now) && f.spells.on(key, now)) {
			return true
		}
	}
	return false
}

// schedule assigns spells, and starts or stops watching the host. changed says that other tenants are
// traced than before, which forces an update of the meter. f.mu is held.
func (f *Latency) schedule(now time.Time, changed bool) error {
	var asking []tenant.Key
	for key, m := range f.measured {
		if m.traced && m.askedSelf.After(now) {
			asking = append(asking, key)
		}
	}
	f.spells.assign(asking, now)
	if f.meter == nil {
		return nil
	}
	watch := f.watches(now)
	if watch == (f.meter.ran != nil) && !changed {
		return nil
	}
	var err error
	if watch {
		err = f.meter.resume()
	}
	return errors.Join(err, f.follow())
}

// watch attaches or detaches the programs that watch the host: the work of its CPUs.
func (m *meter) watch(on bool) (err error) {
	switch {
	case on && m.ran == nil:
		if err = m.maps.RanSince.Set(bpf.Clock()); err == nil {
			m.ran, err = m.object.Attach(latencyProgFlRanSwitch, latencyProgFlRanEntry, latencyProgFlRanExit, latencyProgFlRanRecv, latencyProgFlRanXmit)
		}
	case !on && m.ran != nil:
		err = errors.Join(m.ran.Close(), m.maps.RanSince.Set(uint64(0)))
		m.ran = nil
	}
	if err != nil {
		return fmt.Errorf("watch CPUs: %w", err)
	}
	return nil
}
