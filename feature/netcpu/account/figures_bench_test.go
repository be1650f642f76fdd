package account

import (
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/fairlead-project/fairlead/kernel/bpf"
	"github.com/fairlead-project/fairlead/kernel/irq"
	"github.com/fairlead-project/fairlead/kernel/netdev"
	"github.com/fairlead-project/fairlead/lab/load"
	"github.com/fairlead-project/fairlead/lab/sandbox"
)

// The benchmarks of this file are where docs/measured.md has its figures of this package from:
//
//	go test -run - -bench NAME -benchtime 1x ./feature/netcpu/account

// byHandCounting returns a meter whose windows the caller opens, with the kernel's counters, on a
// fabric of its own.
func byHandCounting(b *testing.B) (*Meter, *fabric) {
	b.Helper()
	cfg := config(b)
	cfg.byHand = true
	var f *fabric
	var c *netdev.Counting
	cfg.Count = func(uint64) (_ map[int]netdev.Counters, err error) { // as the agent reads the host's
		if c == nil {
			if c, err = f.Open(f.host).Counting(); err != nil {
				return nil, err
			}
			b.Cleanup(c.Close)
		}
		return c.Read(netdev.MostLinks)
	}
	m, err := Open(cfg)
	must(b, err)
	b.Cleanup(func() { must(b, m.Close()) })
	f = newFabric(b, m)
	return m, f
}

// opens lets the windows of a Meter that was opened by hand begin.
func (m *Meter) opens(b *testing.B) {
	must(b, m.turn(steady))
	m.windows.done = make(chan struct{})
	go m.sample()
}

// receivers adds containers that a second meter, which examines every run of the same traffic,
// watches too. One sender has the big ones' packets, and another the small ones', by their rates.
func (f *fabric) receivers(b *testing.B, big, small int, bigRate, smallRate uint64) (exact *lab, boxes []*sandbox.Box) {
	b.Helper()
	second := *f.lab
	second.m = exactMeter(b)
	var to []string
	for i := range big + small {
		box := f.add(fmt.Sprint("box", i), 2+i)
		second.watch(box, f.device(f.host, fmt.Sprint("h", 2+i), true), f.device(box, "eth0", false))
		f.load(box, 1, "udp-recv", "--listen", ":9000")
		boxes, to = append(boxes, box), append(to, fmt.Sprintf("10.66.0.%d:9000", 2+i))
	}
	f.load(f.wire, 1, "udp-send", "--size", "64", "--rate", fmt.Sprint(bigRate), "--to", strings.Join(to[:big], ","))
	if small > 0 {
		f.load(f.wire, 1, "udp-send", "--size", "64", "--rate", fmt.Sprint(smallRate), "--to", strings.Join(to[big:], ","))
	}
	return &second, boxes
}

// report reports a quantile of some figures.
func report(b *testing.B, of []float64, quantile float64, unit string) {
	if len(of) == 0 {
		return
	}
	slices.Sort(of)
	b.ReportMetric(of[min(int(quantile*float64(len(of))), len(of)-1)], unit)
	b.ReportMetric(0, "ns/op")
}

