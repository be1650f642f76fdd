package netcpu

import (
	"time"

	"github.com/fairlead-project/fairlead/kernel/cgroup"
	"github.com/fairlead-project/fairlead/kernel/sched"
)

// The kernel does not sum the time for which tasks of a cgroup waited for a CPU on which none of
// them ran. PSI "full" is a mean over the CPUs, weighted by the time for which the cgroup was not
// idle there (kernel/sched/psi.c, collect_percpu_times). It has half the waits of a thread that moves
// between two CPUs, and all waits of a thread that stays on one. waits bounds the sum: from below by
// the mean, from above by the mean times the CPUs and by the waits of the threads themselves.

const (
	waitedEnough = 0.01 // part of a reading's time, on all CPUs: for less, threads are not read
	seenEnough   = 0.95 // part of the container's CPU time that the threads that were read account for
	maxThreads   = 256  // a container with more threads: they are not read
	maxRead      = 2048 // threads of all containers in one reading: takes 20 ms
	waitsApart   = 10 * time.Millisecond
)

// threads holds the run time and waits of a container's threads, by TID.
type threads map[int]sched.Usage

// waits sums how long a container's tasks have waited for CPUs, reading by reading.
type waits struct {
	at            time.Time // last reading; zero: none yet
	tasks, waited time.Duration
	threads       threads // at that reading; nil: not read

	lost   time.Duration // sum over the CPUs of waits while none of its tasks ran there
	active time.Duration // time in which it ran or waited for a CPU
}

// step is the growth between two readings.
type step struct {
	took          time.Duration
	tasks, waited time.Duration // CPU time, and "full"
}

// next adds the growth since the last reading. read returns the present threads, or nil if it cannot
// read them; next calls it only where they matter. cpus counts the CPUs on which threads may run.
func (w *waits) next(now time.Time, u usage, online int, read func() threads, cpus func(tids []int) int) {
	s := step{now.Sub(w.at), grown(u.tasks, w.tasks), grown(u.waited, w.waited)}
	first := w.at.IsZero()
	if !first && s.took < waitsApart {
		return // another reader has just been here
	}
	was := w.threads
	w.at, w.tasks, w.waited, w.threads = now, u.tasks, u.waited, nil
	if first {
		return
	}
	if float64(s.waited)*float64(online) >= waitedEnough*float64(s.took) {
		w.threads = read()
	}
	lost, active := s.atLeast()
	if was != nil && w.threads != nil {
		lost, active = s.by(was, w.threads, cpus)
	}
	w.lost, w.active = w.lost+lost, w.active+active
}

// atLeast estimates lost and active without the threads. It assumes that the container had as many
// CPUs while it waited as while it ran, and that its tasks ran one at a time.
func (s step) atLeast() (lost, active time.Duration) {
	lost = min(s.waited, s.took)
	active = min(s.tasks+lost, s.took)
	if ran := s.took - lost; ran > 0 && s.tasks > ran {
		lost = time.Duration(float64(lost) * float64(s.tasks) / float64(ran))
	}
	return lost, active
}

// by computes lost and active from the threads. Threads also wait for one another, so the sum of
// their waits is an upper bound, as is "full" times the number of CPUs. "full" is a lower bound only
// where threads have come and gone unseen: it exceeds the real waits, because it includes the wake-up
// of an idle CPU. Several threads count as active for the mean of their active times, weighted by
// these: work divided among threads is slowed no more than each thread.
func (s step) by(was, now threads, cpus func([]int) int) (lost, active time.Duration) {
	full := min(s.waited, s.took)
	_, active = s.atLeast()
	var waited, all, squares, ran float64
	var waiting []int
	for tid, u := range now {
		before := was[tid]
		if u.Turns < before.Turns || u.Ran < before.Ran {
			before = sched.Usage{} // another thread got this TID
		}
		d := float64(max(u.Waited-before.Waited, 0))
		r := float64(u.Ran - before.Ran)
		x := d + r
		ran += r
		if waited += d; d > 0 {
			waiting = append(waiting, tid)
		}
		all, squares = all+x, squares+x*x
	}
	one := time.Duration(0) // weighted mean of the threads' active time
	if all > 0 {
		one = time.Duration(squares / all)
	}
	lost = min(time.Duration(waited), time.Duration(max(cpus(waiting), 1))*full)
	if ran < seenEnough*float64(s.tasks) {
		return max(lost, full), min(max(active, one), s.took)
	}
	return lost, min(max(min(s.tasks+min(lost, full), s.took), one), s.took)
}

// threadsOf reads the threads of a cgroup. It returns nil if they are more than most or unreadable.
func threadsOf(proc, dir string, most int) threads {
	tids, err := cgroup.Threads(dir, most+1)
	if err != nil || len(tids) > most {
		return nil
	}
	out := make(threads, len(tids))
	for _, tid := range tids {
		if u, err := sched.TaskUsage(proc, tid); err == nil { // else the thread has ended
			out[tid] = u
		}
	}
	return out
}

// cpusOf counts the CPUs on which at least one of the threads may run.
func cpusOf(tids []int) (n int) {
	var all sched.CPUs
	for _, tid := range tids {
		set, err := sched.AllowedTo(tid)
		if err != nil {
			continue // the thread has ended
		}
		for i := range all {
			all[i] |= set[i]
		}
	}
	return all.Count()
}
