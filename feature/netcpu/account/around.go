package account

import (
	"errors"
	"fmt"
	"math"
	"runtime"
	"slices"
	"time"

	"github.com/cilium/ebpf"
	"github.com/fairlead-project/fairlead/kernel/bpf"
	"golang.org/x/sys/unix"
)

const (
	// aroundEvery is the time between two measurements. A virtual machine may move
	// to another host meanwhile.
	aroundEvery = 10 * time.Minute

	aroundCount = 48                     // interrupts that a measurement needs
	aroundTries = 4 * aroundCount        // interrupts that a measurement causes at most
	aroundNone  = 24                     // it gives up after so many tries without a result
	aroundSet   = 150 * time.Microsecond // delay of each interrupt: the call that sets it returns earlier
	aroundWait  = 2 * time.Millisecond   // longest wait for each interrupt
	aroundLeast = aroundCount / 4        // fewer results do not count
	aroundMost  = 100 * time.Microsecond // a longer overhead has another cause

	notable = 3 // a gap that is this many times the shortest gap contains an interrupt
)

// gap is an interval in which a loop did not run, in ns of CLOCK_MONOTONIC.
type gap struct{ from, to uint64 }

// measureAround measures the time that an interrupt takes before and after its
// handler, in the processor and mostly in the hypervisor. BPF programs cannot see
// that time, because no tracepoint shows it. But a loop that reads the clock stops
// meanwhile. With call it measures function call interrupts from another CPU,
// otherwise timer interrupts. It takes some 10 ms of one CPU (calls: of two), and up
// to 50 ms if it sees no interrupt. It returns 0 if it sees too few.
func (m *Meter) measureAround(call bool) (time.Duration, error) {
	var found []uint64
	err := errors.New("it was not measured")
	done := make(chan struct{})
	go func() {
		runtime.LockOSThread() // never unlocked: the thread ends, and its affinity with it
		m.loop.Turn(func() { found, err = m.interruptsAround(call) })
		close(done)
	}()
	<-done
	if err != nil {
		return 0, fmt.Errorf("measure interrupts: %w", err)
	}
	if len(found) < aroundLeast {
		return 0, nil
	}
	slices.Sort(found)
	// Disturbances only lengthen results, so take a low quartile.
	return min(time.Duration(found[len(found)/4]), aroundMost), nil
}

// calibrate measures the overhead of interrupts and makes the programs charge it. If a
// measurement has no result, the last value stays.
func (m *Meter) calibrate() error {
	var errs []error
	for _, of := range []struct {
		call bool
		to   *ebpf.Variable
	}{{false, m.vars.Around}, {true, m.vars.AroundCall}} {
		a, err := m.measureAround(of.call)
		if err == nil && a != 0 {
			err = of.to.Set(uint64(a))
		}
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

// recalibrate repeats calibrate every aroundEvery, in the background. The caller holds
// mu.
func (m *Meter) recalibrate() {
	if !m.timed || time.Since(m.calibrated) < aroundEvery {
		return
	}
	m.calibrated = time.Now()
	// If it fails, the last result stays.
	m.calibrating.Go(func() { m.loop.Turn(func() { m.calibrate() }) })
}

// interruptsAround causes interrupts one after the other. It returns the overhead around
// the handler of each interrupt that the programs saw, in ns.
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
		return nil, nil // there is no other CPU
	default:
		if cause, stop = caller(other); cause == nil {
			return nil, nil // the kernel refuses membarrier
		}
	}
	if err != nil {
		return nil, err
	}
	defer stop()
	return m.watchInterrupts(cpu, call, cause)
}

// watchInterrupts does the work of interruptsAround: cause causes an interrupt on this CPU.
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
		gaps, usual := watchClock()
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

// timer makes a timer that expires on this CPU, aroundSet after each call of cause.
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

// Commands of membarrier(2). The kernel sends a function call interrupt to each other CPU
// on which this process runs. If there are several, it uses another vector, which no
// tracepoint here shows, so the measurement finds nothing.
const (
	membarrierExpedited = 1 << 3
	membarrierRegister  = 1 << 4
)

// caller makes another CPU send a function call interrupt to this one, aroundSet after
// each call of cause. cause is nil where the kernel refuses that.
func caller(cpu int) (cause func() error, stop func()) {
	for _, command := range []uintptr{membarrierRegister, membarrierExpedited} {
		if _, _, errno := unix.Syscall(unix.SYS_MEMBARRIER, command, 0, 0); errno != 0 {
			return nil, nil
		}
	}
	asked, ended := make(chan struct{}, 1), make(chan struct{})
	go func() {
		defer close(ended)
		runtime.LockOSThread() // never unlocked
		var one unix.CPUSet
		one.Set(cpu)
		if unix.SchedSetaffinity(0, &one) != nil {
			return // the CPU went offline: the measurement finds nothing
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
		default: // the last request is still pending
		}
		return nil
	}, func() { close(asked); <-ended }
}

// stay pins the thread to one of its CPUs. It returns that CPU and another one, or -1
// if there is no other.
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

// watchClock reads the clock until it sees a notable gap after the interrupt was due. It
// returns the notable gaps between two readings, and the shortest gap in ns.
func watchClock() (gaps []gap, usual uint64) {
	begin := bpf.Clock()
	usual = math.MaxUint64
	for last := begin; last-begin < uint64(aroundWait); {
		now := bpf.Clock()
		usual = min(usual, now-last)
		if (now-last)/notable > usual {
			gaps = append(gaps, gap{last, now})
			if now-begin > uint64(aroundSet) {
				break
			}
		}
		last = now
	}
	return gaps, usual
}