// BenchmarkSampled measures the error of sampled accounts, container by container: in windows of a
// second, against a second meter that samples every run of the same traffic. By packets it compares
// their number. By CPU time it compares the container's share of all charges, as each meter's time
// contains the other's programs.
func BenchmarkSampled(b *testing.B) {
	for _, c := range []struct {
		name       string
		big, small int // containers
	}{{"big", 2, 0}, {"small", 1, 20}} {
		b.Run(c.name, func(b *testing.B) {
			const windows = 20
			f := newFabric(b, newMeter(b))
			exact, boxes := f.receivers(b, c.big, c.small, 60_000, uint64(500*c.small))
			f.await(func() string {
				if w := f.states()[0].Weight; w <= 1 {
					return fmt.Sprintf("CPU 0 has weight %d", w)
				}
				return ""
			})
			type errors struct{ cpu, packets, count []float64 }
			of := map[string]*errors{"big": {}, "small": {}}
			for range windows {
				s0, e0 := f.read(), exact.read()
				time.Sleep(time.Second)
				s, e := f.between(s0, f.read()), exact.between(e0, exact.read())
				for i, box := range boxes {
					to := of["big"]
					if i >= c.big {
						to = of["small"]
					}
					got, want := s.of(box), e.of(box)
					to.cpu = append(to.cpu, math.Abs(got.CPU().Seconds()/s.total().Seconds()/(want.CPU().Seconds()/e.total().Seconds())-1))
					to.packets = append(to.packets, math.Abs(float64(got.Receive[UDP].Packets)/float64(want.Receive[UDP].Packets)-1))
					to.count = append(to.count, float64(want.Receive[UDP].Packets)/e.seconds)
				}
			}
			for name, x := range of {
				for what, all := range map[string][]float64{"cpu": x.cpu, "packets": x.packets} {
					report(b, all, 0.5, name+"-"+what+"-p50")
					report(b, all, 0.95, name+"-"+what+"-p95")
				}
				report(b, x.count, 0.5, name+"-packets/s")
			}
		})
	}
}

// BenchmarkEstimated compares the accounts by windows with those of a second meter, which examines
// every run of the same traffic: over ten seconds, six times, one container with 10,000 packets/s
// and others with 500 each. "attached" is what the comparison itself is off by: the same meter
// always attached. Its programs run after those of the second meter, so its intervals contain the
// end of theirs.
func BenchmarkEstimated(b *testing.B) {
	for _, how := range []string{"windows", "attached"} {
		b.Run(how, func(b *testing.B) {
			const small, rounds = 10, 6
			m, f := byHandCounting(b)
			m.windows.most = 100 // no theft keeps them attached
			exact, boxes := f.receivers(b, 1, small, 10_000, 500*small)
			// Each meter measures by itself what an interrupt takes around its handler, up to twice as
			// much.
			for _, v := range [][2]*ebpf.Variable{{m.vars.Around, exact.m.vars.Around}, {m.vars.AroundCall, exact.m.vars.AroundCall}} {
				var ns uint64
				must(b, v[0].Get(&ns))
				must(b, v[1].Set(ns))
			}
			if how == "windows" {
				m.opens(b)
			} else {
				m.mu.Lock()
				must(b, m.turn(steady))
				m.mu.Unlock()
			}
			of := make(map[string][]float64)
			for range rounds {
				was, exactly := f.read(), exact.read()
				time.Sleep(10 * time.Second)
				d, want := f.between(was, f.read()), exact.between(exactly, exact.read())
				of["total"] = append(of["total"], d.total().Seconds()/want.total().Seconds())
				rest, wantRest := d.total(), want.total()
				for i, box := range boxes {
					got, wanted := d.of(box).CPU(), want.of(box).CPU()
					rest, wantRest = rest-got, wantRest-wanted
					size := "small"
					if i == 0 {
						size = "big"
					}
					of[size] = append(of[size], got.Seconds()/wanted.Seconds())
				}
				of["rest"] = append(of["rest"], rest.Seconds()/wantRest.Seconds())
			}
			for name, all := range of {
				report(b, all, 0, name+"-least")
				report(b, all, 0.5, name)
				report(b, all, 1, name+"-most")
			}
		})
	}
}

