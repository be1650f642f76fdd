package rig

import (
	"errors"
	"fmt"
	"time"

	"github.com/cilium/ebpf"

	"github.com/fairlead-project/fairlead/kernel/bpf"
)

// Place is the kind of time that a Stopwatch adds up.
type Place int

// The vectors of include/linux/interrupt.h that may handle packets; the interrupts of timers; and
// NetRx once more, by the packets of the run: to or from an IPv4 address that ends in 2, to or from
// one that ends in 3, or both kinds. These three leave out CPU 0.
const (
	Timer      Place = 1
	NetTx      Place = 2
	NetRx      Place = 3
	Tasklet    Place = 6
	HRTimer    Place = 8
	LocalTimer Place = 10
	First      Place = 12
	Second     Place = 13
	Both       Place = 14
)

const places = int(Both) + 1

// StopwatchConfig selects what a Stopwatch measures besides softirqs.
type StopwatchConfig struct {
	Tells  bool // First, Second and Both
	Timers bool // LocalTimer: only on x86
}

// Stopwatch measures softirqs by its own programs. The programs of a tracepoint run in the order of
// their attachment. A stopwatch that is made before the accounts' programs and started after them
// measures what lies inside them, without their own time. A stopwatch that is also started before
// them begins and ends a moment before they do, and so measures the same time as they do.
type Stopwatch struct {
	objs struct {
		Stints *ebpf.Map `ebpf:"fl_stints"`
	}
	object *bpf.Object
	begins []string
	links  bpf.Links
}

// NewStopwatch creates a stopwatch that stands still. The caller closes it.
func NewStopwatch(cfg StopwatchConfig) (_ *Stopwatch, err error) {
	w := &Stopwatch{begins: []string{"fl_softirq"}}
	defer func() {
		if err != nil {
			err = errors.Join(fmt.Errorf("make stopwatch: %w", err), w.Close())
		}
	}()
	if w.object, err = bpf.Open("stopwatch", loadStopwatch, bpf.Vars{stopwatchVarFlTells: cfg.Tells}, nil); err != nil {
		return nil, err
	}
	if err := w.object.Load(&w.objs, nil); err != nil {
		return nil, err
	}
	if cfg.Tells {
		w.begins = append([]string{"fl_received"}, w.begins...)
	}
	ends := []string{"fl_softirq_end"}
	if cfg.Timers {
		w.begins, ends = append(w.begins, "fl_timer"), append(ends, "fl_timer_end")
	}
	return w, w.attach(ends)
}

// Start starts the stopwatch.
func (w *Stopwatch) Start() error {
	if err := w.attach(w.begins); err != nil {
		return fmt.Errorf("start stopwatch: %w", err)
	}
	return nil
}

func (w *Stopwatch) attach(programs []string) error {
	links, err := w.object.Attach(programs...)
	w.links = append(w.links, links...)
	return err
}

// Elapsed is what a Stopwatch has measured since its start, on all CPUs.
type Elapsed [places]time.Duration

// Since returns the sum of some places' times since an earlier reading.
func (e Elapsed) Since(was Elapsed, of ...Place) (sum time.Duration) {
	for _, p := range of {
		sum += e[p] - was[p]
	}
	return sum
}

// Read takes a reading.
func (w *Stopwatch) Read() (sum Elapsed, err error) {
	for i := range sum {
		var cpus []struct{ Sum, Began uint64 }
		if err := w.objs.Stints.Lookup(uint32(i), &cpus); err != nil {
			return sum, fmt.Errorf("read stopwatch: %w", err)
		}
		for _, c := range cpus {
			sum[i] += time.Duration(c.Sum)
		}
	}
	return sum, nil
}

// Close removes the stopwatch.
func (w *Stopwatch) Close() error { return errors.Join(w.links.Close(), w.object.Close()) }
