package isolate

import "github.com/fairlead-project/fairlead/kernel/journal"

// vacated lists the threads that have left the cgroups of containers, by the window in which they
// did. A runtime that found a thread in the cgroup of an ended container may have given up on it,
// and what is still there a window later is removed. Not before: a runtime reads a cgroup, such as
// its count of OOM kills, before it removes it.
type vacated struct{ now, before []journal.Outcome }

// next ends a window, and returns the threads that left before it began.
func (v *vacated) next() []journal.Outcome {
	due := v.before
	v.before, v.now = v.now, nil
	return due
}
