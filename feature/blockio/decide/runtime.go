package decide

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/fairlead-project/fairlead/api"
)

const (
	// MaxRealtime bounds the sum of all real-time budgets, in each second of each CPU. The rest is for the
	// host and the other containers.
	MaxRealtime = 500 * time.Millisecond
	// LeastBudget is the smallest budget that helps.
	LeastBudget = 10 * time.Millisecond
	// MaxDeadlines limits the threads of a container that share its budget. The threads that ran most get
	// a share.
	MaxDeadlines = 64
	// leastShare is the smallest runtime of a thread per second. The kernel requires at least a
	// microsecond in each period.
	leastShare = 100 * time.Microsecond
)

// Thread is a thread of a container with a real-time budget. All times are per second.
type Thread struct {
	TID   int
	Start uint64        // together with TID, identifies the thread
	Ran   time.Duration // in the last second
	Has   time.Duration // its current runtime; 0 if it is ordinary
	Gets  time.Duration // its runtime from DivideRuntime
}

// DivideRuntime divides a budget, in each second of each CPU, among the threads of a container, and
// returns those that get a share. It prefers the threads that ran most. Each thread wants twice what it
// ran, so that a thread that was held up reaches its level. The division is max-min fair, and all share
// the rest. A thread runs on one CPU at a time, so it gets at most the budget of one CPU. A thread
// whose runtime is almost right keeps it.
func DivideRuntime(budget time.Duration, cpus int, all []Thread) []Thread {
	total := budget * time.Duration(cpus)
	slices.SortStableFunc(all, func(a, b Thread) int { return cmp.Compare(b.Ran, a.Ran) })
	n := min(len(all), MaxDeadlines, int(total/leastShare))
	out := slices.Clone(all[:n])
	left := total
	for i := n - 1; i >= 0; i-- { // from the smallest wish to the largest
		want := min(max(2*out[i].Ran, leastShare), budget)
		out[i].Gets = min(want, left/time.Duration(i+1))
		left -= out[i].Gets
	}
	for i := range out {
		more := min(left/time.Duration(n-i), budget-out[i].Gets)
		out[i].Gets += more
		left -= more
	}
	var sum time.Duration
	kept := slices.Clone(out)
	for i, s := range kept {
		if s.Has <= budget && s.Has > s.Gets*3/4 && s.Has < s.Gets*5/4 {
			kept[i].Gets = s.Has
		}
		sum += kept[i].Gets
	}
	if sum <= total {
		return kept
	}
	return out
}

// maxPoints bounds the points of a profile.
const maxPoints = 64

// Profile is what a disk did for real-time threads of growing budgets, beside busy CPUs
// (MIST, figure 6: IOPS against RT runtime).
type Profile []api.RealtimePoint

// check returns an error for a profile that makes no sense.
func (p Profile) check() error {
	if len(p) > maxPoints {
		return fmt.Errorf("profile of more than %d budgets", maxPoints)
	}
	for i, x := range p {
		switch {
		case !(x.Budget > 0 && x.Budget <= MaxRealtime.Seconds()):
			return fmt.Errorf("profile: budget %v is not above 0 and at most %v seconds", x.Budget, MaxRealtime.Seconds())
		case i > 0 && x.Budget <= p[i-1].Budget:
			return errors.New("profile: budgets do not grow")
		case max(x.ReadIOPS, x.WriteIOPS) > maxIOPS:
			return fmt.Errorf("profile: more than %d operations per second", maxIOPS)
		}
	}
	return nil
}

// needs returns the smallest budget that gives want operations of a kind, in seconds. It interpolates
// between two budgets. A larger budget never counts for less than a smaller one, whatever was measured.
// If even the largest budget does not suffice, ok is false, and most is what that one gives.
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

// Needs returns the smallest budget that gives the figures beside busy CPUs, in whole milliseconds. The
// CPU times of reads and writes add up. Bytes alone come in large requests, and a large request takes
// no more CPU time than a small one.
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
	if ms > MaxRealtime {
		return 0, fmt.Errorf("by the profile reads and writes need %s together, of at most %s in each second", ms, MaxRealtime)
	}
	return ms, nil
}

// NewProfile returns the points as a profile, sorted by budget.
func NewProfile(p []api.RealtimePoint) Profile {
	p = slices.Clone(p)
	slices.SortFunc(p, func(a, b api.RealtimePoint) int { return cmp.Compare(a.Budget, b.Budget) })
	return p
}
