package isolate

import "github.com/fairlead-project/fairlead/kernel/journal"

// vacated lists the threads that have left the cgroups of containers, by window. A runtime that finds
// a thread in the cgroup of an ended container may give up its removal, so we remove the cgroup if it
// still exists a window later. We wait because a runtime reads a cgroup, such as its count of OOM
// kills, before it removes it.
type vacated struct{ now, before []journal.Outcome }

// next ends a window and returns the threads that left before the window began.
func (v *vacated) next() []journal.Outcome {
	due := v.before
	v.before, v.now = v.now, nil
	return due
}
