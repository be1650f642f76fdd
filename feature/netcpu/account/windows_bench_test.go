package account

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/cilium/ebpf"

	"github.com/fairlead-project/fairlead/kernel/netdev"
	"github.com/fairlead-project/fairlead/lab/rig"
	"github.com/fairlead-project/fairlead/lab/sandbox"
)

// BenchmarkWindows compares the accounts by windows with a stopwatch around all softirqs, and with the packets received.
func BenchmarkWindows(b *testing.B) {
	for _, path := range []string{"hop", "bridge"} {
		for _, rate := range []string{"20000", "flood"} {
			for _, how := range []string{"windows", "continuous"} {
				b.Run(path+"/"+rate+"/"+how, func(b *testing.B) {
					w, read := stopwatch2(b)
					must(b, w.Start())
					cfg := config(b)
					var f *fabric
					cfg.Count = counting(b, func() *netdev.NS { return f.Open(f.host) })
					if how != "windows" {
						cfg.Count = nil
					}
					cfg.byHand = true // until there is a host
					m, err := Open(cfg)
					must(b, err)
					b.Cleanup(func() { must(b, m.Close()) })
					if m.windows != nil {
						m.windows.most = 100
					}
					f = newFabric(b, m)
					m.begin(b)
					f.polls()
					box := f.add("box", 2)
					to, from := "10.66.0.2:9000", f.wire
					if path == "hop" {
						f.rps(box, "eth0", "1")
						from = f.host
					}
					received := f.load(box, 0, "udp-recv", "--listen", ":9000", "--buffer", "4194304")
					f.load(from, 1, "udp-send", "--to", to, "--rate", rate, "--size", "64", "--buffer", "67108864")
					time.Sleep(3 * time.Second)
					r0 := f.read()
					s0, p0 := read(), received.Read()
					time.Sleep(10 * time.Second)
					s1, p1 := read(), received.Read()
					r1 := f.read()
					d := f.between(r0, r1)
					truth := s1.Since(s0, rig.NetRx, rig.NetTx)
					tasklets := s1.Since(s0, rig.Tasklet, rig.Timer, rig.HRTimer)
					total := r1.Softirq + r1.Thread - r0.Softirq - r0.Thread
					b.ReportMetric(total.Seconds()/truth.Seconds(), "total")
					b.ReportMetric(tasklets.Seconds()/truth.Seconds(), "tasklets")
					b.ReportMetric(float64(d.of(box).CPU())/float64(truth), "box")
					b.ReportMetric(float64(d.of(box).Receive[UDP].Packets)/float64(p1.Since(p0).Ops), "packets")
					b.ReportMetric(p1.Since(p0).Rate(), "packets/s")
					if m.windows != nil {
						b.ReportMetric(m.windows.correction(), "correction")
						b.ReportMetric(float64(m.windows.length())/1e6, "ms-window")
					}
					b.ReportMetric(0, "ns/op")
					fmt.Println(m.Err())
				})
			}
		}
	}
}

func stopwatch2(b *testing.B) (w *rig.Stopwatch, read func() rig.Elapsed) {
	w, err := rig.NewStopwatch(rig.StopwatchConfig{})
	must(b, err)
	b.Cleanup(func() { must(b, w.Close()) })
	return w, func() rig.Elapsed {
		e, err := w.Read()
		must(b, err)
		return e
	}
}

// begin lets the windows of a Meter that was opened by hand begin.
func (m *Meter) begin(b *testing.B) {
	if m.windows == nil {
		return
	}
	must(b, m.turn(steady))
	m.windows.done = make(chan struct{})
	go m.sample()
}

// BenchmarkEstimated compares the accounts by windows with those of a second meter, which examines
// every run of the same traffic: over ten seconds, six times, one container with 10,000 packets/s and others
// with 500 each. "attached" is what the comparison itself is off by: the same meter always attached.
// Its programs run after those of the second meter, so its intervals contain the end of theirs.
//
//	go test -run - -bench Estimated -benchtime 1x ./feature/netcpu/account
func BenchmarkEstimated(b *testing.B) {
	for _, how := range []string{"windows", "attached"} {
		b.Run(how, func(b *testing.B) { compared(b, how == "windows") })
	}
}

func compared(b *testing.B, windows bool) {
	const small, rounds = 10, 6
	m, f := byHandCounting(b)
	m.windows.most = 100
	exact := *f.lab
	var err error
	exact.m, err = Open(Config{Identity: newIdentity(b), exact: true})
	must(b, err)
	b.Cleanup(func() { must(b, exact.m.Close()) })
	// Each meter measures by itself what an interrupt takes around its handler, up to twice as much.
	for _, v := range [][2]*ebpf.Variable{{m.vars.Around, exact.m.vars.Around}, {m.vars.AroundCall, exact.m.vars.AroundCall}} {
		var ns, other uint64
		must(b, v[0].Get(&ns))
		must(b, v[1].Get(&other))
		must(b, v[1].Set(ns))
		b.Logf("%d ns around an interrupt, %d by the second meter", ns, other)
	}
	if windows {
		m.begin(b)
	} else {
		m.mu.Lock()
		must(b, m.turn(steady))
		m.mu.Unlock()
	}
	var boxes []*sandbox.Box
	var to []string
	for i := range 1 + small {
		box := f.add(fmt.Sprint("box", i), 2+i)
		exact.watch(box, f.device(f.host, fmt.Sprint("h", 2+i), true), f.device(box, "eth0", false))
		f.load(box, 1, "udp-recv", "--listen", ":9000")
		boxes, to = append(boxes, box), append(to, fmt.Sprintf("10.66.0.%d:9000", 2+i))
	}
	f.load(f.wire, 1, "udp-send", "--size", "64", "--rate", "10000", "--to", to[0])
	f.load(f.wire, 1, "udp-send", "--size", "64", "--rate", fmt.Sprint(500*small), "--to", strings.Join(to[1:], ","))
	var totals, bigs, smalls, rests, shares []float64
	for range rounds {
		was, exactly := f.read(), exact.read()
		time.Sleep(10 * time.Second)
		d, want := f.between(was, f.read()), exact.between(exactly, exact.read())
		totals = append(totals, d.total().Seconds()/want.total().Seconds())
		rest, wantRest := d.total(), want.total()
		for i, box := range boxes {
			got, wanted := d.of(box).CPU(), want.of(box).CPU()
			of := got.Seconds() / wanted.Seconds()
			rest, wantRest = rest-got, wantRest-wanted
			if i == 0 {
				bigs = append(bigs, of)
			} else {
				smalls = append(smalls, of)
			}
		}
		rests = append(rests, rest.Seconds()/wantRest.Seconds())
		shares = append(shares, wantRest.Seconds()/want.total().Seconds())
	}
	for name, all := range map[string][]float64{"total": totals, "big": bigs, "small": smalls, "rest": rests, "rest-share": shares} {
		slices.Sort(all)
		b.ReportMetric(all[0], name+"-least")
		b.ReportMetric(all[len(all)/2], name)
		b.ReportMetric(all[len(all)-1], name+"-most")
	}
	b.ReportMetric(0, "ns/op")
}
