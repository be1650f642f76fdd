package account

import (
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/lab/rig"
	"github.com/fairlead-project/fairlead/lab/sandbox"
)

// A figure test asserts how exact something is, not what happens: it can fail by chance on a
// machine that does anything else. The rig of `fairlead-lab bench netcpu` has no traffic for these.

// figure skips t except in the tier with the figures.
func figure(t *testing.T) {
	t.Helper()
	if tier, err := testkit.ParseTier(os.Getenv(testkit.TierVar)); err != nil || tier != testkit.Full {
		testkit.Skip(t, "a figure: only in the tier full")
	}
}

// stopwatch makes a stopwatch that ends with the test.
func stopwatch(t *testing.T, cfg rig.StopwatchConfig) (w *rig.Stopwatch, read func() rig.Elapsed) {
	t.Helper()
	testkit.NeedRoot(t)
	w, err := rig.NewStopwatch(cfg)
	must(t, err)
	t.Cleanup(func() { must(t, w.Close()) })
	return w, func() rig.Elapsed {
		e, err := w.Read()
		must(t, err)
		return e
	}
}

const while = 700 * time.Millisecond

// More expensive packets are charged more: each container's charge equals a stopwatch's time around
// the softirqs that brought its packets alone.
func TestUnequal(t *testing.T) {
	figure(t)
	for _, c := range []struct {
		name, protocol string
		rates          map[uint64]time.Duration // and how long to measure: with all runs, or some, sampled
	}{
		{"udp and tcp", "tcp", map[uint64]time.Duration{400: 3 * while, 4000: untilKnown}},
		// Not at 4000: one sender's timers expire while the other sends, right before softirqs that
		// they did not raise (LIMITS.md).
		{"small and fragments", "udp", map[uint64]time.Duration{400: 3 * while}},
	} {
		for rate, length := range c.rates {
			t.Run(fmt.Sprintf("%s %d", c.name, rate), func(t *testing.T) {
				w, read := stopwatch(t, rig.StopwatchConfig{Tells: true})
				must(t, w.Start())
				f := newFabric(t, newMeter(t))
				// All on CPU 1, except packets that return to the sender.
				f.rps(f.host, "nic0", "0")
				f.rps(f.wire, "wire", "1")
				a, b := f.add("a", 2), f.add("b", 3)
				f.load(a, 1, "udp-recv", "--listen", ":9000")
				f.load(b, 1, c.protocol+"-recv", "--listen", ":9000")
				f.load(f.wire, 1, "udp-send", "--size", "64", "--to", "10.66.0.2:9000", "--rate", fmt.Sprint(rate))
				if c.protocol == "tcp" {
					f.trickle("10.66.0.3:9000", rate)
				} else {
					f.load(f.wire, 1, "udp-send", "--size", "8000", "--to", "10.66.0.3:9000", "--rate", fmt.Sprint(rate))
				}
				var ofA, ofB, both time.Duration
				f.several(func() delta {
					d, was, now := beside(f.lab, length, read)
					ofA, ofB, both = now.Since(was, rig.First), now.Since(was, rig.Second), now.Since(was, rig.Both)
					t.Logf("by the stopwatch: %v and %v, and %v in which both had packets", ofA, ofB, both)
					return d
				}, func(d delta) {
					d.addsUp()
					if min(ofA, ofB) < d.total()/10 || both > min(ofA, ofB)/20 {
						d.t.Errorf("%v and %v by the stopwatch, %v of both: nothing was tested", ofA, ofB, both)
					}
					near(d.t, "the first one's", d.of(a).CPU(), ofA+both/2, 0.05)
					near(d.t, "the second one's", d.of(b).CPU(), ofB+both/2, 0.05)
				})
			})
		}
	}
}

// flooding calls send in a box again and again until the test ends. Each call sends some packets.
func (f *fabric) flooding(b *sandbox.Box, send func() error) {
	f.t.Helper()
	var stop atomic.Bool
	done := make(chan error, 1)
	must(f.t, b.Do(send)) // a send that fails at all fails here
	go func() {
		done <- b.Do(func() error {
			for !stop.Load() {
				if err := send(); err != nil {
					return err
				}
				time.Sleep(200 * time.Microsecond)
			}
			return nil
		})
	}()
	f.t.Cleanup(func() {
		stop.Store(true)
		if err := <-done; err != nil {
			f.t.Error(err)
		}
	})
}

