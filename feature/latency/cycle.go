package latency

import (
	"errors"
	"fmt"
	"time"

	"golang.org/x/sys/unix"

	"github.com/fairlead-project/fairlead/kernel/bpf"
)

// In a flood an attached program costs each packet something, even if it returns at once. So a
// flood is measured in a duty cycle: the programs are attached for look, then detached for rest.
// While the host is watched they stay attached.
const (
	look  = 100 * time.Millisecond
	rest  = 900 * time.Millisecond
	quiet = time.Second // interval of the check for a flood
)

// dutyCycle attaches and detaches the programs until stop is closed.
func (f *Latency) dutyCycle(stop <-chan struct{}) {
	for wait := quiet; ; {
		select {
		case <-stop:
			return
		case <-time.After(wait):
		}
		f.mu.Lock()
		if f.stop == stop && f.meter != nil {
			var err error
			if wait, err = f.nextPhase(); err != nil {
				f.cfg.Log.Warn("measure in a flood", "err", err)
			}
		}
		f.mu.Unlock()
	}
}

// nextPhase attaches or detaches the programs, and returns the length of the phase.
func (f *Latency) nextPhase() (time.Duration, error) {
	now := time.Now()
	if err := f.schedule(now, false); err != nil {
		return quiet, err
	}
	if f.meter.links == nil {
		return look, f.meter.resume()
	}
	if flood, err := f.meter.flooded(f.cfg.Budget); err != nil || !flood || f.watches(now) {
		return quiet, err
	}
	return rest, f.meter.rest()
}

// resume attaches the programs. Stamps from before are void.
func (m *meter) resume() (err error) {
	if m.links != nil {
		return nil
	}
	var now unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &now); err != nil {
		return fmt.Errorf("attach: %w", err)
	}
	// Packets that arrive now may have begun before.
	if err := errors.Join(m.maps.Attached.Set(uint64(now.Nano())), m.maps.Passed.Set(uint64(now.Nano()))); err != nil {
		return fmt.Errorf("attach: %w", err)
	}
	// From the ends of the path to its beginnings, so that no packet begins and never ends.
	if m.links, err = bpf.Attach(m.programs.Xmit, m.programs.Receive, m.programs.Poll, m.programs.Queue); err != nil {
		return err
	}
	m.looked = time.Now()
	if !m.since.IsZero() {
		m.rested += m.looked.Sub(m.since)
		m.since = time.Time{}
	}
	if m.events, _, err = m.passed(); err != nil {
		return err
	}
	return errors.Join(m.queue(), m.listen())
}

// rest detaches the programs.
func (m *meter) rest() error {
	err := m.links.Close()
	m.links, m.since = nil, time.Now()
	for _, s := range m.sockets {
		if s.link != nil {
			err = errors.Join(err, s.link.Close())
			s.link = nil
		}
	}
	return errors.Join(err, m.queue())
}

// flooded reports whether a CPU has passed over far more packets than it measures since the last
// call.
func (m *meter) flooded(budget uint32) (bool, error) {
	events, _, err := m.passed()
	if err != nil {
		return false, err
	}
	now, before, looked := time.Now(), m.events, m.looked
	m.looked, m.events = now, events
	return flood(before, events, 2*float64(budget)*now.Sub(looked).Seconds()), nil
}

// flood reports whether a CPU has passed over more than most packets. was and now are the totals of
// each CPU.
func flood(was, now []uint64, most float64) bool {
	for cpu, n := range now {
		if float64(n-was[cpu]) > most {
			return true
		}
	}
	return false
}

// unwatched returns the total time for which the programs were detached.
func (m *meter) unwatched() time.Duration {
	if m.since.IsZero() {
		return m.rested
	}
	return m.rested + time.Since(m.since)
}
