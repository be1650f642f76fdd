package account

import (
	"fmt"
	"os"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"

	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/lab/sandbox"
)

// BenchmarkClock measures one read of the clock in a BPF program: most of the cost of a sampled
// event.
func BenchmarkClock(b *testing.B) {
	testkit.NeedRoot(b)
	const looks, runs = 64, 100_000
	took := func(looks int) time.Duration {
		var code asm.Instructions
		for range looks {
			code = append(code, asm.FnKtimeGetNs.Call())
		}
		p, err := ebpf.NewProgram(&ebpf.ProgramSpec{
			Type: ebpf.SocketFilter, License: "Dual BSD/GPL", Instructions: append(code, asm.Mov.Imm(asm.R0, 0), asm.Return()),
		})
		must(b, err)
		defer p.Close()
		_, each, err := p.Benchmark(make([]byte, 64), runs, nil)
		must(b, err)
		return each
	}
	b.ReportMetric(float64(took(looks)-took(0))/looks, "ns/look")
	b.ReportMetric(0, "ns/op")
}

// BenchmarkStolen compares the time charged with a container as the victim with the time that its
// work lost. The task only computes, and completes a fixed number of units per CPU time. On a
// machine that does anything else the result means nothing.
func BenchmarkStolen(t *testing.B) {
	l := newLab(t, newMeter(t))
	wire, box, victim := l.bare("wire"), l.box("box"), l.box("victim")
	l.wire(sandbox.End{Box: wire, Name: "h0", Addr: prefix("10.66.0.1/24")},
		sandbox.End{Box: box, Name: "eth0", Addr: prefix("10.66.0.2/24")}, "1")
	l.watch(box, l.device(wire, "h0", true), l.device(box, "eth0", false))
	l.watch(victim)
	l.load(box, 1, "udp-recv", "--listen", ":9000")
	board, p := l.Load(victim, []int{0}, "burn")
	sender := l.load(wire, 1, "udp-send", "--to", "10.66.0.2:9000", "--rate", "0")

	// CPU time per unit of work, alone and with packets in between.
	var alone, loaded, stolen time.Duration
	var aloneUnits, loadedUnits uint64
	for range 4 {
		for _, rate := range []uint64{0, 60000} {
			sender.SetRate(rate)
			time.Sleep(50 * time.Millisecond)
			r0, err := l.m.Read()
			must(t, err)
			cpu0, units0 := ran(t, p.PID), board.Read()
			time.Sleep(400 * time.Millisecond)
			cpu, units := ran(t, p.PID)-cpu0, board.Read().Since(units0).Ops
			r1, err := l.m.Read()
			must(t, err)
			if rate == 0 {
				alone, aloneUnits = alone+cpu, aloneUnits+units
				continue
			}
			loaded, loadedUnits = loaded+cpu, loadedUnits+units
			d := l.between(r0, r1)
			stolen += d.stolen(victim, box)
		}
	}
	if aloneUnits == 0 || loadedUnits == 0 {
		t.Fatal("the victim did nothing")
	}
	lost := loaded - time.Duration(float64(alone)/float64(aloneUnits)*float64(loadedUnits))
	t.ReportMetric(float64(lost)/float64(loaded), "lost-by-its-work")
	t.ReportMetric(float64(stolen)/float64(loaded), "lost-by-the-account")
	t.ReportMetric(0, "ns/op")
}

// ran returns the CPU time of a process's busiest thread.
func ran(t testing.TB, pid int) time.Duration {
	t.Helper()
	tasks, err := os.ReadDir(fmt.Sprintf("/proc/%d/task", pid))
	must(t, err)
	var most time.Duration
	for _, task := range tasks {
		data, err := os.ReadFile(fmt.Sprintf("/proc/%d/task/%s/schedstat", pid, task.Name()))
		must(t, err)
		var ns time.Duration
		fmt.Sscan(string(data), (*int64)(&ns))
		most = max(most, ns)
	}
	return most
}
