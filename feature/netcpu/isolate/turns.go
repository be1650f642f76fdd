package isolate

import (
	"errors"
	"io/fs"

	"github.com/fairlead-project/fairlead/feature/netcpu/law"
	"github.com/fairlead-project/fairlead/kernel/sched"
)

// A thread that polls competes with its container's own tasks, by its nice value; towards other
// containers only the weight of the group counts.
//
// A server with single requests is best off if the thread runs at once, as a softirq would. Packets
// that come in crowds would leave the tasks too little, though: then the thread is one of them.
// docs/decisions/0010-how-a-thread-takes-turns.md has the measurement.
const (
	prompt = "-5" // nice values: it runs before the tasks,
	even   = "0"  // or is one of them
)

// niceBy returns the nice value after a window in which the threads with the present one got the CPU
// so many times.
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

// takeTurns sets the nice value of a tenant's threads by the packets of a window.
func (is *Isolator) takeTurns(s *isolation, packets uint64) error {
	last := s.turns
	s.turns = 0
	var now uint64
	for _, th := range s.threads {
		u, err := sched.UsageOf(is.cfg.Roots.Proc, th.Thread)
		if errors.Is(err, fs.ErrNotExist) {
			return nil // the kernel does not count
		}
		if err != nil {
			return err
		}
		now += u.Turns
	}
	if s.turns = now; last == 0 || now < last {
		return nil // the first time, or other threads
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
