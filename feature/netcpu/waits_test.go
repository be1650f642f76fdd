package netcpu

import (
	"os"
	"testing"
	"time"

	"github.com/fairlead-project/fairlead/kernel/sched"
)

// How long a container waited and was active within ten seconds, by "full" and by its threads.
func TestWaits(t *testing.T) {
	const s = time.Second
	at := func(ran, waited time.Duration) sched.Usage { return sched.Usage{Ran: ran, Waited: waited} }
	four := func(ran, waited time.Duration) threads {
		return threads{1: at(ran, waited), 2: at(ran, waited), 3: at(ran, waited), 4: at(ran, waited)}
	}
	for _, c := range []struct {
		name         string
		tasks, full  time.Duration
		now          threads
		cpus         int
		lost, active time.Duration
	}{
		{"one thread that moves", 1 * s, 3 * s, threads{1: at(1*s, 6*s)}, 2, 6 * s, 7 * s},
		{"one that stays, of two CPUs", 1 * s, 6 * s, threads{1: at(1*s, 6*s)}, 2, 6 * s, 7 * s},
		{"four that compute on two CPUs, with half of each", 10 * s, 5 * s, four(2500*time.Millisecond, 7500*time.Millisecond), 2, 10 * s, 10 * s},
		{"the same on one CPU", 5 * s, 5 * s, four(1250*time.Millisecond, 8750*time.Millisecond), 1, 5 * s, 10 * s},
		{"four that wait for one another only", 20 * s, 0, four(5*s, 5*s), 2, 0, 10 * s},
		{"four beside an idle one", 1 * s, 1 * s, threads{1: at(250*time.Millisecond, 500*time.Millisecond), 2: at(250*time.Millisecond, 500*time.Millisecond), 3: at(250*time.Millisecond, 500*time.Millisecond), 4: at(250*time.Millisecond, 500*time.Millisecond), 5: {}}, 2, 2 * s, 2 * s},
		{"a thread that has ended", 3 * s, 2 * s, threads{2: at(1*s, 1*s)}, 2, 2 * s, 5 * s},
		{"one that only wakes idle CPUs", 4 * s, 1 * s, threads{1: at(4*s, s/50)}, 2, s / 50, 4020 * time.Millisecond},
		{"its threads are not known", 1 * s, 3 * s, nil, 2, 3 * s, 4 * s},
		{"nor those of one that has two CPUs", 10 * s, 5 * s, nil, 2, 10 * s, 10 * s},
		{"nearly nothing", 1 * s, 49 * time.Millisecond, threads{}, 2, 49 * time.Millisecond, 1049 * time.Millisecond},
	} {
		t.Run(c.name, func(t *testing.T) {
			var w waits
			now, list, reads := time.Unix(1_800_000_000, 0), threads{1: at(0, 0)}, 0
			u := usage{tasks: 100 * s, waited: 50 * s}
			next := func() {
				w.next(now, u, 2, func() threads { reads++; return list }, func([]int) int { return c.cpus })
			}
			next()
			// Long enough to be worth a look at the threads, whose counters begin then.
			now, u.waited = now.Add(10*s), u.waited+1*s
			next()
			lost, active := w.lost, w.active
			list, reads = c.now, 0
			now, u.tasks, u.waited = now.Add(10*s), u.tasks+c.tasks, u.waited+c.full
			next()
			if lost, active = w.lost-lost, w.active-active; lost != c.lost || active != c.active {
				t.Errorf("lost %v, active for %v; want %v, %v", lost, active, c.lost, c.active)
			}
			if want := 2*c.full >= s/10; want != (reads == 1) {
				t.Errorf("threads were read %d times", reads)
			}
			next() // at the same moment
			if w.lost-lost != 1*s {
				t.Errorf("lost %v after another reader", w.lost)
			}
		})
	}
}

// The threads of a container are read within bounds, and only where they are found.
func TestThreadsOf(t *testing.T) {
	dir := t.TempDir()
	must(t, os.WriteFile(dir+"/cgroup.threads", []byte("7\n8\n9\n"), 0o644))
	proc := t.TempDir()
	for tid, text := range map[string]string{"7": "5 6 7\n", "8": "1 2 3\n"} { // 9 has ended
		must(t, os.Mkdir(proc+"/"+tid, 0o755))
		must(t, os.WriteFile(proc+"/"+tid+"/schedstat", []byte(text), 0o644))
	}
	if got := threadsOf(proc, dir, 3); len(got) != 2 || got[7] != (sched.Usage{Ran: 5, Waited: 6, Turns: 7}) {
		t.Errorf("threads %v", got)
	}
	u := usages{left: 2}
	if got := u.threads(proc, dir); got != nil {
		t.Errorf("beyond the bound: %v", got)
	}
	if u.left = 3; len(u.threads(proc, dir)) != 2 || u.left != 1 {
		t.Errorf("%d are left", u.left)
	}
	if n := cpusOf([]int{os.Getpid()}); n < 1 {
		t.Errorf("this process may run on %d CPUs", n)
	}
}
