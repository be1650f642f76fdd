// Package kernel names the places where the host's state is found, and opens
// the knobs that the journal wrote down. It holds no state and changes nothing
// itself: the packages below it do. Package agent and `fairlead restore` use it.
package kernel

import (
	"fmt"

	"github.com/fairlead-project/fairlead/kernel/journal"
	"github.com/fairlead-project/fairlead/kernel/netdev"
)

// Roots are the mount points through which fairlead sees the host. Tests put
// temporary directories there.
type Roots struct {
	Proc   string
	Sys    string
	Cgroup string // above all hierarchies
	BPFFS  string
}

// Default gives the mount points of an ordinary host.
func Default() Roots {
	return Roots{Proc: "/proc", Sys: "/sys", Cgroup: "/sys/fs/cgroup", BPFFS: "/sys/fs/bpf"}
}

// Opener opens any knob that fairlead turns, by the Kind of its Ref. A new
// kind of knob gets its case here and nowhere else.
func Opener(r Roots) journal.Opener {
	return func(ref journal.Ref) (journal.Knob, error) {
		switch ref.Kind {
		case "offload", "threaded", "rps":
			return netdev.OpenKnob(r.Proc, ref)
		default:
			return nil, fmt.Errorf("open knob %q: unknown kind %q", ref.Object, ref.Kind)
		}
	}
}