// BenchmarkTheftFound measures how long a theft lasts until the programs stay attached, while
// windows are as rare as they get: packets begin to come for a container beside another that
// computes.
func BenchmarkTheftFound(b *testing.B) {
	for _, rate := range []uint64{20_000, 4_000} {
		b.Run(fmt.Sprint(rate), func(b *testing.B) {
			const rounds = 5
			m, f := byHandCounting(b)
			robber, usual := f.add("robber", 2), f.add("usual", 3)
			f.rps(robber, "eth0", "1")
			f.load(robber, 1, "udp-recv", "--listen", ":9000")
			f.load(usual, 1, "udp-recv", "--listen", ":9000")
			f.load(f.host, 1, "udp-send", "--to", "10.66.0.3:9000", "--rate", "2000", "--size", "64")
			f.victim()
			sender := f.load(f.host, 1, "udp-send", "--to", "10.66.0.2:9000", "--rate", "0", "--size", "64")
			m.opens(b)
			until := func(to phase) {
				b.Helper()
				f.await(func() string {
					m.mu.Lock()
					defer m.mu.Unlock()
					if m.windows.phase != to {
						return fmt.Sprintf("phase %d, want %d", m.windows.phase, to)
					}
					return ""
				})
			}
			var found []float64
			for range rounds {
				until(idle)
				time.Sleep(2 * time.Second) // until windows show what is usual
				m.mu.Lock()
				m.windows.pause, m.windows.due, m.windows.changed = lastPause, time.Now().Add(lastPause), nil
				m.mu.Unlock()
				time.Sleep(time.Duration(rand.Int64N(int64(tick))))
				began := time.Now()
				sender.SetRate(rate)
				until(metered)
				found = append(found, time.Since(began).Seconds())
				sender.SetRate(0)
			}
			report(b, found, 0, "s-least")
			report(b, found, 0.5, "s")
			report(b, found, 1, "s-most")
		})
	}
}

// BenchmarkTurn measures what a window takes and its parts, without packets: µs of CPU time of this
// process, and µs that tasks on both CPUs lose. Each part takes turns with nothing, often, so that
// what one takes can be told from noise; a figure is the median of the differences.
func BenchmarkTurn(b *testing.B) {
	m, f := byHandCounting(b)
	f.add("box", 2)
	var burners []*load.Board
	for cpu := range 2 {
		burners = append(burners, f.load(f.host, cpu, "burn", "--nice", "19"))
	}
	time.Sleep(time.Second)
	type part struct {
		name string
		do   func() error
	}
	nothing := part{"nothing", func() error { return nil }}
	attach := func(name string, p ...*ebpf.Program) part {
		return part{name, func() error {
			l, err := bpf.Attach(p...)
			must(b, err)
			return l.Close()
		}}
	}
	const rounds, often = 7, 25
	// run returns the time that the process took, and the work of the burners in a second.
	run := func(p part) (took, work float64) {
		spent := func() time.Duration {
			var r unix.Rusage
			must(b, unix.Getrusage(unix.RUSAGE_SELF, &r))
			return time.Duration(r.Utime.Nano() + r.Stime.Nano())
		}
		var was []load.Reading
		for _, burner := range burners {
			was = append(was, burner.Read())
		}
		began := spent()
		for range often {
			must(b, p.do())
			time.Sleep(5 * time.Millisecond)
		}
		took = float64(spent()-began) / 1e3 / often
		for i, burner := range burners {
			work += burner.Read().Since(was[i]).Rate()
		}
		return took, work
	}
	for _, p := range []part{
		nothing,
		attach("attach-1", m.programs[exits]), attach("attach-5", m.programs[:5]...), attach("attach-all", m.programs...),
		{"counters", func() error { m.count(); return nil }},
		{"softirqs", func() error { _, err := irq.Works("/proc"); return err }},
		{"accounts", func() error { _, err := m.read(true, false); return err }},
		{"window", func() error {
			for _, to := range []phase{bare, full, idle} {
				must(b, m.turn(to))
			}
			return nil
		}},
	} {
		var took, lost []float64
		for range rounds {
			noTime, all := run(nothing)
			began := time.Now()
			n, work := run(p)
			took = append(took, n-noTime)
			lost = append(lost, (1-work/all)*2*float64(time.Since(began))/1e3/often)
		}
		report(b, took, 0.5, p.name+"-us")
		report(b, lost, 0.5, p.name+"-lost-us")
	}
}
