package drop

import (
	"encoding/binary"
	"slices"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/fairlead-project/fairlead/internal/testkit"
)

// BenchmarkUplink runs the tc program of an uplink on packets that it lets pass, one in a tunnel
// among them: what each packet of the host pays while a container is isolated or charged.
//
//	go test -run - -bench Uplink ./feature/netcpu/drop
func BenchmarkUplink(b *testing.B) {
	e := load(b)
	plain := with(append(frame("192.0.2.1"), make([]byte, 50)...), 14+9, unix.IPPROTO_UDP)
	plain = with(plain, 0, make([]byte, 6)...) // of lo, where it runs: for the host
	tunnel := slices.Concat(plain[:14+20+8], []byte{8, 0, 0, 0, 0, 0, 7, 0}, frame("10.0.0.1"))
	binary.BigEndian.PutUint16(tunnel[14+20+2:], 4789)
	for name, data := range map[string][]byte{"plain": plain, "vxlan": tunnel} {
		b.Run(name, func(b *testing.B) {
			const times = 1_000_000
			var ns int64
			for b.Loop() {
				_, took, err := e.tc.Benchmark(data, times, nil)
				testkit.Must(b, err)
				ns += took.Nanoseconds()
			}
			b.ReportMetric(float64(ns)/float64(b.N), "ns/packet")
			b.ReportMetric(0, "ns/op")
		})
	}
}
