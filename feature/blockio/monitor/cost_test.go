package monitor

import (
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/kernel/bpf"
)

// BenchmarkCost measures what part of its IOPS a load of 16 reads at once keeps, at the disk of
// TMPDIR, while its I/O is counted, and while details are measured. The machine drifts: windows
// are short, alternate, and each is compared with that without the programs in the same round.
// Medians of some hundred rounds (-benchtime 300x) are exact to half a percent.
func BenchmarkCost(b *testing.B) {
	testkit.NeedRoot(b)
	path := filepath.Join(b.TempDir(), "scratch")
	data := make([]byte, 256<<20)
	for i := range data {
		data[i] = byte(i*7 + i>>8) // not zeros, which some disks do not store
	}
	must(b, os.WriteFile(path, data, 0o600))
	unix.Sync()
	n := newTenant(b, true)
	board := n.run(b, n.CG, -1, "disk", "--to", path, "--size", "4096", "--conns", "16")
	m, err := Open([]Group{n.Group})
	must(b, err)
	defer func() { must(b, m.Close()) }()
	counting, err := m.object.Programs(monitorProgFlRqComplete)
	must(b, err)
	defer counting[0].Close()
	arms := []string{"off", "counted", "detailed"}
	var rates [3][]float64
	var attach, detach time.Duration
	for i := range b.N {
		var of [3]float64
		for k := range arms {
			arm := (i + k) % len(arms)
			must(b, m.links.Close())
			if m.links = nil; arm > 0 {
				m.links, err = bpf.Attach(counting...)
				must(b, err)
			}
			began := time.Now()
			must(b, m.Detail(arm == 2))
			if arm == 2 {
				attach += time.Since(began)
			}
			time.Sleep(10 * time.Millisecond)
			before := board.Read()
			time.Sleep(70 * time.Millisecond)
			of[arm] = board.Read().Since(before).Rate()
			began = time.Now()
			must(b, m.Detail(false))
			if arm == 2 {
				detach += time.Since(began)
			}
		}
		for arm := range of {
			rates[arm] = append(rates[arm], of[arm]/of[0])
		}
	}
	for arm, name := range arms[1:] {
		slices.Sort(rates[arm+1])
		b.ReportMetric(rates[arm+1][b.N/2], name)
	}
	b.ReportMetric(attach.Seconds()*1e3/float64(b.N), "attach-ms")
	b.ReportMetric(detach.Seconds()*1e3/float64(b.N), "detach-ms")
}
