package account

import (
	"slices"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/fairlead-project/fairlead/kernel/bpf"
	"github.com/fairlead-project/fairlead/kernel/irq"
	"github.com/fairlead-project/fairlead/lab/load"
)

// BenchmarkTurn measures what a window takes and its parts, without packets: µs of CPU time of this
// process, and µs that tasks on both CPUs lose. Each part takes turns with nothing, often, so that
// what one takes can be told from noise; a figure is the median of the differences.
//
//	go test -run - -bench Turn -benchtime 1x ./feature/netcpu/account
func BenchmarkTurn(b *testing.B) {
	m, f := byHandCounting(b)
	f.add("box", 2)
	var burners []*load.Board
	for cpu := range 2 {
		burners = append(burners, f.load(f.host, cpu, "burn", "--nice", "19"))
	}
	time.Sleep(time.Second)
	attach := func(p ...*ebpf.Program) func() error {
		return func() error {
			l, err := bpf.Attach(p...)
			must(b, err)
			return l.Close()
		}
	}
	p := m.programs
	type part struct {
		name string
		do   func() error
	}
	parts := []part{
		{"nothing", func() error { return nil }},
		{"attach-1", attach(p[exits])},
		{"attach-5", attach(p[:5]...)},
		{"attach-all", attach(p...)},
		{"counters", func() error { m.count(); return nil }},
		{"softirqs", func() error { _, err := irq.Works("/proc"); return err }},
		{"accounts", func() error { _, err := m.read(true, false); return err }},
		{"window", func() error {
			for _, to := range []phase{bare, full, idle} {
				must(b, m.turn(to))
			}
			return nil
		}},
	}
	const rounds, often = 7, 25
	// run returns the time that the process took, and the work of the burners in a second.
	run := func(p part) (took, work float64) {
		var was []load.Reading
		for _, burner := range burners {
			was = append(was, burner.Read())
		}
		began := spent(b)
		for range often {
			must(b, p.do())
			time.Sleep(5 * time.Millisecond)
		}
		took = float64(spent(b)-began) / 1e3 / often
		for i, burner := range burners {
			work += burner.Read().Since(was[i]).Rate()
		}
		return took, work
	}
	for _, p := range parts {
		var took, lost []float64
		for range rounds {
			noTime, all := run(parts[0])
			began := time.Now()
			n, work := run(p)
			took = append(took, n-noTime)
			lost = append(lost, (1-work/all)*2*float64(time.Since(began))/1e3/often)
		}
		slices.Sort(took)
		slices.Sort(lost)
		b.ReportMetric(took[rounds/2], p.name+"-us")
		b.ReportMetric(lost[rounds/2], p.name+"-lost-us")
	}
	b.ReportMetric(0, "ns/op")
}

// spent returns the CPU time of this process.
func spent(b *testing.B) time.Duration {
	var r unix.Rusage
	must(b, unix.Getrusage(unix.RUSAGE_SELF, &r))
	return time.Duration(r.Utime.Nano() + r.Stime.Nano())
}
