package bench

import (
	"context"
	"fmt"
	"runtime"
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"
)

// keepAwake keeps every CPU from idling until stop, by threads that give way to all others at once
// (SCHED_IDLE). An idle CPU needs some microseconds to wake up. Neighbours that compute spare a
// container that waits for its disk these, on a virtual machine up to half of its time, and so hide a
// part of what they take from it.
func keepAwake() (stop func(), err error) {
	var done atomic.Bool
	var all sync.WaitGroup
	stop = func() { done.Store(true); all.Wait() }
	started := make(chan error)
	for range runtime.NumCPU() {
		all.Go(func() {
			runtime.LockOSThread() // never unlocked: the thread ends with its policy
			err := unix.SchedSetAttr(0, &unix.SchedAttr{Size: unix.SizeofSchedAttr, Policy: unix.SCHED_IDLE}, 0)
			started <- err
			for err == nil && !done.Load() {
			}
		})
		if err := <-started; err != nil {
			stop()
			return nil, fmt.Errorf("keep CPUs awake: %w", err)
		}
	}
	return stop, nil
}

// awake measures the load undisturbed on CPUs that do not idle, beside what the agent says of it.
func (r *blockioRig) awake(ctx context.Context) (err error) {
	stop, err := keepAwake()
	if err != nil {
		return err
	}
	defer stop()
	_, r.calm, err = r.slowed(ctx, r.take)
	return err
}
