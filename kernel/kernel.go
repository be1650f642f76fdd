// Package kernel names the directories in which fairlead finds the host's state, and opens the
// knobs that journal entries refer to. It does not change the host itself; the packages below it
// do. Package agent and `fairlead restore` use it.
package kernel

import (
	"fmt"
	"sync"

	"github.com/fairlead-project/fairlead/kernel/cgroup"
	"github.com/fairlead-project/fairlead/kernel/irq"
	"github.com/fairlead-project/fairlead/kernel/journal"
	"github.com/fairlead-project/fairlead/kernel/netdev"
	"github.com/fairlead-project/fairlead/kernel/qdisc"
	"github.com/fairlead-project/fairlead/kernel/sched"
)

// Roots are the mount points through which fairlead sees the host, and its Monitor of the network.
// Tests use temporary directories.
type Roots struct {
	Proc   string
	Sys    string
	Cgroup string // the directory above all hierarchies
	BPFFS  string

	Monitor *netdev.Monitor // of network namespaces, shared by all users of these Roots; nil: none is shared
}

// Default returns the mount points of an ordinary host, with a new Monitor.
func Default() Roots {
	return Roots{Proc: "/proc", Sys: "/sys", Cgroup: cgroup.DefaultRoot, BPFFS: "/sys/fs/bpf", Monitor: netdev.NewMonitor()}
}

// Opener returns a function that opens any knob of fairlead, by the Kind of its Ref. It lists the
// host's namespaces once, on first use, and treats namespaces that appear later as gone, so use it
// for one Restore or one list of entries. Only this function knows all kinds of knobs.
func Opener(r Roots) journal.Opener {
	// The mounts of the hierarchies do not change while this process runs.
	layout := sync.OnceValues(func() (cgroup.Layout, error) { return cgroup.Detect(r.Proc, r.Cgroup) })
	find := netdev.NewGlance(r.Proc, r.Monitor)
	return func(ref journal.Ref) (journal.Knob, error) {
		switch ref.Kind {
		case cgroup.KindFile, cgroup.KindGroup, cgroup.KindSlices, cgroup.KindRT, cgroup.KindLine:
			return cgroup.Open(r.Cgroup, ref)
		case sched.KindKthread, sched.KindAffinity, sched.KindSlice, sched.KindNice, sched.KindDeadline:
			l, err := layout()
			if err != nil && ref.Kind == sched.KindKthread {
				return nil, err
			}
			return sched.OpenKnob(r.Proc, l, ref)
		case irq.KindIRQ:
			return irq.Open(r.Proc, ref)
		case netdev.KindOffload, netdev.KindThreaded, netdev.KindRPS, netdev.KindRFS, netdev.KindDefer, netdev.KindIFB, netdev.KindPair, netdev.KindSysfs:
			return netdev.OpenKnob(find, ref)
		case qdisc.KindRoot, qdisc.KindQueueLen, qdisc.KindForward, qdisc.KindFilter:
			return qdisc.OpenKnob(r.Proc, find, ref)
		default:
			return nil, fmt.Errorf("open knob %q: unknown kind %q", ref.Object, ref.Kind)
		}
	}
}
