package netcpu

import (
	"math"
	"testing"

	"github.com/fairlead-project/fairlead/kernel/netdev"
)

func openNS(t *testing.T, path string) *netdev.NS {
	t.Helper()
	ns, err := netdev.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { ns.Close() })
	return ns
}

// Beside one busy neighbour of the usual weight, the share of the CPU that the
// weight gives is the quota, or less.
func TestSharesFor(t *testing.T) {
	for cpus := 0.001; cpus < 4; cpus += 0.001 {
		w := sharesFor(cpus)
		if w < minShares || w > usualShares {
			t.Fatalf("sharesFor(%v) = %d, out of bounds", cpus, w)
		}
		share := float64(w) / float64(w+usualShares)
		if want := min(cpus, 0.5); math.Abs(share-want) > 0.002 {
			t.Errorf("sharesFor(%v) = %d: a share of %.4f, want %.4f", cpus, w, share, want)
		}
	}
	if got := sharesFor(0.2); got != 256 {
		t.Errorf("sharesFor(0.2) = %d, want 256 (80 against 20)", got)
	}
}

func TestNoCPUs(t *testing.T) {
	for mask, want := range map[string]string{"3": "0", "00000000,0000ffff": "00000000,00000000", "": ""} {
		if got := noCPUs(mask); got != want {
			t.Errorf("noCPUs(%q) = %q, want %q", mask, got, want)
		}
	}
}
