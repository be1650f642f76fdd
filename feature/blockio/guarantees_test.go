package blockio

import (
	"maps"
	"testing"

	"github.com/fairlead-project/fairlead/policy"
)

// TestGuarantees has a disk of known capacity, and one that is not there.
func TestGuarantees(t *testing.T) {
	h := newHost(t)
	h.cfg.Disks = policy.Disks{"data": h.disk(1000).Path, "gone": "/dev/nowhere"}
	if got, want := h.Guarantees(), (map[string]uint64{"data-riops": 450, "data-wiops": 450}); !maps.Equal(got, want) {
		t.Errorf("%v, want %v", got, want)
	}
}
