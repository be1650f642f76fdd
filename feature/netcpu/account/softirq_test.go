package account

import (
	"os"
	"runtime"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/fairlead-project/fairlead/internal/testkit"
)

// What TCP sends from a timer is charged to who sent it.
func TestPaced(t *testing.T) {
	w := newStopwatch(t, false, "local_timer")
	f := newFabric(t)
	box := f.add("box", 2, f.host)
	f.victim()
	f.load(f.wire, 1, "tcp-recv", "--listen", ":9000")
	f.load(box, 0, "tcp-send", "--to", "10.66.0.1:9000", "--conns", "20", "--congestion", "bbr")
	time.Sleep(time.Second) // it has to find out the bandwidth first
	w.start()
	var packets, timers time.Duration
	f.several(func() delta {
		d, was, now := beside(f.lab, 3*while, w.read)
		packets, timers = now.since(was, netRx, netTx), now.since(was, tasklet, timerVec, hrtimerVec, localTimer)
		t.Logf("by the stopwatch: packets %v, timers %v", packets, timers)
		return d
	}, func(d delta) {
		d.only(box, 0.9)
		if timers < packets/10 {
			d.t.Errorf("timers took %v beside %v: nothing was tested", timers, packets)
		}
		// Not all timers send: not while the task has the socket.
		if d.softirq < packets+timers/3 || d.softirq > packets+timers+packets/20 {
			d.t.Errorf("softirq by the meter: %v, want all of %v for packets and most of %v of timers", d.softirq, packets, timers)
		}
	})
}

// A qdisc that shapes sets a timer for each packet that has to wait: whose packet
// that is pays for its interrupt.
func TestTimers(t *testing.T) {
	w := newStopwatch(t, false, "local_timer")
	f := newFabric(t)
	for _, args := range []string{
		"qdisc add dev nic0 root handle 1: htb default 1",
		"class add dev nic0 parent 1: classid 1:1 htb rate 80mbit ceil 80mbit burst 1600 cburst 1600",
	} {
		f.run(f.host, "tc", strings.Fields(args)...)
	}
	box := f.add("box", 2, f.host)
	f.victim()
	f.load(box, 0, "udp-send", "--to", "10.66.0.1:9000", "--size", "1400", "--rate", "10000")
	time.Sleep(200 * time.Millisecond)
	w.start()
	var each uint64
	must(t, f.m.around.Get(&each))
	if each == 0 {
		t.Error("what is around a timer's interrupt was not measured")
	}
	var packets, timers, around time.Duration
	f.several(func() delta {
		before := interrupts(t, "LOC:")
		d, was, now := beside(f.lab, 3*while, w.read)
		around = time.Duration((interrupts(t, "LOC:") - before) * each)
		packets, timers = now.since(was, netRx, netTx), now.since(was, localTimer)
		t.Logf("by the stopwatch: packets %v, interrupts of timers %v, around them %v; by the meter: %v", packets, timers, around, d.softirq)
		return d
	}, func(d delta) {
		d.only(box, 0.9)
		if timers < packets/20 {
			d.t.Errorf("timers took %v beside %v: nothing was tested", timers, packets)
		}
		// Some come within a softirq, and are in its time; and so are the
		// stopwatch's programs in the meter's.
		if most := packets + timers + around; d.softirq < packets+(timers+around)/2 || d.softirq > most+most/10 {
			d.t.Errorf("the meter has %v, want %v of packets and most of %v and %v of timers", d.softirq, packets, timers, around)
		}
	})
}

