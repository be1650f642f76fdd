package blockio

import (
	"maps"
	"strings"
	"testing"

	"github.com/fairlead-project/fairlead/policy"
)

// TestGuarantees has a disk of known capacity, and one that is not there.
func TestGuarantees(t *testing.T) {
	h := newHost(t)
	h.cfg.Disks = policy.Disks{"data": h.disk(1000).Path, "gone": "/dev/nowhere"}
	got, err := h.Guarantees()
	if want := (map[string]uint64{"data-riops": 450, "data-wiops": 450}); !maps.Equal(got, want) || err == nil || !strings.Contains(err.Error(), "disk gone: ") {
		t.Errorf("%v, %v; want %v, and why nothing of the other", got, err, want)
	}
}
