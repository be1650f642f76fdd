package blockio

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/fairlead-project/fairlead/api"
)

// maxPoints bounds a profile.
const maxPoints = 64

// Profile is what a disk did for real-time threads of growing budgets, beside busy CPUs
// (MIST, figure 6: IOPS against RT runtime).
type Profile []api.RealtimePoint

// check refuses what makes no sense.
func (p Profile) check() error {
	if len(p) > maxPoints {
		return fmt.Errorf("profile of more than %d budgets", maxPoints)
	}
	for i, x := range p {
		switch {
		case !(x.Budget > 0 && x.Budget <= maxRealtime.Seconds()):
			return fmt.Errorf("profile: budget %v is not above 0 and at most %v seconds", x.Budget, maxRealtime.Seconds())
		case i > 0 && x.Budget <= p[i-1].Budget:
			return errors.New("profile: budgets do not grow")
		case max(x.ReadIOPS, x.WriteIOPS) > maxIOPS:
			return fmt.Errorf("profile: more than %d operations per second", maxIOPS)
		}
	}
	return nil
}

// needs returns the smallest budget that gives so many operations of a kind, in seconds.
// Between two budgets it interpolates. A budget gives no less than a smaller one, whatever
// was measured. ok is false where the largest does not give as many; most is what it gives.
func (p Profile) needs(want float64, of func(api.RealtimePoint) uint64) (budget float64, most uint64, ok bool) {
	var at, had float64
	for _, x := range p {
		gives := max(float64(of(x)), had)
		if want <= gives {
			if gives > had {
				at += (x.Budget - at) * (want - had) / (gives - had)
			}
			return at, 0, true
		}
		at, had = x.Budget, gives
	}
	return 0, uint64(had), false
}

// Needs returns the smallest budget that gives the figures beside busy CPUs, in whole
// milliseconds. Reads and writes take CPU time one after the other. Bytes alone come in
// large requests, which take no more of it than small ones.
func (p Profile) Needs(f api.BlockIOFigures) (time.Duration, error) {
	var sum float64
	for _, x := range []struct {
		word       string
		ops, bytes uint64
		of         func(api.RealtimePoint) uint64
	}{
		{"reads", f.ReadIOPS, f.ReadBytes, func(x api.RealtimePoint) uint64 { return x.ReadIOPS }},
		{"writes", f.WriteIOPS, f.WriteBytes, func(x api.RealtimePoint) uint64 { return x.WriteIOPS }},
	} {
		ops := max(float64(x.ops), float64(x.bytes)/largeRequest)
		if ops == 0 {
			continue
		}
		budget, most, ok := p.needs(ops, x.of)
		if !ok {
			return 0, fmt.Errorf("the profile has %d %s per second at most, and %.0f are reserved", most, x.word, ops)
		}
		sum += budget
	}
	ms := (time.Duration(sum*1e9) + time.Millisecond - 1).Truncate(time.Millisecond)
	if ms > maxRealtime {
		return 0, fmt.Errorf("by the profile reads and writes need %s together, of at most %s in each second", ms, maxRealtime)
	}
	return ms, nil
}

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

// reprofile gives the containers with io.realtime: auto what the profiles say now. One that
// cannot have that keeps its budget until it is applied again, which gives the reason.
func (f *BlockIO) reprofile() error {
	var errs []error
	for _, m := range f.members {
		if m.budget == 0 || !m.target.Settings.RealtimeAuto {
			continue
		}
		budget, grouped, err := f.mayRealtime(m.target, m.reserved)
		if err == nil {
			m.budget, m.grouped = budget, grouped
		}
		errs = append(errs, err)
	}
	errs = append(errs, f.realtime())
	f.promote()
	return errors.Join(errs...)
}

// sorted is a profile by budget.
func sorted(p []api.RealtimePoint) Profile {
	p = slices.Clone(p)
	slices.SortFunc(p, func(a, b api.RealtimePoint) int { return cmp.Compare(a.Budget, b.Budget) })
	return p
}
