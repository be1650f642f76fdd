package decide

import (
	"cmp"
	"slices"
	"time"
)

const (
	// MaxRealtime bounds the sum of all real-time budgets, in each second of each CPU. The rest
	// is left to the host and to the other containers.
	MaxRealtime = 500 * time.Millisecond
	// LeastBudget is the smallest budget that helps.
	LeastBudget = 10 * time.Millisecond
	// MaxDeadlines limits how many threads of a container get a part of its budget: those
	// that ran most.
	MaxDeadlines = 64
	// leastShare is the least that a thread gets in each second. The kernel requires at least
	// a microsecond in each period.
	leastShare = 100 * time.Microsecond
)

// Thread is a thread of a container with a real-time budget. All times are per second.
type Thread struct {
	TID   int
	Start uint64        // together with TID, identifies the thread
	Ran   time.Duration // in the last second
	Has   time.Duration // the runtime that it has now; 0 if it is ordinary
	Gets  time.Duration // the runtime that DivideRuntime gives it
}

// DivideRuntime divides a budget, in each second of each CPU, among the threads of a container,
// and returns those that get a part. It prefers threads that ran most. Each wants twice what it
// ran, so that a thread that was held up finds its level. The division is max-min fair, and
// what is left is divided among all of them. A thread runs on one CPU at a time, so it gets at
// most the budget of one CPU. A thread that has nearly what it would get keeps what it has.
func DivideRuntime(budget time.Duration, cpus int, all []Thread) []Thread {
	total := budget * time.Duration(cpus)
	slices.SortStableFunc(all, func(a, b Thread) int { return cmp.Compare(b.Ran, a.Ran) })
	n := min(len(all), MaxDeadlines, int(total/leastShare))
	out := slices.Clone(all[:n])
	left := total
	for i := n - 1; i >= 0; i-- { // the smallest wishes come first
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