// RPS hands packets over by calling the other CPU: who they are for pays for that,
// with what is around the call's handler.
func TestCalls(t *testing.T) {
	f := newFabric(t)
	box := f.add("box", 2, f.host)
	f.victim()
	f.load(box, 0, "udp-recv", "--listen", ":9000")
	f.load(f.wire, 1, "udp-send", "--to", "10.66.0.2:9000", "--rate", "2000")
	var measured uint64
	for n := 0; ; n++ {
		must(t, f.m.aroundCall.Get(&measured))
		if measured != 0 {
			break
		}
		if n == 20 { // others on the machine can be in the way, but not each time
			t.Fatal("what is around a call was not measured")
		}
		must(t, f.m.calibrate())
	}
	const each = 50 * time.Microsecond // more than all else about a packet
	must(t, f.m.aroundCall.Set(uint64(each)))
	var calls uint64
	f.several(func() delta {
		a, err := f.m.Read()
		must(t, err)
		before := interrupts(t, "CAL:")
		time.Sleep(while)
		calls = interrupts(t, "CAL:") - before
		b, err := f.m.Read()
		must(t, err)
		return f.between(a, b)
	}, func(d delta) {
		d.only(box, 0.8)
		if calls < 200 {
			d.t.Errorf("%d calls: nothing was tested", calls)
		}
		// Those that come within a softirq are in its time.
		if got, want := d.of(box).CPU(), time.Duration(calls)*each; got < want/2 {
			d.t.Errorf("the container has %v, want most of %v for %d calls", got, want, calls)
		}
	})
}

// However far what is around an interrupt would reach back, it does not into the
// run before, looked at or not: no CPU has more than the time that passes.
func TestCallsFollow(t *testing.T) {
	f := newFabric(t)
	box := f.add("box", 2, f.host)
	f.victim()
	f.load(box, 0, "udp-recv", "--listen", ":9000")
	f.load(f.wire, 1, "udp-send", "--to", "10.66.0.2:9000", "--rate", "50000")
	softirq := func() (of []time.Duration) {
		var states []accountCpu
		must(t, f.m.maps.FlCpus.Lookup(uint32(0), &states))
		for _, s := range states {
			of = append(of, time.Duration(s.Softirq))
		}
		return of
	}
	var calls uint64
	var elapsed time.Duration
	var was, is []time.Duration
	measure := func() delta {
		a, err := f.m.Read()
		must(t, err)
		before := interrupts(t, "CAL:")
		begin := time.Now()
		was = softirq()
		time.Sleep(while)
		is = softirq()
		elapsed, calls = time.Since(begin), interrupts(t, "CAL:")-before
		b, err := f.m.Read()
		must(t, err)
		return f.between(a, b)
	}
	measure()
	// Four times what lies between two.
	each := 4 * elapsed / time.Duration(max(calls, 1))
	must(t, f.m.aroundCall.Set(uint64(each)))
	f.several(measure, func(d delta) {
		if calls < 200 {
			d.t.Errorf("%d calls: nothing was tested", calls)
		}
		for cpu := range is {
			if got := is[cpu] - was[cpu]; got > elapsed*5/4 {
				d.t.Errorf("CPU %d: %v in %v with %d calls, around each %v", cpu, got, elapsed, calls, each)
			}
		}
	})
}

// Where no call comes by an event that is seen, it is not looked for long.
func TestCallsUnseen(t *testing.T) {
	m := newMeter(t)
	type result struct {
		tries int
		found []uint64
		err   error
	}
	done := make(chan result)
	go func() {
		runtime.LockOSThread() // for good: the thread ends with its affinity
		var r result
		cpu, _, err := stay()
		if r.err = err; err == nil {
			r.found, r.err = m.watchInterrupts(cpu, true, func() error { r.tries++; return nil })
		}
		done <- r
	}()
	r := <-done
	must(t, r.err)
	if r.tries != aroundNone && len(r.found) == 0 { // others may call that CPU meanwhile
		t.Errorf("looked for %d calls of which none came", r.tries)
	}
}

// interrupts is how many there were of one row of proc_interrupts(5), on all CPUs.
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

// A virtual machine that has moved takes another time for its interrupts.
func TestRecalibrate(t *testing.T) {
	testkit.NeedRoot(t)
	m, err := Open(Config{})
	must(t, err)
	t.Cleanup(func() { m.Close() })
	var measured, again uint64
	must(t, m.around.Get(&measured))
	for _, tt := range []struct {
		ago  time.Duration
		anew bool
	}{{aroundEvery / 2, false}, {2 * aroundEvery, true}} {
		m.calibrated = time.Now().Add(-tt.ago)
		must(t, m.around.Set(uint64(1)))
		_, err = m.Read()
		must(t, err)
		m.calibrating.Wait()
		must(t, m.around.Get(&again))
		if (again != 1) != tt.anew {
			t.Errorf("%v after it was measured to be %d: %d", tt.ago, measured, again)
		}
	}
}