// trickle sends segments of one TCP connection from outside, on CPU 1.
func (f *fabric) trickle(to string, rate uint64) {
	f.t.Helper()
	var c net.Conn
	f.t.Cleanup(func() {
		if c != nil {
			c.Close()
		}
	})
	f.flooding(f.wire, func() (err error) {
		if c == nil {
			if c, err = net.Dial("tcp", to); err != nil {
				return err
			}
		}
		time.Sleep(time.Second/time.Duration(rate) - 200*time.Microsecond)
		var was, one unix.CPUSet
		one.Set(1)
		if err := errors.Join(unix.SchedGetaffinity(0, &was), unix.SchedSetaffinity(0, &one)); err != nil {
			return err
		}
		_, err = c.Write(make([]byte, 1000))
		return errors.Join(err, unix.SchedSetaffinity(0, &was))
	})
}

// Packets that TCP sends from a timer are charged to the socket's container.
func TestPacedTimers(t *testing.T) {
	figure(t)
	w, read := stopwatch(t, rig.StopwatchConfig{Timers: true})
	f := newFabric(t, newMeter(t))
	box := f.add("box", 2)
	f.victim()
	f.load(f.wire, 1, "tcp-recv", "--listen", ":9000")
	f.load(box, 0, "tcp-send", "--to", "10.66.0.1:9000", "--conns", "20", "--congestion", "bbr")
	time.Sleep(time.Second) // TCP has to estimate the bandwidth first
	must(t, w.Start())
	var packets, timers time.Duration
	f.several(func() delta {
		d, was, now := beside(f.lab, 3*while, read)
		packets, timers = now.Since(was, rig.NetRx, rig.NetTx), now.Since(was, rig.Tasklet, rig.Timer, rig.HRTimer, rig.LocalTimer)
		t.Logf("by the stopwatch: packets %v, timers %v", packets, timers)
		return d
	}, func(d delta) {
		d.only(box, 0.9)
		if timers < packets/10 {
			d.t.Errorf("timers took %v beside %v: nothing was tested", timers, packets)
		}
		// Not every timer sends: none does while the task holds the socket.
		if d.softirq < packets+timers/3 || d.softirq > packets+timers+packets/20 {
			d.t.Errorf("softirq by the meter: %v, want all of %v for packets and most of %v of timers", d.softirq, packets, timers)
		}
	})
}

// A qdisc that shapes sets a timer for each packet that has to wait: the owner of that packet pays
// for its interrupt.
func TestTimers(t *testing.T) {
	figure(t)
	w, read := stopwatch(t, rig.StopwatchConfig{Timers: true})
	f := newFabric(t, newMeter(t))
	f.shape(f.host, "nic0", 80e6)
	box := f.add("box", 2)
	f.victim()
	f.load(box, 0, "udp-send", "--to", "10.66.0.1:9000", "--size", "1400", "--rate", "10000")
	time.Sleep(200 * time.Millisecond)
	must(t, w.Start())
	var each uint64
	must(t, f.m.vars.Around.Get(&each))
	if each == 0 {
		t.Error("what is around a timer's interrupt was not measured")
	}
	var packets, timers, around time.Duration
	f.several(func() delta {
		before := interrupts(t, "LOC:")
		d, was, now := beside(f.lab, 3*while, read)
		around = time.Duration((interrupts(t, "LOC:") - before) * each)
		packets, timers = now.Since(was, rig.NetRx, rig.NetTx), now.Since(was, rig.LocalTimer)
		t.Logf("by the stopwatch: packets %v, interrupts of timers %v, around them %v; by the meter: %v", packets, timers, around, d.softirq)
		return d
	}, func(d delta) {
		d.only(box, 0.9)
		if timers < packets/20 {
			d.t.Errorf("timers took %v beside %v: nothing was tested", timers, packets)
		}
		// Some interrupts come within a softirq and are part of its time, as the stopwatch's
		// programs are part of the meter's.
		if most := packets + timers + around; d.softirq < packets+(timers+around)/2 || d.softirq > most+most/10 {
			d.t.Errorf("the meter has %v, want %v of packets and most of %v and %v of timers", d.softirq, packets, timers, around)
		}
	})
}

