package load

import (
	"fmt"
	"os"
	"runtime"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/fairlead-project/fairlead/internal/testkit"
)

// BenchmarkWake measures what no account shows of a wakeup from another CPU: an
// interrupt, and two switches. A task on CPU 1 wakes one on CPU 0, which goes
// straight back to sleep, while a third computes on CPU 0. lost-µs is what a wakeup
// takes from the third, own-µs what of that the scheduler charges to the second.
// On virtual machines the rest can be most of it: feature/netcpu/README.md.
func BenchmarkWake(b *testing.B) {
	if runtime.NumCPU() < 2 {
		testkit.Skip(b, "one CPU only")
	}
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(max(4, runtime.NumCPU())))
	for _, rate := range []int{4_000, 16_000} {
		b.Run(fmt.Sprint(rate), func(b *testing.B) {
			const window = time.Second
			var lost, own float64
			for range b.N {
				alone, _ := wake(b, 0, window)
				beside, used := wake(b, rate, window)
				lost += (1 - beside/alone) / float64(rate)
				own += used.Seconds() / window.Seconds() / float64(rate)
			}
			b.ReportMetric(1e6*lost/float64(b.N), "lost-µs/wakeup")
			b.ReportMetric(1e6*own/float64(b.N), "own-µs/wakeup")
		})
	}
}

// wake gives how much was computed per second beside wakeups at a rate, and the
// CPU time of who was woken.
func wake(b *testing.B, rate int, window time.Duration) (done float64, used time.Duration) {
	r, w, err := os.Pipe()
	if err != nil {
		b.Fatal(err)
	}
	// Blocking descriptors: the netpoller would make wakeups of its own.
	from, to := int(r.Fd()), int(w.Fd())
	var stop atomic.Bool
	var rounds atomic.Uint64
	ended := make(chan error, 3)
	on := func(cpu int, fn func()) {
		go func() {
			runtime.LockOSThread() // and thrown away with its affinity
			var set unix.CPUSet
			set.Set(cpu)
			err := unix.SchedSetaffinity(0, &set)
			if err == nil {
				fn()
			}
			ended <- err
		}()
	}
	on(0, func() {
		x := uint64(88172645463325252)
		for !stop.Load() {
			for range unit / 10 {
				x ^= x << 13
				x ^= x >> 7
				x ^= x << 17
			}
			rounds.Add(1)
		}
	})
	on(0, func() {
		buf := make([]byte, 1)
		for {
			if n, err := unix.Read(from, buf); n == 0 || err != nil && err != unix.EINTR {
				break
			}
		}
		var ru unix.Rusage
		unix.Getrusage(unix.RUSAGE_THREAD, &ru)
		used = time.Duration(ru.Utime.Nano() + ru.Stime.Nano())
	})
	time.Sleep(window / 10)
	began, before := time.Now(), rounds.Load()
	on(1, func() {
		for n := 1; time.Since(began) < window; n++ {
			for rate == 0 && time.Since(began) < window || time.Since(began) < time.Duration(n)*time.Second/time.Duration(max(rate, 1)) {
			}
			if rate > 0 {
				unix.Write(to, []byte{0})
			}
		}
	})
	for err = <-ended; err == nil && time.Since(began) < window; err = <-ended {
	}
	done = float64(rounds.Load()-before) / time.Since(began).Seconds()
	stop.Store(true)
	w.Close()
	for range 2 {
		if e := <-ended; err == nil {
			err = e
		}
	}
	r.Close()
	if err != nil {
		b.Fatal(err)
	}
	return done, used
}
