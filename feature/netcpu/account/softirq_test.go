package account

import (
	"os"
	"runtime"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"

	"github.com/fairlead-project/fairlead/internal/testkit"
)

// The vectors of include/linux/interrupt.h in which packets may be handled.
const (
	timerVec   = 1
	netTx      = 2
	netRx      = 3
	tasklet    = 6
	hrtimerVec = 8
	localTimer = 10 // no vector: the interrupts of timers
	vectors    = 11
)

// stopwatch measures softirqs, and the interrupts of timers, by programs of its
// own: what a meter says is held against that. One that is made before the meter and started after it runs
// inside of the meter's own programs, whose time is then in neither.
// read gives the time in each vector since the start.
func stopwatch(t *testing.T) (start func(), read func() [vectors]time.Duration) {
	t.Helper()
	testkit.NeedRoot(t)
	m, err := ebpf.NewMap(&ebpf.MapSpec{Type: ebpf.PerCPUArray, KeySize: 4, ValueSize: 8, MaxEntries: 2 * vectors})
	must(t, err)
	softirq := asm.LoadMem(asm.R1, asm.R6, 0, asm.DWord) // its vector
	timer := asm.Mov.Imm(asm.R1, localTimer)
	// value leaves the address of an entry of the CPU's in R0: the vector's,
	// or where the vector's softirq began.
	value := func(vector asm.Instruction, offset int32) asm.Instructions {
		return asm.Instructions{
			vector,
			asm.Add.Imm(asm.R1, offset),
			asm.StoreMem(asm.RFP, -4, asm.R1, asm.Word),
			asm.LoadMapPtr(asm.R1, m.FD()),
			asm.Mov.Reg(asm.R2, asm.RFP),
			asm.Add.Imm(asm.R2, -4),
			asm.FnMapLookupElem.Call(),
			asm.JEq.Imm(asm.R0, 0, "out"),
		}
	}
	now := asm.Instructions{asm.Mov.Reg(asm.R6, asm.R1), asm.FnKtimeGetNs.Call(), asm.Mov.Reg(asm.R7, asm.R0)}
	out := asm.Instructions{asm.Mov.Imm(asm.R0, 0).WithSymbol("out"), asm.Return()}
	begin := func(vector asm.Instruction) []asm.Instructions {
		return []asm.Instructions{now, value(vector, vectors), {asm.StoreMem(asm.R0, 0, asm.R7, asm.DWord)}, out}
	}
	end := func(vector asm.Instruction) []asm.Instructions {
		return []asm.Instructions{now, value(vector, vectors), {
			asm.LoadMem(asm.R1, asm.R0, 0, asm.DWord),
			asm.JEq.Imm(asm.R1, 0, "out"), // it began before we were attached
			asm.Sub.Reg(asm.R7, asm.R1),
		}, value(vector, 0), {
			asm.LoadMem(asm.R1, asm.R0, 0, asm.DWord),
			asm.Add.Reg(asm.R1, asm.R7),
			asm.StoreMem(asm.R0, 0, asm.R1, asm.DWord),
		}, out}
	}
	programs := map[string][]asm.Instructions{
		"softirq_entry": begin(softirq), "softirq_exit": end(softirq),
		"local_timer_entry": begin(timer), "local_timer_exit": end(timer),
	}
	attach := func(name string) {
		var code asm.Instructions
		for _, part := range programs[name] {
			code = append(code, part...)
		}
		p, err := ebpf.NewProgram(&ebpf.ProgramSpec{Type: ebpf.RawTracepoint, Instructions: code, License: "Dual BSD/GPL"})
		must(t, err)
		k, err := link.AttachRawTracepoint(link.RawTracepointOptions{Name: name, Program: p})
		must(t, err)
		must(t, p.Close())
		t.Cleanup(func() { k.Close() })
	}
	t.Cleanup(func() { m.Close() })
	attach("softirq_exit")
	attach("local_timer_exit")
	return func() {
			attach("softirq_entry")
			attach("local_timer_entry")
		}, func() (sum [vectors]time.Duration) {
			for vec := range sum {
				var ns []uint64
				must(t, m.Lookup(uint32(vec), &ns))
				for _, n := range ns {
					sum[vec] += time.Duration(n)
				}
			}
			return sum
		}
}

// What TCP sends from a timer is charged to who sent it.
func TestPaced(t *testing.T) {
	start, read := stopwatch(t)
	f := newFabric(t)
	box := f.add("box", 2, f.host)
	f.victim()
	f.load(f.wire, 1, "tcp-recv", "--listen", ":9000")
	f.load(box, 0, "tcp-send", "--to", "10.66.0.1:9000", "--conns", "20", "--congestion", "bbr")
	time.Sleep(time.Second) // it has to find out the bandwidth first
	start()
	var packets, timers time.Duration
	f.several(func() delta {
		d, took := f.against(read)
		packets, timers = took(netRx, netTx), took(tasklet, timerVec, hrtimerVec, localTimer)
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
	start, read := stopwatch(t)
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
	start()
	var each uint64
	must(t, f.m.around.Get(&each))
	if each == 0 {
		t.Error("what is around a timer's interrupt was not measured")
	}
	var packets, timers, around time.Duration
	f.several(func() delta {
		before := interrupts(t, "LOC:")
		d, took := f.against(read)
		around = time.Duration((interrupts(t, "LOC:") - before) * each)
		packets, timers = took(netRx, netTx), took(localTimer)
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

// against measures for a while by the meter and by a stopwatch. took adds up what
// that had of some vectors.
func (l *lab) against(read func() [vectors]time.Duration) (d delta, took func(of ...int) time.Duration) {
	l.t.Helper()
	before, err := l.m.Read()
	must(l.t, err)
	was := read()
	time.Sleep(3 * while)
	now := read()
	after, err := l.m.Read()
	must(l.t, err)
	return l.between(before, after), func(of ...int) (sum time.Duration) {
		for _, v := range of {
			sum += now[v] - was[v]
		}
		return sum
	}
}
