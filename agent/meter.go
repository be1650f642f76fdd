package agent

import (
	"github.com/fairlead-project/fairlead/feature/netcpu/account"
)

// meter charges the CPU time of packets to containers. Feature netcpu is one.
type meter interface {
	// Read gives all counters since the meter was made.
	Read() (account.Reading, error)
}

// own says whether work ran in the time of whom it was for.
func own(t account.Theft) bool {
	return t.Victim.Container == t.Culprit && (t.Victim.Kind == account.Task || t.Victim.Kind == account.NAPI)
}

// felt says whether work ran in time that somebody else lost by it: a
// container's, or that of a task of the host. The kernel's threads for all
// and idle CPUs lose nothing.
func felt(t account.Theft) bool {
	return !own(t) && (t.Victim.Kind == account.Task || t.Victim.Kind == account.NAPI && t.Victim.Container != 0)
}
