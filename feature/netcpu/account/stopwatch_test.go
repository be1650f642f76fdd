package account

import (
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/btf"
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

// What the map of a stopwatch has after the vectors.
const (
	byWhom = vectors    // NET_RX, by whose packets it brought
	inRun  = byWhom + 4 // whose those are so far, in place of a sum
	places = inRun + 1
)

// stint is one of its values. That both are in one makes a begin cost as much as
// an end, so that the stopwatch is as long as what it is outside of.
type stint struct{ Sum, Began uint64 }

const began = 8 // its offset

// stopwatch measures softirqs by programs of its own, which know nothing of the
// meter's: what a meter says is held against that.
type stopwatch struct {
	t testing.TB
	m *ebpf.Map
	// tells says that it tells softirqs of CPU 1 apart by the packets that they bring:
	// to or from 10.x.x.2, 10.x.x.3, both, none of the two.
	tells bool
	// events are begun once all of their ends are seen.
	events []string
}

// newStopwatch makes one that stands still; beside softirqs it measures what
// events there are with _entry and _exit, as localTimer. Programs of a tracepoint
// run in the order in which they came. One that is made before the meter and
// started after it measures what is inside of the meter's own programs, whose
// time it has not. One that is started before the meter, too, begins and ends a
// moment before it each time, and so has the same time.
func newStopwatch(t testing.TB, tells bool, events ...string) *stopwatch {
	t.Helper()
	testkit.NeedRoot(t)
	m, err := ebpf.NewMap(&ebpf.MapSpec{Type: ebpf.PerCPUArray, KeySize: 4, ValueSize: 16, MaxEntries: places})
	must(t, err)
	t.Cleanup(func() { m.Close() })
	w := &stopwatch{t: t, m: m, tells: tells, events: append([]string{"softirq"}, events...)}
	for _, e := range w.events {
		w.attach(e+"_exit", w.end(vectorOf(e)))
	}
	return w
}

// start lets it run.
func (w *stopwatch) start() {
	w.t.Helper()
	if w.tells {
		w.tell()
	}
	for _, e := range w.events {
		w.attach(e+"_entry", w.begin(vectorOf(e)))
	}
}

func vectorOf(event string) asm.Instruction {
	if event == "softirq" {
		return asm.LoadMem(asm.R1, asm.R6, 0, asm.DWord)
	}
	return asm.Mov.Imm(asm.R1, localTimer)
}

// place leaves the address of one of the CPU's places in R0: R1 plus an offset.
func (w *stopwatch) place(index asm.Instruction, offset int32) asm.Instructions {
	return asm.Instructions{
		index,
		asm.Add.Imm(asm.R1, offset),
		asm.StoreMem(asm.RFP, -4, asm.R1, asm.Word),
		asm.LoadMapPtr(asm.R1, w.m.FD()),
		asm.Mov.Reg(asm.R2, asm.RFP),
		asm.Add.Imm(asm.R2, -4),
		asm.FnMapLookupElem.Call(),
		asm.JEq.Imm(asm.R0, 0, "out"),
	}
}

// add adds R7 to what R0 points to.
var add = asm.Instructions{
	asm.LoadMem(asm.R1, asm.R0, 0, asm.DWord),
	asm.Add.Reg(asm.R1, asm.R7),
	asm.StoreMem(asm.R0, 0, asm.R1, asm.DWord),
}

func (w *stopwatch) begin(vector asm.Instruction) []asm.Instructions {
	return []asm.Instructions{w.place(vector, 0), {asm.StoreMem(asm.R0, began, asm.R7, asm.DWord)}}
}

func (w *stopwatch) end(vector asm.Instruction) []asm.Instructions {
	parts := []asm.Instructions{
		w.place(vector, 0), {
			asm.LoadMem(asm.R1, asm.R0, began, asm.DWord),
			asm.JEq.Imm(asm.R1, 0, "out"), // it began before we were attached
			asm.Sub.Reg(asm.R7, asm.R1),
		}, add,
	}
	if !w.tells {
		return parts
	}
	return append(parts, []asm.Instructions{
		{vector, asm.JNE.Imm(asm.R1, netRx, "out")},
		w.place(asm.Mov.Imm(asm.R1, inRun), 0), {
			asm.LoadMem(asm.R8, asm.R0, 0, asm.DWord),
			asm.And.Imm(asm.R8, 3),
			asm.Mov.Imm(asm.R1, 0),
			asm.StoreMem(asm.R0, 0, asm.R1, asm.DWord),
		},
		w.place(asm.Mov.Reg(asm.R1, asm.R8), byWhom), add,
	}...)
}

// tell notes in inRun whose packets come.
func (w *stopwatch) tell() {
	w.t.Helper()
	read := func(to, size int32, from asm.Register) asm.Instructions {
		return asm.Instructions{
			asm.Mov.Reg(asm.R3, from),
			asm.Mov.Reg(asm.R1, asm.RFP),
			asm.Add.Imm(asm.R1, to),
			asm.Mov.Imm(asm.R2, size),
			asm.FnProbeReadKernel.Call(),
			asm.JNE.Imm(asm.R0, 0, "out"),
		}
	}
	w.attach("netif_receive_skb", []asm.Instructions{
		{asm.LoadMem(asm.R6, asm.R6, 0, asm.DWord), asm.Add.Imm(asm.R6, dataOfSkb(w.t))},
		read(-16, 8, asm.R6),
		{asm.LoadMem(asm.R6, asm.RFP, -16, asm.DWord), asm.Add.Imm(asm.R6, 12)}, // iphdr.saddr, daddr
		read(-16, 8, asm.R6),
		{
			asm.FnGetSmpProcessorId.Call(),
			asm.JEq.Imm(asm.R0, 0, "out"),
			asm.LoadMem(asm.R1, asm.RFP, -16, asm.Byte),
			asm.JNE.Imm(asm.R1, 10, "out"),
			asm.LoadMem(asm.R8, asm.RFP, -13, asm.Byte),
			asm.Sub.Imm(asm.R8, 1), // 2 and 3 are bits 1 and 2
			asm.JEq.Imm(asm.R8, 1, "tag"),
			asm.JEq.Imm(asm.R8, 2, "tag"),
			asm.LoadMem(asm.R8, asm.RFP, -9, asm.Byte),
			asm.Sub.Imm(asm.R8, 1),
			asm.JEq.Imm(asm.R8, 1, "tag"),
			asm.JNE.Imm(asm.R8, 2, "out"),
		},
		w.place(asm.Mov.Imm(asm.R1, inRun).WithSymbol("tag"), 0), {
			asm.LoadMem(asm.R1, asm.R0, 0, asm.DWord),
			asm.Or.Reg(asm.R1, asm.R8),
			asm.StoreMem(asm.R0, 0, asm.R1, asm.DWord),
		},
	})
}

// dataOfSkb is where an sk_buff says where its data begin.
func dataOfSkb(t testing.TB) int32 {
	t.Helper()
	kernel, err := btf.LoadKernelSpec()
	must(t, err)
	var skb *btf.Struct
	must(t, kernel.TypeByName("sk_buff", &skb))
	for _, m := range skb.Members {
		if m.Name == "data" {
			return int32(m.Offset.Bytes())
		}
	}
	t.Fatal("an sk_buff has no data")
	return 0
}

// attach puts a program at a tracepoint, until the test ends. It begins with its
// context in R6 and the time in R7.
func (w *stopwatch) attach(name string, parts []asm.Instructions) {
	w.t.Helper()
	code := asm.Instructions{asm.Mov.Reg(asm.R6, asm.R1), asm.FnKtimeGetNs.Call(), asm.Mov.Reg(asm.R7, asm.R0)}
	for _, part := range parts {
		code = append(code, part...)
	}
	code = append(code, asm.Mov.Imm(asm.R0, 0).WithSymbol("out"), asm.Return())
	p, err := ebpf.NewProgram(&ebpf.ProgramSpec{Type: ebpf.RawTracepoint, Instructions: code, License: "Dual BSD/GPL"})
	must(w.t, err)
	k, err := link.AttachRawTracepoint(link.RawTracepointOptions{Name: name, Program: p})
	must(w.t, err)
	must(w.t, p.Close())
	w.t.Cleanup(func() { k.Close() })
}

// elapsed is what a stopwatch has since its start, on all CPUs.
type elapsed [places]time.Duration

func (w *stopwatch) read() (sum elapsed) {
	w.t.Helper()
	for i := range sum {
		var cpus []stint
		must(w.t, w.m.Lookup(uint32(i), &cpus))
		for _, c := range cpus {
			sum[i] += time.Duration(c.Sum)
		}
	}
	return sum
}

// since adds up what some of its places have had since an earlier reading.
func (e elapsed) since(was elapsed, of ...int) (sum time.Duration) {
	for _, i := range of {
		sum += e[i] - was[i]
	}
	return sum
}

// Of what is sampled a container with thousands of packets is known within 5 %
// after some seconds only (README.md, "What is exact, and what is not").
const untilKnown = 12 * time.Second

// beside measures for so long by the meter, and has another look at the same time.
func beside[T any](l *lab, length time.Duration, look func() T) (d delta, was, now T) {
	l.t.Helper()
	before, err := l.m.Read()
	must(l.t, err)
	was = look()
	time.Sleep(length)
	now = look()
	after, err := l.m.Read()
	must(l.t, err)
	return l.between(before, after), was, now
}
