package testkit

import (
	"fmt"
	"os"
	"strconv"
	"strings"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"
)

// networkSoftirqs are the softirqs that handle packets, by their vectors
// (include/linux/interrupt.h) and their names in /proc/softirqs.
var networkSoftirqs = map[uint32]string{2: "NET_TX", 3: "NET_RX", 6: "TASKLET", 8: "HRTIMER"}

// Softirqs compares the softirqs that the kernel runs with the softirqs for which it calls BPF
// programs. The kernel of the reference machine calls none while a thread of that machine's init is
// the current task. No program of ours can count the work of a softirq that interrupts init.
type Softirqs struct {
	t      testing.TB
	seen   *ebpf.Map // vector → calls
	missed uint64    // the most that Missed found
	begin  int64     // softirqs less calls when the watch began
}

// WatchSoftirqs counts until the test ends.
func WatchSoftirqs(t testing.TB) *Softirqs {
	t.Helper()
	seen, err := ebpf.NewMap(&ebpf.MapSpec{Name: "fl_softirqs", Type: ebpf.Array, KeySize: 4, ValueSize: 8, MaxEntries: 16})
	Must(t, err)
	t.Cleanup(func() { seen.Close() })
	p, err := ebpf.NewProgram(&ebpf.ProgramSpec{
		Name: "fl_softirqs", Type: ebpf.Tracing, AttachType: ebpf.AttachTraceRawTp, AttachTo: "softirq_entry", License: "Dual BSD/GPL",
		Instructions: asm.Instructions{
			asm.LoadMem(asm.R1, asm.R1, 0, asm.DWord), // the vector
			asm.StoreMem(asm.RFP, -4, asm.R1, asm.Word),
			asm.Mov.Reg(asm.R2, asm.RFP),
			asm.Add.Imm(asm.R2, -4),
			asm.LoadMapPtr(asm.R1, seen.FD()),
			asm.FnMapLookupElem.Call(),
			asm.JEq.Imm(asm.R0, 0, "end"),
			asm.Mov.Imm(asm.R1, 1),
			asm.StoreXAdd(asm.R0, asm.R1, asm.DWord),
			asm.Mov.Imm(asm.R0, 0).WithSymbol("end"),
			asm.Return(),
		},
	})
	Must(t, err)
	defer p.Close()
	l, err := link.AttachTracing(link.TracingOptions{Program: p, AttachType: ebpf.AttachTraceRawTp})
	Must(t, err)
	t.Cleanup(func() { l.Close() })
	s := &Softirqs{t: t, seen: seen}
	for { // until no softirq comes between two looks
		calls := s.calls()
		s.begin = s.softirqs() - calls
		if s.calls() == calls {
			return s
		}
	}
}

// Missed returns how many network softirqs ran on any CPU, since the watch began, without a call of
// the program. The result may be too low by the softirqs that run during the look, never too high.
func (s *Softirqs) Missed() uint64 {
	softirqs := s.softirqs()
	if missed := softirqs - s.calls() - s.begin; missed > int64(s.missed) {
		s.missed = uint64(missed)
	}
	return s.missed
}

// SkipIfMissed ends the test as skipped if Missed is not 0. A test that counts packets calls it
// once a count has turned out wrong.
func (s *Softirqs) SkipIfMissed() {
	s.t.Helper()
	if n := s.Missed(); n != 0 {
		Skip(s.t, fmt.Sprintf("the kernel called no BPF program for %d network softirqs", n))
	}
}

func (s *Softirqs) calls() (sum int64) {
	s.t.Helper()
	for vector := range networkSoftirqs {
		var n uint64
		Must(s.t, s.seen.Lookup(vector, &n))
		sum += int64(n)
	}
	return sum
}

func (s *Softirqs) softirqs() (sum int64) {
	s.t.Helper()
	b, err := os.ReadFile("/proc/softirqs")
	Must(s.t, err)
	for _, name := range networkSoftirqs {
		_, row, _ := strings.Cut(string(b), name+":")
		row, _, found := strings.Cut(row, "\n")
		if !found {
			Must(s.t, fmt.Errorf("/proc/softirqs: no %s", name))
		}
		for _, field := range strings.Fields(row) {
			n, err := strconv.ParseInt(field, 10, 64)
			Must(s.t, err)
			sum += n
		}
	}
	return sum
}
