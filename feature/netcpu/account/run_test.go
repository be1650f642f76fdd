package account

import (
	"fmt"
	"net"
	"runtime"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/lab/load"
	"github.com/fairlead-project/fairlead/lab/sandbox"
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
			if paced, err = net.Dial("tcp", "10.66.0.1:9000"); err != nil {
				return err
			}
			// 10 MB/s, which TCP keeps by timers.
			if err := testkit.SetSockopts(paced.(*net.TCPConn), unix.SOL_SOCKET, unix.SO_MAX_PACING_RATE, 10e6); err != nil {
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

// The kernel runs the flush of a CPU's table right away if the caller is on that CPU. Packets may then arrive
// in the middle of it.
func TestFlushInterrupted(t *testing.T) {
	m := exactMeter(t)
	f := newFabric(t, m)
	box := f.add("box", 2)
	r := f.receive(box, 1, ":9000")
	f.load(f.wire, 1, "udp-send", "--to", "10.66.0.2:9000", "--size", fmt.Sprint(payload), "--count", fmt.Sprint(100*packets), "--rate", "20000")
	must(t, pinned(0, func() error { // where the NIC hands its packets to
		f.counts("packets", 100*packets, func() uint64 {
			for range 10_000 {
				m.flush.Run(&ebpf.RunOptions{CPU: 0, Flags: runOnCPU})
			}
			return r.Read().Since(load.Reading{}).Ops
		})
		return nil
	}))
	f.expect(func(d delta) { d.received(box, UDP, 100*packets, 100*packets*sizeUDP4) })
}

// RPS hands packets over by a function call to the other CPU: the receiver pays for the call, with
// the overhead around its handler.
func TestCalls(t *testing.T) {
	f := newFabric(t, exactMeter(t))
	box, other := f.add("box", 2), f.add("other", 3)
	// This is more than the other cost of these packets, and less than the time between two softirqs of a
	// busy CPU, such as those of timers: no call begins before the last softirq has ended.
	const each = 200 * time.Microsecond
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
	m := testkit.Opened(Open(Config{Identity: newIdentity(t)}))(t)
	var measured, again uint64
	must(t, m.vars.Around.Get(&measured))
	for _, tt := range []struct {
		ago  time.Duration
		anew bool
	}{{aroundEvery / 2, false}, {2 * aroundEvery, true}} {
		m.calibrated = time.Now().Add(-tt.ago)
		must(t, m.vars.Around.Set(uint64(1)))
		_, err := m.Read()
		must(t, err)
		m.calibrating.Wait()
		must(t, m.vars.Around.Get(&again))
		if (again != 1) != tt.anew {
			t.Errorf("%v after it was measured to be %d: %d", tt.ago, measured, again)
		}
	}
}

// Behind a queue, packets leave in NET_TX and by timers. Their sender is charged for them. The victim
// is chance.
func TestQdisc(t *testing.T) {
	testkit.InFull(t)
	f := newFabric(t, exactMeter(t))
	f.shape(f.host, "nic0", 500e3) // 1.7 ms for a packet
	a, b := f.add("a", 2), f.add("b", 3)
	victim := f.victim()
	r := f.receive(f.wire, 1, ":9000")
	// At once: queued packets go out while the senders do nothing.
	f.load(a, 0, "udp-send", "--to", "10.66.0.1:9000", "--size", fmt.Sprint(payload), "--count", fmt.Sprint(packets))
	f.load(b, 0, "udp-send", "--to", "10.66.0.1:9000", "--size", fmt.Sprint(payload), "--count", fmt.Sprint(packets/2))
	f.got(r, packets+packets/2)
	f.expect(func(d delta) {
		d.sent(a, UDP, packets, packets*sizeUDP4)
		d.sent(b, UDP, packets/2, packets/2*sizeUDP4)
		d.nothing(victim)
		if w := d.system().Send[UDP]; w != (Work{}) {
			d.t.Errorf("the system is charged %+v for sending", w)
		}
	})
}

// An IFB works in a tasklet: packets from the uplink pass it before they reach the bridge. Their
// owner is known only after it.
func TestIFB(t *testing.T) {
	testkit.InFull(t)
	f := newFabric(t, exactMeter(t))
	f.redirect(f.host, "nic0", "ifb0")
	a, b, other := f.add("a", 2), f.add("b", 3), f.add("other", 4)
	far := f.behindRouter(a, b)
	receivers := []*load.Board{f.receive(a, 0, ":9000"), f.receive(b, 0, ":9000")}
	for turn, shaped := range []bool{false, true} {
		t.Run(fmt.Sprint("shaped ", shaped), func(t *testing.T) {
			if shaped {
				f.shape(f.host, "ifb0", 2e6)
			}
			f.begin(t)
			f.send(far, 1, packets, "udp-send", "10.66.0.2:9000")
			f.send(far, 1, packets/2, "udp-send", "10.66.0.3:9000")
			for i, r := range receivers {
				f.got(r, uint64((1+turn)*packets/(1+i)))
			}
			f.expect(func(d delta) {
				d.received(a, UDP, packets, packets*sizeUDP4)
				d.received(b, UDP, packets/2, packets/2*sizeUDP4)
				d.nothing(other)
			})
		})
	}
}

// behindRouter adds senders behind a router: like packets from a NIC, their packets have no socket
// that would identify the sender.
func (f *fabric) behindRouter(boxes ...*sandbox.Box) *sandbox.Box {
	f.t.Helper()
	far := f.box("far")
	f.lab.wire(sandbox.End{Box: far, Name: "eth0", Addr: prefix("10.68.0.1/24")},
		sandbox.End{Box: f.wire, Name: "far", Addr: prefix("10.68.0.254/24")}, "")
	f.gateway(far, "10.68.0.254")
	must(f.t, f.wire.Sysctl("ipv4/ip_forward", "1"))
	for _, b := range boxes { // reverse path filtering may drop the source
		f.gateway(b, "10.66.0.1")
	}
	return far
}

// In a flood the kernel works in ksoftirqd: the time that packets take from it is recorded with its
// culprit.
func TestKsoftirqd(t *testing.T) {
	f := newFabric(t, exactMeter(t))
	box, other := f.add("box", 2), f.add("other", 3)
	victim := f.victim()
	f.load(box, 0, "udp-recv", "--listen", ":9000")
	flood := f.load(f.wire, 1, "udp-send", "--to", "10.66.0.2:9000", "--rate", "flood", "--size", fmt.Sprint(payload))
	theft := Pair{Party{Kind: Ksoftirqd}, f.ids[box]}
	f.await(func() string {
		if f.between(f.began, f.read()).thefts[theft] <= 0 {
			return "nothing was taken from ksoftirqd"
		}
		return ""
	})
	flood.SetRate(0)
	f.expect(func(d delta) { d.nothing(other, victim) })
}

// Reordered and retransmitted packets belong to the connection.
func TestReordered(t *testing.T) {
	testkit.InFull(t)
	f := newFabric(t, exactMeter(t))
	// Without netem: every second packet takes the slower way.
	f.segmented(f.wire, "wire")
	f.shape(f.wire, "wire", 10e9, 20e6)
	f.Change(f.wire, "wire", func(h *netlink.Handle, k netlink.Link) error {
		return h.FilterAdd(&netlink.U32{
			FilterAttrs: netlink.FilterAttrs{LinkIndex: k.Attrs().Index, Parent: netlink.MakeHandle(1, 0), Priority: 1, Protocol: unix.ETH_P_IP},
			ClassId:     netlink.MakeHandle(1, 2),
			// The last bit of the IP header's identification.
			Sel: &netlink.TcU32Sel{Nkeys: 1, Flags: netlink.TC_U32_TERMINAL, Keys: []netlink.TcU32Key{{Mask: 0x10000, Val: 0x10000, Off: 4}}},
		})
	})
	box, other := f.add("box", 2), f.add("other", 3)
	r := f.load(box, 0, "tcp-recv", "--listen", ":9000")
	f.send(f.wire, 1, writes, "tcp-send", "10.66.0.2:9000")
	f.gotBytes(r, stream)
	if counter(t, box, "netstat", "TcpExt:", "TCPOFOQueue") == 0 {
		t.Error("no packet was out of order: nothing was tested")
	}
	f.expect(func(d delta) {
		a := d.of(box)
		d.streamed(a.Receive[TCP], a.Send[TCP], stream)
		if a.Receive[UDP] != (Work{}) || a.Send[UDP] != (Work{}) {
			d.t.Errorf("for UDP it is charged %+v, %+v", a.Receive[UDP], a.Send[UDP])
		}
		d.nothing(other)
	})
}
