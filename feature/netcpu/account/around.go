package account

import (
	"errors"
	"fmt"
	"math"
	"runtime"
	"slices"
	"time"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"
)

const (
	// aroundEvery is how often it is measured anew: a virtual machine may have
	// moved to another host meanwhile.
	aroundEvery = 10 * time.Minute

	aroundCount = 48                     // interrupts that are to be found,
	aroundTries = 4 * aroundCount        // of so many that are caused at most,
	aroundNone  = 24                     // and no more after so many of which none was,
	aroundSet   = 150 * time.Microsecond // after so long each; it is back from the call by then
	aroundWait  = 2 * time.Millisecond   // and is looked for so long
	aroundLeast = aroundCount / 4        // fewer tell nothing
	aroundMost  = 100 * time.Microsecond // what is more was something else

	notable = 3 // times the shortest is a gap in which something happened
)

// gap is the time in which a loop did not run, of CLOCK_MONOTONIC.
type gap struct{ from, to uint64 }

// measureAround tells what an interrupt takes beyond its handler, before and after
// it: the processor and, mostly, the hypervisor. No event shows that to programs,
// but a loop that reads the clock does not run meanwhile. call asks for those by
// which another CPU calls, else it is a timer's. It takes some 10 ms of a CPU, for
// calls of two, and gives up after 50 at most in which none was seen. 0 if too few
// were.
func (m *Meter) measureAround(call bool) (time.Duration, error) {
	type result struct {
		found []uint64
		err   error
	}
	done := make(chan result)
	go func() {
		runtime.LockOSThread() // for good: the thread ends with its affinity
		found, err := m.interruptsAround(call)
		done <- result{found, err}
	}()
	r := <-done
	if r.err != nil {
		return 0, fmt.Errorf("measure interrupts: %w", r.err)
	}
	if len(r.found) < aroundLeast {
		return 0, nil
	}
	slices.Sort(r.found)
	// Whatever disturbs it only adds.
	return min(time.Duration(r.found[len(r.found)/4]), aroundMost), nil
}

// calibrate has the programs charge what lies around interrupts. What they charged
// before stays if nothing was found.
func (m *Meter) calibrate() error {
	var errs []error
	for _, of := range []struct {
		call bool
		to   *ebpf.Variable
	}{{false, m.around}, {true, m.aroundCall}} {
		a, err := m.measureAround(of.call)
		if err == nil && a != 0 {
			err = of.to.Set(uint64(a))
		}
		errs = append(errs, err)
	}
	return errors.Join(errs...)
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

// interruptsAround causes interrupts, one after the other, and gives what it found
// around the handlers of those that the programs have seen.
func (m *Meter) interruptsAround(call bool) ([]uint64, error) {
	cpu, other, err := stay()
	if err != nil {
		return nil, err
	}
	var cause func() error
	var stop func()
	switch {
	case !call:
		cause, stop, err = timer()
	case other < 0:
		return nil, nil // nobody is there to call
	default:
		if cause, stop = caller(other); cause == nil {
			return nil, nil // it may not
		}
	}
	if err != nil {
		return nil, err
	}
	defer stop()
	return m.watchInterrupts(cpu, call, cause)
}

// watchInterrupts is interruptsAround for what cause brings about on this CPU.
func (m *Meter) watchInterrupts(cpu int, call bool, cause func() error) (found []uint64, err error) {
	var want uint64
	if call {
		want = 1
	}
	for try := 0; try < aroundTries && len(found) < aroundCount; try++ {
		if try == aroundNone && len(found) == 0 {
			break
		}
		if err := cause(); err != nil {
			return nil, err
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
			if states[cpu].Call == want && g.from <= irq && irq < end && end <= g.to {
				found = append(found, max(g.to-g.from-(end-irq), usual)-usual)
			}
		}
	}
	return found, nil
}

// timer has one expire aroundSet after each cause, on this CPU.
func timer() (cause func() error, stop func(), err error) {
	fd, err := unix.TimerfdCreate(unix.CLOCK_MONOTONIC, unix.TFD_CLOEXEC|unix.TFD_NONBLOCK)
	if err != nil {
		return nil, nil, fmt.Errorf("timerfd: %w", err)
	}
	once := unix.ItimerSpec{Value: unix.NsecToTimespec(int64(aroundSet))}
	return func() error {
		if err := unix.TimerfdSettime(fd, 0, &once, nil); err != nil {
			return fmt.Errorf("set timerfd: %w", err)
		}
		return nil
	}, func() { unix.Close(fd) }, nil
}

// The commands of membarrier(2): a barrier on all CPUs on which this program runs,
// for which the kernel calls them. Several it calls by another vector, of which
// there is no event here: then nothing is found.
const (
	membarrierExpedited = 1 << 3
	membarrierRegister  = 1 << 4
)

// caller has another CPU call this one aroundSet after each cause. cause is nil
// where that is not allowed.
func caller(cpu int) (cause func() error, stop func()) {
	for _, command := range []uintptr{membarrierRegister, membarrierExpedited} {
		if _, _, errno := unix.Syscall(unix.SYS_MEMBARRIER, command, 0, 0); errno != 0 {
			return nil, nil
		}
	}
	asked, ended := make(chan struct{}, 1), make(chan struct{})
	go func() {
		defer close(ended)
		runtime.LockOSThread() // for good
		var one unix.CPUSet
		one.Set(cpu)
		if unix.SchedSetaffinity(0, &one) != nil {
			return // it has gone offline: nothing is found
		}
		wait := unix.NsecToTimespec(int64(aroundSet))
		for range asked {
			unix.Nanosleep(&wait, nil)
			unix.Syscall(unix.SYS_MEMBARRIER, membarrierExpedited, 0, 0)
		}
	}()
	return func() error {
		select {
		case asked <- struct{}{}:
		default: // it is late
		}
		return nil
	}, func() { close(asked); <-ended }
}

// stay keeps the thread on one of its CPUs, and tells which, and another, -1 if
// there is none.
func stay() (cpu, other int, err error) {
	var may unix.CPUSet
	if err := unix.SchedGetaffinity(0, &may); err != nil {
		return 0, 0, fmt.Errorf("affinity: %w", err)
	}
	for !may.IsSet(cpu) {
		cpu++
	}
	other = -1
	if may.Count() > 1 {
		for other = cpu + 1; !may.IsSet(other); {
			other++
		}
	}
	var one unix.CPUSet
	one.Set(cpu)
	if err := unix.SchedSetaffinity(0, &one); err != nil {
		return 0, 0, fmt.Errorf("affinity: %w", err)
	}
	return cpu, other, nil
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
