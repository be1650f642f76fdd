package blockio

import (
	"errors"
	"fmt"

	"github.com/fairlead-project/fairlead/kernel/block"
	"github.com/fairlead-project/fairlead/policy"
)

// Guarantees implements feature.Guarantor: reads and writes per second of the disks that the
// operator named, if their capacity is known. Reads and writes share that, and whoever counts them
// counts each by itself: so reads are offered one half of what can be reserved, and writes the
// other.
func (f *BlockIO) Guarantees() (map[string]uint64, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	all := make(map[string]uint64)
	var errs []error
	for name, device := range f.cfg.Disks {
		d, err := block.Open(f.cfg.Roots.Sys, device)
		if err != nil {
			errs = append(errs, fmt.Errorf("disk %s: %w", name, err)) // it has vanished, or has not come yet
			continue
		}
		half, known := f.capacity(d).Halves()
		if !known {
			errs = append(errs, fmt.Errorf("disk %s: its capacity is not known", name))
			continue
		}
		reads, writes := policy.DiskResources(name)
		all[reads], all[writes] = half.ReadIOPS, half.WriteIOPS
	}
	return all, errors.Join(errs...)
}
