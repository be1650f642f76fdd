package account

import (
	"fmt"
	"net"
	"runtime"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/fairlead-project/fairlead/internal/testkit"
)

// Packets that TCP sends from a timer are charged to their sender. CPU 0 has only the sender and
// its timers; the rest of the packets' cost is CPU 1's.
func TestPaced(t *testing.T) {
	testkit.InFull(t)
	f := newFabric(t, exactMeter(t))
	box, other := f.add("box", 2), f.add("other", 3)
	f.rps(f.host, "h2", "2")
	f.rps(f.host, "nic0", "2")
	r := f.load(f.wire, 1, "tcp-recv", "--listen", ":9000")
	var paced net.Conn
	must(t, box.Do(func() error {
		return pinned(0, func() (err error) {
			if paced, err = (&net.Dialer{Control: pace}).Dial("tcp", "10.66.0.1:9000"); err != nil {
				return err
			}
			_, err = paced.Write(make([]byte, stream))
			return err
		})
	}))
	t.Cleanup(func() { paced.Close() })
	f.gotBytes(r, stream)
	f.expect(func(d delta) {
		a := d.of(box)
		d.streamed(a.Send[TCP], a.Receive[TCP], stream)
		if d.on(box, 0).By[Protocols+TCP].Ns == 0 {
			d.t.Error("nothing for what timers sent on CPU 0")
		}
		if w := d.system().Send[TCP]; w != (Work{}) {
			d.t.Errorf("the system is charged %+v for sending", w)
		}
		d.nothing(other)
	})
}

// pace limits a TCP socket to 10 MB/s, which it keeps by timers.
func pace(_, _ string, c syscall.RawConn) (err error) {
	if cerr := c.Control(func(fd uintptr) { err = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_MAX_PACING_RATE, 10e6) }); cerr != nil {
		return cerr
	}
	return err
}

// pinned runs fn with the thread pinned to one CPU.
func pinned(cpu int, fn func() error) error {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	var was, one unix.CPUSet
	if err := unix.SchedGetaffinity(0, &was); err != nil {
		return err
	}
	one.Set(cpu)
	if err := unix.SchedSetaffinity(0, &one); err != nil {
		return err
	}
	defer unix.SchedSetaffinity(0, &was)
	return fn()
}

// RPS hands packets over by a function call to the other CPU: the receiver pays for the call, with
// the overhead around its handler.
func TestCalls(t *testing.T) {
	f := newFabric(t, exactMeter(t))
	box, other := f.add("box", 2), f.add("other", 3)
	// More than the rest of the cost of these packets.
	const each = time.Millisecond
	must(t, f.m.vars.AroundCall.Set(uint64(each)))
	r := f.receive(box, 0, ":9000")
	f.send(f.wire, 1, packets, "udp-send", "10.66.0.2:9000", "--rate", "200")
	f.got(r, packets)
	f.expect(func(d delta) {
		d.received(box, UDP, packets, packets*sizeUDP4)
		// Calls that arrive within a softirq are part of its time, and a packet sometimes finds
		// another's call under way.
		if got := d.of(box).CPU(); got < packets/10*each {
			d.t.Errorf("the container has %v for %d calls of %v", got, packets, each)
		}
		d.nothing(other)
	})
}

// A call is measured where the kernel has a tracepoint for it.
func TestCallMeasured(t *testing.T) {
	m := newMeter(t)
	l := &lab{t: t, m: m}
	var measured uint64
	l.await(func() string {
		must(t, m.vars.AroundCall.Get(&measured))
		if measured != 0 {
			return ""
		}
		must(t, m.calibrate()) // other processes on the machine can disturb a measurement
		return "what is around a call was not measured"
	})
}

// However large the overhead around an interrupt, it does not reach back into the previous run: no
// CPU is charged more than the time that passes.
func TestCallsFollow(t *testing.T) {
	f := newFabric(t, exactMeter(t))
	box := f.add("box", 2)
	r := f.receive(box, 0, ":9000")
	softirq := func() (of []time.Duration) {
		for _, s := range f.states() {
			of = append(of, time.Duration(s.Softirq))
		}
		return of
	}
	const each = 5 * time.Millisecond // many times the gap between two packets
	must(t, f.m.vars.AroundCall.Set(uint64(each)))
	was, began := softirq(), time.Now()
	f.load(f.wire, 1, "udp-send", "--to", "10.66.0.2:9000", "--size", fmt.Sprint(payload), "--count", fmt.Sprint(5*packets), "--rate", "20000")
	f.got(r, 5*packets)
	f.expect(func(d delta) { d.received(box, UDP, 5*packets, 5*packets*sizeUDP4) })
	elapsed := time.Since(began)
	for cpu, is := range softirq() {
		// The first run may have begun before the reading.
		if got := is - was[cpu]; got > elapsed+each {
			t.Errorf("CPU %d: %v in %v", cpu, got, elapsed)
		}
	}
	if d := f.between(f.began, f.read()); d.of(box).CPU() < each {
		t.Errorf("%v for the container: nothing was tested", d.of(box).CPU())
	}
}

// Without a tracepoint for the call, the measurement gives up soon.
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
	if r.tries != aroundNone && len(r.found) == 0 { // other processes may call that CPU meanwhile
		t.Errorf("looked for %d calls of which none came", r.tries)
	}
}

// On a virtual machine that has moved, an interrupt takes another time.
func TestRecalibrate(t *testing.T) {
	testkit.NeedRoot(t)
	m, err := Open(Config{Identity: newIdentity(t)})
	must(t, err)
	t.Cleanup(func() { m.Close() })
	var measured, again uint64
	must(t, m.vars.Around.Get(&measured))
	for _, tt := range []struct {
		ago  time.Duration
		anew bool
	}{{aroundEvery / 2, false}, {2 * aroundEvery, true}} {
		m.calibrated = time.Now().Add(-tt.ago)
		must(t, m.vars.Around.Set(uint64(1)))
		_, err = m.Read()
		must(t, err)
		m.calibrating.Wait()
		must(t, m.vars.Around.Get(&again))
		if (again != 1) != tt.anew {
			t.Errorf("%v after it was measured to be %d: %d", tt.ago, measured, again)
		}
	}
}
