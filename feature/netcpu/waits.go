package netcpu

import (
	"time"

	"github.com/fairlead-project/fairlead/kernel/cgroup"
	"github.com/fairlead-project/fairlead/kernel/sched"
)

// The kernel has no sum of the time in which tasks of a cgroup waited for a CPU on which none of
// them ran: "full" is a mean of the CPUs, weighted by the time for which the cgroup was not idle
// there (kernel/sched/psi.c, collect_percpu_times). A thread that moves between two CPUs has half of
// its waits there, and one that stays has all of them. waits finds the sum between bounds: the mean
// below, the mean times the CPUs above, and what the threads themselves have waited.

const (
	waitedEnough = 0.01 // of a reading's time, on all CPUs: less is not worth reading threads
	seenEnough   = 0.95 // of its CPU time was that of threads that were read
	maxThreads   = 256  // of one container whose threads are read
	maxRead      = 2048 // of all containers, for each reading: 20 ms
	waitsApart   = 10 * time.Millisecond
)

// threads is what the threads of a container had run and waited, by tid.
type threads map[int]sched.Usage

// waits is how long a container's tasks have waited for CPUs, from one reading to the next.
type waits struct {
	at            time.Time // of the last reading; zero: there was none
	tasks, waited time.Duration
	threads       threads // as of then; nil: not read

	lost   time.Duration // sum over the CPUs of waits while none of its tasks ran there
	active time.Duration // time with something to do: run, or wait for a CPU
}

// step is what happened between two readings.
type step struct {
	took          time.Duration
	tasks, waited time.Duration // CPU time, and "full"
}

// next adds what happened since the last reading. read returns the threads now, nil if it cannot,
// and is called only where they matter. cpus returns on how many CPUs these threads may run.
func (w *waits) next(now time.Time, u usage, online int, read func() threads, cpus func(tids []int) int) {
	s := step{now.Sub(w.at), grown(u.tasks, w.tasks), grown(u.waited, w.waited)}
	first := w.at.IsZero()
	if !first && s.took < waitsApart {
		return // several readers at once
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

// atLeast is what is known without the threads. The container had as many CPUs while it waited as
// while it ran, and was active one task at a time.
func (s step) atLeast() (lost, active time.Duration) {
	lost = min(s.waited, s.took)
	active = min(s.tasks+lost, s.took)
	if ran := s.took - lost; ran > 0 && s.tasks > ran {
		lost = time.Duration(float64(lost) * float64(s.tasks) / float64(ran))
	}
	return lost, active
}

// by is what the threads tell. They also waited for one another, so that their sum is an upper
// bound, as is the mean of the CPUs times their number. The mean is a lower bound only where
// threads have come and gone unseen: "full" has more than anybody waited, because it counts the time
// until an idle CPU has woken up. Several threads are active as long as each of them in the mean,
// weighted by its part in that: work that is divided among them is slowed no more than that of each.
func (s step) by(was, now threads, cpus func([]int) int) (lost, active time.Duration) {
	full := min(s.waited, s.took)
	_, active = s.atLeast()
	var waited, all, squares, ran float64
	var waiting []int
	for tid, u := range now {
		before := was[tid]
		if u.Turns < before.Turns || u.Ran < before.Ran {
			before = sched.Usage{} // another thread
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
	one := time.Duration(0) // as active as its threads in the mean
	if all > 0 {
		one = time.Duration(squares / all)
	}
	lost = min(time.Duration(waited), time.Duration(max(cpus(waiting), 1))*full)
	if ran < seenEnough*float64(s.tasks) {
		return max(lost, full), min(max(active, one), s.took)
	}
	return lost, min(max(min(s.tasks+min(lost, full), s.took), one), s.took)
}

// threadsOf reads the threads of a cgroup: nil if it has more than most, or if they cannot be read.
func threadsOf(proc, dir string, most int) threads {
	tids, err := cgroup.Threads(dir, most+1)
	if err != nil || len(tids) > most {
		return nil
	}
	out := make(threads, len(tids))
	for _, tid := range tids {
		if u, err := sched.TaskUsage(proc, tid); err == nil { // else it has ended
			out[tid] = u
		}
	}
	return out
}

// cpusOf counts the CPUs on which at least one of some threads may run.
func cpusOf(tids []int) (n int) {
	var all sched.CPUs
	for _, tid := range tids {
		set, err := sched.AllowedTo(tid)
		if err != nil {
			continue // it has ended
		}
		for i := range all {
			all[i] |= set[i]
		}
	}
	return all.Count()
}
