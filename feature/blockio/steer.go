package blockio

import (
	"errors"
	"fmt"
	"path/filepath"
	"strings"

	"github.com/fairlead-project/fairlead/kernel/cgroup"
	"github.com/fairlead-project/fairlead/kernel/journal"
	"github.com/fairlead-project/fairlead/kernel/netdev"
	"github.com/fairlead-project/fairlead/kernel/sched"
)

// steer has a network device's work done by some CPUs where its interrupts come to others:
// the threads that poll it run there, or, without threads, its receive queues hand their
// packets to these (RPS). The driver's part, up to that, stays where the interrupts come.
// XPS is left alone: it says which queue a CPU sends by, not where the device's interrupts
// come. What somebody else has set is left, too, and said in left.
func (f *BlockIO) steer(device string, cpus []int, turn func(journal.Knob, string) error) (left, err error) {
	others := func(knob journal.Knob) bool {
		e, noted := f.cfg.Journal.Entry(knob.Ref())
		return noted && e.Owner.Feature != name
	}
	threads, err := sched.Threads(f.cfg.Roots.Proc, "napi/"+device+"-")
	if err != nil {
		return nil, err
	}
	var errs, kept []error
	for _, t := range threads {
		knob := sched.Affinity(f.cfg.Roots.Proc, t.Thread)
		if others(knob) {
			kept = append(kept, fmt.Errorf("another feature has placed the thread %s", t.Comm))
			continue
		}
		errs = append(errs, turn(knob, cgroup.FormatCPUs(cpus)))
	}
	if len(threads) > 0 {
		return errors.Join(kept...), errors.Join(errs...)
	}
	if f.net == nil {
		if f.net, err = netdev.Open(filepath.Join(f.cfg.Roots.Proc, "self/ns/net")); err != nil {
			return nil, err
		}
	}
	index, err := f.net.Index(device)
	if err != nil {
		return nil, ignoreGone(err)
	}
	for queue := 0; ; queue++ {
		knob := f.net.RPS(index, queue)
		mask, err := knob.Read()
		if errors.Is(err, journal.ErrGone) {
			return errors.Join(kept...), errors.Join(errs...)
		}
		if err != nil {
			return nil, err
		}
		_, ours := f.cfg.Journal.Entry(knob.Ref())
		if others(knob) || !ours && strings.Trim(mask, "0,") != "" {
			kept = append(kept, fmt.Errorf("queue %d of %s hands its packets to CPUs that somebody else has chosen (rps_cpus)", queue, device))
			continue
		}
		errs = append(errs, turn(knob, netdev.CPUMask(cpus, mask)))
	}
}
