package account

import (
	"fmt"
	"testing"
	"time"

	"github.com/fairlead-project/fairlead/kernel/netdev"
	"github.com/fairlead-project/fairlead/lab/rig"
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
					cfg.Count = func(netns uint64) (map[int]netdev.Counters, error) {
						if f == nil {
							return nil, nil
						}
						ns := f.Open(f.host)
						return ns.AllCounters(100)
					}
					if how != "windows" {
						cfg.Count = nil
					}
					m, err := Open(cfg)
					must(b, err)
					b.Cleanup(func() { must(b, m.Close()) })
					if m.windows != nil {
						m.windows.robbers.most = 100
					}
					f = newFabric(b, m)
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
						b.ReportMetric(m.windows.full.ns/m.windows.full.packets, "ns-full")
						b.ReportMetric(m.windows.bare.ns/m.windows.bare.packets, "ns-bare")
						b.ReportMetric(float64(m.windows.length)/1e6, "ms-window")
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
