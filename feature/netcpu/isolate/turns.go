package isolate

import (
	"errors"
	"io/fs"

	"github.com/fairlead-project/fairlead/feature/netcpu/law"
	"github.com/fairlead-project/fairlead/kernel/sched"
)

// A thread that polls competes with its container's tasks by its nice value. Against other containers
// only the weight of the cgroup counts.
//
// A server with single requests is fastest if the thread runs at once, as a softirq would. If packets
// come in crowds, that leaves the tasks too little time, so the thread gets the priority of a task.
// docs/decisions/0010-how-a-thread-takes-turns.md has the measurement.
const (
	prompt = "-5" // nice value to run before the tasks
	even   = "0"  // nice value to take turns with the tasks
)

// niceBy returns the nice value after a window in which the threads, at the nice value now, got the CPU
// for this number of turns and polled this number of packets.
func niceBy(now string, turns, packets uint64) string {
	each := float64(packets) / float64(turns)
	switch {
	case turns == 0 || each < (1+law.Crowd)/2:
		return prompt
	case each >= law.Crowd:
		return even
	}
	return now
}

// takeTurns sets the nice value of a tenant's threads from the packets of a window.
func (is *Isolator) takeTurns(s *isolation, packets uint64) error {
	last := s.turns
	s.turns = 0
	var now uint64
	for _, th := range s.threads {
		u, err := sched.UsageOf(is.cfg.Roots.Proc, th.Thread)
		if errors.Is(err, fs.ErrNotExist) {
			return nil // the kernel does not count turns
		}
		if err != nil {
			return err
		}
		now += u.Turns
	}
	if s.turns = now; last == 0 || now < last {
		return nil // the first window, or new threads
	}
	next := niceBy(s.at.nice, now-last, packets)
	if next == s.at.nice {
		return nil
	}
	mine := is.owns(s.payer.ID)
	var errs []error
	for _, th := range s.threads {
		errs = append(errs, IgnoreGone(is.turn(pacing(is.cfg.Roots.Proc, th.Thread, sched.NoSlice, next), mine)))
	}
	err := errors.Join(errs...)
	if err == nil { // else the next window tries again
		s.at.nice = next
	}
	return err
}
