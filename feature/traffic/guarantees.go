package traffic

import (
	"errors"
	"fmt"
	"math"

	"github.com/fairlead-project/fairlead/feature/traffic/model"
	"github.com/fairlead-project/fairlead/policy"
)

const mbit = 1_000_000

// Guarantees implements feature.Guarantor: what rates can be promised at every uplink, in Mbit/s. A
// container may send by any of them, so the slowest counts, and nothing can be promised where the
// rate of one is not known.
func (f *Traffic) Guarantees() (map[string]uint64, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.host == nil {
		return nil, nil
	}
	links, err := f.present()
	if err != nil {
		return nil, fmt.Errorf("list uplinks: %w", err)
	}
	slowest := uint64(math.MaxUint64)
	for _, l := range links {
		rate, _, err := f.rate(l)
		if err == nil && rate == 0 {
			err = errors.New("its rate is not known")
		}
		if err != nil {
			return nil, fmt.Errorf("uplink %s: %w", l.Name, err)
		}
		slowest = min(slowest, rate)
	}
	if slowest == math.MaxUint64 {
		return nil, errors.New("no uplink is up")
	}
	return map[string]uint64{
		policy.ResourceEgress:  model.Admitted(slowest) / mbit,
		policy.ResourceIngress: model.Admitted(slowest/100*received) / mbit,
	}, nil
}