// In a flood the kernel works in ksoftirqd, beside a thread that computes. The time taken from
// ksoftirqd is what the scheduler gave it, plus interrupts meanwhile, which are not the thread's
// time.
func TestKsoftirqdTime(t *testing.T) {
	figure(t)
	f := newFabric(t, newMeter(t))
	box := f.add("box", 2)
	f.victim()
	f.load(box, 0, "udp-recv", "--listen", ":9000")
	f.load(f.wire, 1, "udp-send", "--to", "10.66.0.2:9000", "--rate", "flood", "--size", "64")
	threads := ksoftirqds(t)
	var given time.Duration
	f.several(func() delta {
		d, was, now := beside(f.lab, while, func() (sum time.Duration) {
			for _, pid := range threads {
				sum += ran(t, pid)
			}
			return sum
		})
		given = now - was
		return d
	}, func(d delta) {
		d.addsUp()
		var all time.Duration
		for theft, ns := range d.thefts {
			if theft.Victim.Kind == Ksoftirqd {
				all += ns
			}
		}
		by := d.thefts[Theft{Victim: Party{Kind: Ksoftirqd}, Culprit: f.ids[box]}]
		d.t.Logf("%v of %v that ksoftirqd ran, %v of it by the container", all, given, by)
		if given < d.total()/10 {
			d.t.Errorf("ksoftirqd ran for %v: nothing was tested", given)
		}
		mostly(d.t, "the container's part", by, all, 0.75)
		mostly(d.t, "what was taken from ksoftirqd", all, given, 0.8)
		if all > 2*given {
			d.t.Errorf("more than twice of what ksoftirqd ran for was taken from it")
		}
	})
}

func ksoftirqds(t *testing.T) (pids []int) {
	t.Helper()
	comms, err := filepath.Glob("/proc/[0-9]*/comm")
	must(t, err)
	for _, path := range comms {
		if comm, err := os.ReadFile(path); err == nil && strings.HasPrefix(string(comm), "ksoftirqd/") {
			pid, err := strconv.Atoi(filepath.Base(filepath.Dir(path)))
			must(t, err)
			pids = append(pids, pid)
		}
	}
	if len(pids) == 0 {
		t.Fatal("no ksoftirqd")
	}
	return pids
}

// interrupts returns the count of one row of proc_interrupts(5), over all CPUs.
func interrupts(t *testing.T, row string) (sum uint64) {
	t.Helper()
	all, err := os.ReadFile("/proc/interrupts")
	must(t, err)
	for line := range strings.Lines(string(all)) {
		fields := strings.Fields(line)
		if fields[0] != row {
			continue
		}
		for _, f := range fields[1:] {
			n, err := strconv.ParseUint(f, 10, 64)
			if err != nil {
				break
			}
			sum += n
		}
	}
	return sum
}

// several is measure with any method of measurement.
func (l *lab) several(measure func() delta, check func(delta)) {
	l.t.Helper()
	const most = 4
	for n := 1; ; n++ {
		d, tr := measure(), &trial{TB: l.t}
		d.t = tr
		check(d)
		if len(tr.wrong) == 0 {
			l.t.Log(d)
			return
		}
		l.t.Logf("measurement %d: %s%v", n, strings.Join(tr.wrong, ""), d)
		if n == most {
			l.t.Errorf("none of %d measurements is right", most)
			return
		}
	}
}

// addsUp checks that a measurement has no lost interval.
func (d delta) addsUp() {
	d.t.Helper()
	var sum time.Duration
	for _, a := range d.accounts {
		sum += a.CPU()
	}
	near(d.t, "sum of the accounts against softirq and threads", sum, d.total(), 0.02)
	if d.readingLost != 0 {
		d.t.Errorf("%d charges lost", d.readingLost)
	}
}

// here returns the time that would also be this host's if the world were on another machine.
func (d delta) here() time.Duration { return d.total() - d.accounts[d.l.outside].CPU() }

// only checks that nearly all of a measurement is one container's work.
func (d delta) only(b *sandbox.Box, share float64) {
	d.t.Helper()
	d.addsUp()
	mostly(d.t, "the account of "+b.Name, d.of(b).CPU(), d.here(), share)
}

func near(t testing.TB, what string, got, want time.Duration, tolerance float64) {
	t.Helper()
	if diff := float64(got - want); diff > tolerance*float64(want) || -diff > tolerance*float64(want) {
		t.Errorf("%s: %v, want %v within %.0f %%", what, got, want, 100*tolerance)
	}
}

// mostly checks that a part is nearly all of a whole.
func mostly(t testing.TB, what string, part, whole time.Duration, share float64) {
	t.Helper()
	if float64(part) < share*float64(whole) {
		t.Errorf("%s: %v of %v, want at least %.0f %%", what, part, whole, 100*share)
	}
}

// With sampling, the account of a container with thousands of packets is within 5 % only after some
// seconds (LIMITS.md).
const untilKnown = 12 * time.Second

// beside measures for this length by the meter, and by look over the same time.
func beside[T any](l *lab, length time.Duration, look func() T) (d delta, was, now T) {
	l.t.Helper()
	before := l.read()
	was = look()
	time.Sleep(length)
	now = look()
	return l.between(before, l.read()), was, now
}
