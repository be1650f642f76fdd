package rig

import (
	"errors"
	"fmt"
	"time"

	"github.com/cilium/ebpf"

	"github.com/fairlead-project/fairlead/kernel/bpf"
)

// Stopwatch measures the softirqs of the network by its own programs. The programs of a tracepoint
// run in the order of their attachment. A stopwatch that is made before the accounts' programs and
// started after them measures what lies inside them, without their own time. A stopwatch that is
// also started before them begins and ends a moment before they do, and so measures the same time
// as they do.
type Stopwatch struct {
	objs struct {
		Stints *ebpf.Map `ebpf:"fl_stints"`
	}
	object *bpf.Object
	links  bpf.Links
}

// NewStopwatch creates a stopwatch that stands still. The caller closes it.
func NewStopwatch() (_ *Stopwatch, err error) {
	w := &Stopwatch{}
	defer func() {
		if err != nil {
			err = errors.Join(fmt.Errorf("make stopwatch: %w", err), w.Close())
		}
	}()
	if w.object, err = bpf.Open("stopwatch", loadStopwatch, nil, nil); err != nil {
		return nil, err
	}
	if err := w.object.Load(&w.objs, nil); err != nil {
		return nil, err
	}
	w.links, err = w.object.Attach(stopwatchProgFlSoftirqEnd)
	return w, err
}

// Start starts the stopwatch.
func (w *Stopwatch) Start() error {
	links, err := w.object.Attach(stopwatchProgFlSoftirq)
	w.links = append(w.links, links...)
	if err != nil {
		return fmt.Errorf("start stopwatch: %w", err)
	}
	return nil
}

// Read returns the time of NET_TX and NET_RX since the start, on all CPUs.
func (w *Stopwatch) Read() (sum time.Duration, err error) {
	for _, vector := range []uint32{2, 3} { // include/linux/interrupt.h
		var cpus []struct{ Sum, Began uint64 }
		if err := w.objs.Stints.Lookup(vector, &cpus); err != nil {
			return sum, fmt.Errorf("read stopwatch: %w", err)
		}
		for _, c := range cpus {
			sum += time.Duration(c.Sum)
		}
	}
	return sum, nil
}

// Close removes the stopwatch.
func (w *Stopwatch) Close() error { return errors.Join(w.links.Close(), w.object.Close()) }
