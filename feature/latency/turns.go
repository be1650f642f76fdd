package latency

import (
	"errors"
	"fmt"
	"time"

	"golang.org/x/sys/unix"

	"github.com/fairlead-project/fairlead/kernel/bpf"
)

// In a flood an attached program costs each packet something even if it returns at
// once. So the programs are attached for a part of the time then: they look, and
// rest. While the host is watched they are attached all the time.
const (
	look  = 100 * time.Millisecond
	rest  = 900 * time.Millisecond
	quiet = time.Second // how often it is seen whether there is a flood
)

// turns attaches and detaches the programs as turn says, until stop is closed.
func (f *Latency) turns(stop <-chan struct{}) {
	for wait := quiet; ; {
		select {
		case <-stop:
			return
		case <-time.After(wait):
		}
		f.mu.Lock()
		if f.stop == stop && f.meter != nil {
			var err error
			if wait, err = f.turn(); err != nil {
				f.cfg.Log.Warn("measure in turns", "err", err)
			}
		}
		f.mu.Unlock()
	}
}

// turn has the programs attached or not, and says for how long.
func (f *Latency) turn() (time.Duration, error) {
	now := time.Now()
	if err := f.settle(now, false); err != nil {
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

// resume has the programs attached. What was under way before is not believed.
func (m *meter) resume() (err error) {
	if m.links != nil {
		return nil
	}
	var now unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &now); err != nil {
		return fmt.Errorf("attach: %w", err)
	}
	// Who arrives now may have begun before.
	if err := errors.Join(m.maps.Attached.Set(uint64(now.Nano())), m.maps.Passed.Set(uint64(now.Nano()))); err != nil {
		return fmt.Errorf("attach: %w", err)
	}
	// From the ends of the way to its beginnings: no packet begins whose end is not seen.
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

// rest has them detached.
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

// flooded says whether a CPU has passed over far more packets than it measures, since
// it was asked last.
func (m *meter) flooded(budget uint32) (bool, error) {
	events, _, err := m.passed()
	if err != nil {
		return false, err
	}
	now, before, looked := time.Now(), m.events, m.looked
	m.looked, m.events = now, events
	return flood(before, events, 2*float64(budget)*now.Sub(looked).Seconds()), nil
}

// flood says whether a CPU has passed over more than most. was and now are how many each
// had, all in all.
func flood(was, now []uint64, most float64) bool {
	for cpu, n := range now {
		if float64(n-was[cpu]) > most {
			return true
		}
	}
	return false
}

// unwatched is for how long the programs were at rest, all in all.
func (m *meter) unwatched() time.Duration {
	if m.since.IsZero() {
		return m.rested
	}
	return m.rested + time.Since(m.since)
}
