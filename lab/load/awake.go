package load

import (
	"fmt"
	"runtime"
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"
)

// KeepAwake keeps every CPU from idling until stop, by threads that give way to all others at once
// (SCHED_IDLE). An idle CPU needs some microseconds to wake up, and on a virtual machine often far
// longer: it can be half of what a container waits for its disk. Neighbours that compute spare it
// that, and so hide a part of what they take from it.
func KeepAwake() (stop func(), err error) {
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
