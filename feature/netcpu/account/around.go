package account

import (
	"fmt"
	"math"
	"runtime"
	"slices"
	"time"

	"golang.org/x/sys/unix"
)

const (
	// aroundEvery is how often it is measured anew: a virtual machine may have
	// moved to another host meanwhile.
	aroundEvery = 10 * time.Minute

	aroundTimers = 48                     // that are to be found,
	aroundTries  = 4 * aroundTimers       // of so many that are set at most,
	aroundSet    = 150 * time.Microsecond // after so long each; it is back from the call by then
	aroundWait   = 2 * time.Millisecond   // and is looked for so long
	aroundLeast  = aroundTimers / 4       // fewer tell nothing
	aroundMost   = 100 * time.Microsecond // what is more was something else

	notable = 3 // times the shortest is a gap in which something happened
)

// gap is the time in which a loop did not run, of CLOCK_MONOTONIC.
type gap struct{ from, to uint64 }

// measureAround tells what a timer's interrupt takes beyond its handler, before and
// after it: the processor and, mostly, the hypervisor. No event shows that to
// programs, but a loop that reads the clock does not run meanwhile. It takes
// some 10 ms of one CPU. 0 if too few interrupts were seen.
func (m *Meter) measureAround() (time.Duration, error) {
	type result struct {
		found []uint64
		err   error
	}
	done := make(chan result)
	go func() {
		runtime.LockOSThread() // for good: the thread ends with its affinity
		found, err := m.timersAround()
		done <- result{found, err}
	}()
	r := <-done
	if r.err != nil {
		return 0, fmt.Errorf("measure timer interrupts: %w", r.err)
	}
	if len(r.found) < aroundLeast {
		return 0, nil
	}
	slices.Sort(r.found)
	// Whatever disturbs it only adds.
	return min(time.Duration(r.found[len(r.found)/4]), aroundMost), nil
}

// calibrate has the programs charge what lies around a timer's interrupt. What
// they charged before stays if nothing was found.
func (m *Meter) calibrate() error {
	a, err := m.measureAround()
	if err != nil || a == 0 {
		return err
	}
	return m.around.Set(uint64(a))
}

// recalibrate does so again once in a while, beside what else goes on. The caller
// holds mu.
func (m *Meter) recalibrate() {
	if !m.timed || time.Since(m.calibrated) < aroundEvery {
		return
	}
	m.calibrated = time.Now()
	// It has worked before; if it does not now, the last result is good enough.
	m.calibrating.Go(func() { m.calibrate() })
}

// timersAround sets timers, one after the other, and gives what it found around
// the handlers of those that fl_timer and fl_timed have seen.
func (m *Meter) timersAround() ([]uint64, error) {
	cpu, err := stay()
	if err != nil {
		return nil, err
	}
	fd, err := unix.TimerfdCreate(unix.CLOCK_MONOTONIC, unix.TFD_CLOEXEC|unix.TFD_NONBLOCK)
	if err != nil {
		return nil, fmt.Errorf("timerfd: %w", err)
	}
	defer unix.Close(fd)
	var found []uint64
	for try := 0; try < aroundTries && len(found) < aroundTimers; try++ {
		once := unix.ItimerSpec{Value: unix.NsecToTimespec(int64(aroundSet))}
		if err := unix.TimerfdSettime(fd, 0, &once, nil); err != nil {
			return nil, fmt.Errorf("set timerfd: %w", err)
		}
		gaps, usual, err := watchClock()
		if err != nil {
			return nil, err
		}
		var states []accountCpu
		if err := m.maps.FlCpus.Lookup(uint32(0), &states); err != nil {
			return nil, err
		}
		irq, end := states[cpu].Irq, states[cpu].IrqEnd
		for _, g := range gaps {
			if g.from <= irq && irq < end && end <= g.to {
				found = append(found, max(g.to-g.from-(end-irq), usual)-usual)
			}
		}
	}
	return found, nil
}

// stay keeps the thread on one of its CPUs, and tells which.
func stay() (cpu int, err error) {
	var may unix.CPUSet
	if err := unix.SchedGetaffinity(0, &may); err != nil {
		return 0, fmt.Errorf("affinity: %w", err)
	}
	for !may.IsSet(cpu) {
		cpu++
	}
	var one unix.CPUSet
	one.Set(cpu)
	if err := unix.SchedSetaffinity(0, &one); err != nil {
		return 0, fmt.Errorf("affinity: %w", err)
	}
	return cpu, nil
}

// watchClock reads the clock until the timer should have come and something has
// happened. It gives the notable gaps between two readings, and the shortest.
func watchClock() (gaps []gap, usual uint64, err error) {
	begin, err := clock()
	if err != nil {
		return nil, 0, err
	}
	usual = math.MaxUint64
	for last := begin; last-begin < uint64(aroundWait); {
		now, err := clock()
		if err != nil {
			return nil, 0, err
		}
		usual = min(usual, now-last)
		if (now-last)/notable > usual {
			gaps = append(gaps, gap{last, now})
			if now-begin > uint64(aroundSet) {
				break
			}
		}
		last = now
	}
	return gaps, usual, nil
}

// clock is what programs have as bpf_ktime_get_ns.
func clock() (uint64, error) {
	var ts unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &ts); err != nil {
		return 0, fmt.Errorf("read the clock: %w", err)
	}
	return uint64(ts.Nano()), nil
}
