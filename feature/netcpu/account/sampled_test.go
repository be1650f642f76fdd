package account

import (
	"fmt"
	"math"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/fairlead-project/fairlead/lab/sandbox"
)

// BenchmarkSampled measures the error of sampled accounts, container by container: in windows of a
// second, against a second meter that samples every run of the same traffic. By packets it compares
// their number. By CPU time it compares the container's share of all charges, as each meter's time
// contains the other's programs.
//
//	go test -run - -bench Sampled -benchtime 1x ./feature/netcpu/account
func BenchmarkSampled(b *testing.B) {
	for _, c := range []struct {
		name       string
		big, small int // containers
	}{{"big", 2, 0}, {"small", 1, 20}} {
		b.Run(c.name, func(b *testing.B) { sampledError(b, c.big, c.small) })
	}
}

func sampledError(b *testing.B, big, small int) {
	const windows, bigRate, smallRate = 20, 60_000, 500 // packets per second in all, and each
	f := newFabric(b, newMeter(b))
	exact := *f.lab
	var err error
	exact.m, err = Open(Config{Identity: newIdentity(b), exact: true})
	must(b, err)
	b.Cleanup(func() { must(b, exact.m.Close()) })
	var boxes []*sandbox.Box
	var to []string
	for i := range big + small {
		box := f.add(fmt.Sprint("box", i), 2+i)
		exact.watch(box, f.device(f.host, fmt.Sprint("h", 2+i), true), f.device(box, "eth0", false))
		f.load(box, 1, "udp-recv", "--listen", ":9000")
		boxes, to = append(boxes, box), append(to, fmt.Sprintf("10.66.0.%d:9000", 2+i))
	}
	f.load(f.wire, 1, "udp-send", "--size", "64", "--rate", fmt.Sprint(bigRate), "--to", strings.Join(to[:big], ","))
	if small > 0 {
		f.load(f.wire, 1, "udp-send", "--size", "64", "--rate", fmt.Sprint(smallRate*small), "--to", strings.Join(to[big:], ","))
	}
	if share := f.awaitSampled(0, 0.9); share < 0.9 {
		b.Fatalf("CPU 0 is sampled %.2f of the time", share)
	}
	type errors struct{ cpu, packets, count []float64 }
	of := map[string]*errors{"big": {}, "small": {}}
	for range windows {
		read := func() (s, e Reading) {
			s, err := f.m.Read()
			must(b, err)
			e, err = exact.m.Read()
			must(b, err)
			return s, e
		}
		s0, e0 := read()
		time.Sleep(time.Second)
		s1, e1 := read()
		s, e := f.between(s0, s1), exact.between(e0, e1)
		for i, box := range boxes {
			to := of["big"]
			if i >= big {
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
			if len(all) > 0 {
				slices.Sort(all)
				b.ReportMetric(100*all[len(all)/2], name+"-"+what+"-p50-%")
				b.ReportMetric(100*all[len(all)*95/100], name+"-"+what+"-p95-%")
			}
		}
		if n := len(x.count); n > 0 {
			slices.Sort(x.count)
			b.ReportMetric(x.count[n/2], name+"-packets/s")
		}
	}
	b.ReportMetric(0, "ns/op")
}

// sampled returns the part of a while in which a CPU skips some of its runs.
func (l *lab) sampled(cpu int) float64 {
	l.t.Helper()
	const looks = 50
	n := 0
	for range looks {
		time.Sleep(10 * time.Millisecond)
		if l.states()[cpu].Weight > 1 {
			n++
		}
	}
	return float64(n) / looks
}

// awaitSampled returns sampled once it reaches share, or after 90 s.
func (l *lab) awaitSampled(cpu int, share float64) float64 {
	l.t.Helper()
	end := time.Now().Add(90 * time.Second)
	for {
		if got := l.sampled(cpu); got >= share || time.Now().After(end) {
			return got
		}
	}
}
