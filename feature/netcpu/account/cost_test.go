package account

import (
	"fmt"
	"os"
	"slices"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"

	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/lab/rig"
	"github.com/fairlead-project/fairlead/lab/sandbox"
	"github.com/fairlead-project/fairlead/tenant/identity"
)

// BenchmarkCost measures the cost of accounting: ns per event by the kernel's own statistics (which
// cost a part of it themselves), their sum per packet, and the loss of a flood's throughput, with
// accounting off and on in turns.
//
//	go test -run - -bench Cost -benchtime 1x -count 3 ./feature/netcpu/account
func BenchmarkCost(b *testing.B) {
	for _, rate := range []string{"flood", "20000"} {
		for _, path := range []string{"hop", "bridge"} {
			b.Run(path+"/"+rate, func(b *testing.B) { cost(b, path, rate) })
		}
	}
}

func cost(b *testing.B, path, rate string) {
	f := newFabric(b, newMeter(b))
	f.polls()
	box := f.add("box", 2)
	to, from := "10.66.0.2:9000", f.wire
	if path == "hop" {
		f.rps(box, "eth0", "1")
		from = f.host
	}
	received := f.load(box, 0, "udp-recv", "--listen", ":9000", "--buffer", "4194304")
	// The load is the same with and without accounting: a flood does not wait for room.
	f.load(from, 1, "udp-send", "--to", to, "--rate", rate, "--size", "64", "--buffer", "67108864")

	var d delta
	runs, err := rig.CountRuns(programs(b, f.m), func() error {
		d = f.during(time.Second)
		return nil
	})
	must(b, err)
	packets := float64(d.of(box).Receive[UDP].Packets)
	for name, r := range runs.By {
		if r.Count > 1000 {
			b.ReportMetric(float64(r.Time)/float64(r.Count), "ns/"+name)
		}
	}
	b.ReportMetric(float64(runs.Time())/packets, "ns/packet")
	b.ReportMetric(float64(runs.Net())/packets, "net-ns/packet") // without the statistics' own
	b.ReportMetric(float64(runs.Idle), "ns/idle")
	b.ReportMetric(float64(runs.Count())/packets, "events/packet")
	b.ReportMetric(float64(d.of(box).CPU())/packets, "charged-ns/packet")

	// Without the statistics, off and on in turns.
	rates := map[bool]float64{}
	const rounds = 4
	for i := range 2 * rounds {
		on := i%2 == 1
		if on {
			f.m, err = Open(config(b))
			must(b, err)
			f.watch(box, f.device(f.host, "h2", true), f.device(box, "eth0", false))
		} else {
			must(b, f.m.Close())
		}
		time.Sleep(100 * time.Millisecond)
		start := received.Read()
		time.Sleep(500 * time.Millisecond)
		rates[on] += received.Read().Since(start).Rate() / rounds
	}
	b.ReportMetric(rates[false], "packets/s-off")
	b.ReportMetric(rates[true], "packets/s-on")
	must(b, f.m.Close())
	b.ReportMetric(0, "ns/op")
}

// BenchmarkLone measures the cost of accounting where each packet has a softirq of its own, without
// the kernel's statistics: how much slower a task beside it computes, with accounting off and on in
// turns.
func BenchmarkLone(b *testing.B) {
	for _, rate := range []uint64{5000, 20000, 50000} {
		b.Run(fmt.Sprint(rate), func(b *testing.B) { lone(b, rate) })
	}
}

func lone(b *testing.B, rate uint64) {
	l := newLab(b, newMeter(b))
	wire, box := l.bare("wire"), l.box("box")
	l.wire(sandbox.End{Box: wire, Name: "h0", Addr: prefix("10.66.0.1/24")},
		sandbox.End{Box: box, Name: "eth0", Addr: prefix("10.66.0.2/24")}, "1")
	devices := []identity.Device{l.device(wire, "h0", true), l.device(box, "eth0", false)}
	l.watch(box, devices...)
	received := l.load(box, 1, "udp-recv", "--listen", ":9000")
	work := l.load(wire, 0, "burn")
	sender := l.load(wire, 1, "udp-send", "--to", "10.66.0.2:9000", "--size", "64", "--rate", "0")
	window := func() (units, packets float64) {
		time.Sleep(50 * time.Millisecond)
		w, r := work.Read(), received.Read()
		time.Sleep(500 * time.Millisecond)
		return work.Read().Since(w).Rate(), received.Read().Since(r).Rate()
	}
	sender.SetRate(0)
	alone, _ := window()
	sender.SetRate(rate)
	const rounds = 16
	var costs []float64
	for range rounds {
		on, packets := window()
		must(b, l.m.Close())
		off, _ := window()
		var err error
		l.m, err = Open(Config{Identity: newIdentity(b)})
		must(b, err)
		l.watch(box, devices...)
		costs = append(costs, (off-on)/alone*1e9/packets)
	}
	slices.Sort(costs)
	b.ReportMetric(costs[rounds/2], "ns/packet")
	b.ReportMetric(costs[0], "least-ns/packet")
	b.ReportMetric(costs[rounds-1], "most-ns/packet")
	must(b, l.m.Close())
	b.ReportMetric(0, "ns/op")
}

// programs returns the Meter's programs.
func programs(b *testing.B, m *Meter) rig.ProgramSet {
	b.Helper()
	of := make(rig.ProgramSet)
	for _, l := range m.links {
		info, err := l.Info()
		must(b, err)
		of[info.Program] = true
	}
	for id := ebpf.ProgramID(0); ; {
		var err error
		if id, err = ebpf.ProgramGetNextID(id); err != nil {
			return of // there are no more
		}
		p, err := ebpf.NewProgramFromID(id)
		if err != nil {
			continue // it has gone
		}
		if info, err := p.Info(); err == nil && info.Name == accountProgFlStamp {
			of[id] = true
		}
		must(b, p.Close())
	}
}

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
