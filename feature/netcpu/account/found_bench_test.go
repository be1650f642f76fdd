package account

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"
)

// BenchmarkTheftFound measures how long a theft lasts until the programs stay attached, while
// windows are as rare as they get: packets begin to come for a container beside another that
// computes.
//
//	go test -run - -bench TheftFound -benchtime 1x ./feature/netcpu/account
func BenchmarkTheftFound(b *testing.B) {
	for _, c := range []struct {
		name string
		rate uint64
	}{{"packets", 20_000}, {"few packets", 4_000}} {
		b.Run(c.name, func(b *testing.B) {
			const rounds = 5
			m, f := byHandCounting(b)
			robber := f.add("robber", 2)
			f.rps(robber, "eth0", "1")
			f.load(robber, 1, "udp-recv", "--listen", ":9000")
			usual := f.add("usual", 3)
			f.load(usual, 1, "udp-recv", "--listen", ":9000")
			f.load(f.host, 1, "udp-send", "--to", "10.66.0.3:9000", "--rate", "2000", "--size", "64")
			v := f.box("victim")
			f.watch(v)
			f.Load(v, []int{0}, "burn")
			sender := f.load(f.host, 1, "udp-send", "--to", "10.66.0.2:9000", "--rate", fmt.Sprint(c.rate), "--size", "64")
			steal := func(on bool) {
				if on {
					sender.SetRate(c.rate)
				} else {
					sender.SetRate(0)
				}
			}
			steal(false)
			m.begin(b)
			now := func() phase {
				m.mu.Lock()
				defer m.mu.Unlock()
				return m.windows.phase
			}
			var found []float64
			for range rounds {
				for since := time.Now(); now() != idle; {
					if time.Since(since) > 20*time.Second {
						b.Fatal("something else is robbed all the time")
					}
					time.Sleep(5 * time.Millisecond)
				}
				time.Sleep(2 * time.Second) // until windows show what is usual
				m.mu.Lock()
				m.windows.pause, m.windows.due, m.windows.changed = lastPause, time.Now().Add(lastPause), nil
				m.mu.Unlock()
				time.Sleep(time.Duration(rand.Int64N(int64(tick))))
				began := time.Now()
				steal(true)
				for now() != metered {
					if time.Since(began) > time.Minute {
						b.Fatal("not found in a minute")
					}
					time.Sleep(5 * time.Millisecond)
				}
				found = append(found, time.Since(began).Seconds())
				steal(false)
			}
			slices.Sort(found)
			b.ReportMetric(found[0], "s-least")
			b.ReportMetric(found[rounds/2], "s")
			b.ReportMetric(found[rounds-1], "s-most")
			b.ReportMetric(0, "ns/op")
		})
	}
}
