package account

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"

	"github.com/fairlead-project/fairlead/kernel/bpf"
	"github.com/fairlead-project/fairlead/kernel/netdev"
	"github.com/fairlead-project/fairlead/lab/load"
	"github.com/fairlead-project/fairlead/lab/sandbox"
)

// BenchmarkLadder measures the price of the accounts part by part, from outside: at a fixed rate
// the CPU time that a task on the CPU of the softirqs loses for each packet, and in a flood the
// time for each packet that the receiver gets. Each rung has its hooks and those of the rungs before
// it. The rungs take turns, each beside nothing; a figure is the median of the differences, with quartiles.
//
//	go test -run - -bench Ladder -benchtime 1x ./feature/netcpu/account
func BenchmarkLadder(b *testing.B) {
	for _, path := range []string{"hop", "nic", "tunnel"} {
		for _, rate := range []uint64{2_000, 20_000, load.Flood} {
			name := fmt.Sprint(rate)
			if rate == load.Flood {
				name = "flood"
			}
			b.Run(path+"/"+name, func(b *testing.B) { climb(b, path, rate, 9, rungs) })
		}
	}
}

// BenchmarkWindowsPrice is the last rung alone, in more rounds: many times as many windows as the
// agent opens, so that their price can be told from noise.
//
//	go test -run - -bench WindowsPrice -benchtime 1x ./feature/netcpu/account
func BenchmarkWindowsPrice(b *testing.B) {
	for _, path := range []string{"hop", "nic", "tunnel"} {
		b.Run(path, func(b *testing.B) {
			climb(b, path, 20_000, 11, func(m *Meter) []rung {
				all := rungs(m)
				return []rung{all[0], all[len(all)-1]}
			})
		})
	}
}

// measured is how long a measurement takes.
const measured = 400 * time.Millisecond

// rung is what is attached in one step. attach returns what detaches it.
type rung struct {
	name   string
	attach func(*testing.B) func()
}

func climb(b *testing.B, path string, rate uint64, rounds int, of func(*Meter) []rung) {
	m, f := byHandCounting(b)
	must(b, m.turn(idle))
	f.polls()
	var box *sandbox.Box
	from, to := f.wire, "10.66.0.2:9000"
	if path == "tunnel" {
		box, to = f.inOverlay(f.overlay(), "box", 2), "10.67.0.2:9000"
	} else if box = f.add("box", 2); path == "hop" {
		f.rps(box, "eth0", "1")
		from = f.host
	}
	flood := rate == load.Flood
	receives := 1
	if flood {
		receives = 0
	}
	received := f.load(box, receives, "udp-recv", "--listen", ":9000", "--buffer", "4194304")
	work := received
	if !flood {
		work = f.load(f.host, 0, "burn")
	}
	sender := f.load(from, 1, "udp-send", "--to", to, "--rate", "0", "--size", "64", "--buffer", "67108864")
	window := func() (units, packets float64) {
		time.Sleep(50 * time.Millisecond)
		w, r := work.Read(), received.Read()
		time.Sleep(measured)
		return work.Read().Since(w).Rate(), received.Read().Since(r).Rate()
	}
	sender.SetRate(0)
	alone, _ := window()
	sender.SetRate(rate)
	// costs returns the time of a packet, up to a constant.
	costs := func() float64 {
		units, packets := window()
		if flood {
			return 1e9 / packets
		}
		return -units / alone * 1e9 / packets
	}
	all := of(m)
	above := make([][]float64, len(all))
	for range rounds {
		for i, r := range all {
			base := costs()
			detach := r.attach(b)
			above[i] = append(above[i], costs()-base)
			detach()
		}
	}
	for i, r := range all {
		slices.Sort(above[i])
		for _, q := range []struct {
			name string
			at   int
		}{{"", rounds / 2}, {"-q1", rounds / 4}, {"-q3", rounds - 1 - rounds/4}} {
			b.ReportMetric(above[i][q.at], r.name+q.name)
		}
	}
	b.ReportMetric(0, "ns/op")
}

