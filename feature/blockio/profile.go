package blockio

import (
	"errors"
	"fmt"
	"time"
)

// profiled returns the budget that reservations need together, by the profiles of their disks.
func (f *BlockIO) profiled(reserved []reservation) (sum time.Duration, err error) {
	if len(reserved) == 0 {
		return 0, errors.New("auto: the container has reserved nothing (io.reserve)")
	}
	for _, r := range reserved {
		p := f.capacity(r.disk).Realtime
		if len(p) == 0 {
			return 0, fmt.Errorf("auto: %[1]s has no profile: measure it with `fairlead io calibrate %[1]s --scratch DIR --realtime`", r.device)
		}
		budget, err := p.Needs(r.figures)
		if err != nil {
			return 0, fmt.Errorf("auto: %s: %w", r.device, err)
		}
		sum += budget
	}
	return max(sum, time.Millisecond), nil
}

// reprofile updates the budgets of containers with io.realtime: auto after a new profile. A
// container that cannot have the new one keeps its budget until the next Apply, which reports why.
func (f *BlockIO) reprofile() error {
	var errs []error
	for _, m := range f.managed {
		if m.budget > 0 && m.target.Settings.RealtimeAuto {
			errs = append(errs, f.grant(m))
		}
	}
	errs = append(errs, f.realtime())
	f.promote()
	return errors.Join(errs...)
}