// byHandCounting returns a meter whose windows the caller opens, with the kernel's counters, on a
// fabric of its own.
func byHandCounting(b *testing.B) (*Meter, *fabric) {
	b.Helper()
	cfg := config(b)
	cfg.byHand = true
	var f *fabric
	cfg.Count = counting(b, func() *netdev.NS { return f.Open(f.host) })
	m, err := Open(cfg)
	must(b, err)
	b.Cleanup(func() { must(b, m.Close()) })
	f = newFabric(b, m)
	return m, f
}

// counting reads the counters of one namespace as the agent reads the host's.
func counting(t testing.TB, of func() *netdev.NS) func(uint64) (map[int]netdev.Counters, error) {
	var c *netdev.Counting
	return func(uint64) (_ map[int]netdev.Counters, err error) {
		if c == nil {
			if c, err = of().Counting(); err != nil {
				return nil, err
			}
			t.Cleanup(c.Close)
		}
		return c.Read(netdev.MostLinks)
	}
}

// rungs returns the steps from empty programs to the whole Meter, and to windows.
func rungs(m *Meter) []rung {
	attach := func(b *testing.B, programs ...*ebpf.Program) func() {
		links, err := bpf.Attach(programs...)
		must(b, err)
		return func() { must(b, links.Close()) }
	}
	vars := func(b *testing.B, bare uint8) {
		must(b, m.vars.Bare.Set(bare))
		must(b, m.vars.Over.Set(uint8(0)))
		must(b, m.vars.Window.Set(uint8(0)))
	}
	of := func(name string, bare uint8, programs ...*ebpf.Program) rung {
		return rung{name, func(b *testing.B) func() {
			vars(b, bare)
			return attach(b, programs...)
		}}
	}
	p := m.programs
	steps := []rung{
		{"0nothing", func(*testing.B) func() { return func() {} }}, // what chance makes of it
		hollow("1empty"), hollow("2clock", asm.FnKtimeGetNs.Call()),
		of("3bare", 1, p[exits], p[enters]),
		of("4runs", 0, p[exits], p[enters]),
		of("5receive", 0, p[exits], p[2], p[enters]),
		of("6polls", 0, p[exits], p[1], p[2], p[enters]),
		of("7xmit", 0, p[:5]...),
		of("8interrupts", 0, p...),
		{"9stamps", func(b *testing.B) func() {
			must(b, m.Demand(true))
			return func() {
				must(b, m.Demand(false))
				must(b, m.turn(idle))
			}
		}},
		{"windows", func(b *testing.B) func() {
			// One in each measurement. The agent opens one in lastPause.
			stop, done := make(chan struct{}), make(chan struct{})
			go func() {
				defer close(done)
				for {
					for _, p := range []struct {
						to    phase
						lasts time.Duration
					}{{full, shortest}, {bare, bareLonger * shortest}, {idle, measured - (1+bareLonger)*shortest}} {
						must(b, m.turn(p.to))
						select {
						case <-stop:
							return
						case <-time.After(p.lasts):
						}
					}
				}
			}()
			return func() {
				close(stop)
				<-done
				must(b, m.turn(idle))
			}
		}},
	}
	return steps
}

// hollow is programs that only call, at the hooks of all that a window attaches.
func hollow(name string, calls ...asm.Instruction) rung {
	return rung{name, func(b *testing.B) func() {
		spec, err := loadAccount()
		must(b, err)
		var links bpf.Links
		for _, p := range []string{accountProgFlExit, accountProgFlPolled, accountProgFlReceive, accountProgFlXmit, accountProgFlEnter} {
			s := spec.Programs[p]
			s.Instructions = append(slices.Clone(calls), asm.Mov.Imm(asm.R0, 0), asm.Return())
			program, err := ebpf.NewProgram(s)
			must(b, err)
			l, err := bpf.Attach(program)
			must(b, err)
			must(b, program.Close())
			links = append(links, l...)
		}
		return func() { must(b, links.Close()) }
	}}
}
