package charge

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/feature/netcpu/account"
	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/kernel"
	"github.com/fairlead-project/fairlead/kernel/cgroup"
	"github.com/fairlead-project/fairlead/kernel/journal"
)

// burn starts a process that computes in a cgroup, on CPU 0, until the test ends or stop is called.
func burn(t *testing.T, cg testkit.CG) (stop func()) {
	t.Helper()
	p := cg.Spinner(t)
	var one unix.CPUSet
	one.Set(0)
	must(t, unix.SchedSetaffinity(p.Pid, &one))
	return func() { p.Kill(); p.Wait() }
}

// load stands for packets that cost so many CPUs.
type load struct {
	mu   sync.Mutex
	cpus float64
	from time.Time
	sum  time.Duration
}

func (l *load) set(cpus float64) {
	l.cost()
	l.mu.Lock()
	defer l.mu.Unlock()
	l.cpus = cpus
}

func (l *load) cost() time.Duration {
	l.mu.Lock()
	defer l.mu.Unlock()
	now := time.Now()
	if !l.from.IsZero() {
		l.sum += time.Duration(l.cpus * float64(now.Sub(l.from)))
	}
	l.from = now
	return l.sum
}

// TestChargeInKernel charges a container for packets that do not exist, in each mode: its quota, or
// without one its weight, is lowered, with an entry in the journal. The owner's returns once the
// container has paid, and at once when the Charger ends.
func TestChargeInKernel(t *testing.T) {
	testkit.OnKernels(t)
	const quota = 40 * ms
	for _, c := range []struct {
		name string
		// limit sets the owner's value of the limit that is to be lowered.
		limit func(t *testing.T, cg testkit.CG) (journal.Knob, string)
		// lowered tells whether it is.
		lowered func(cg testkit.CG) (bool, error)
	}{
		{"quota", func(t *testing.T, cg testkit.CG) (journal.Knob, string) {
			k, owners := cgroup.Quota(cg.CPU, cg.CPU == cg.V2, quota, 100*ms)
			must(t, k.Write(owners))
			return k, owners
		}, func(cg testkit.CG) (bool, error) {
			b, err := cgroup.ReadBandwidth(cg.CPU)
			return b.Quota < quota, err
		}},
		{"weight", func(t *testing.T, cg testkit.CG) (journal.Knob, string) {
			k, weight := cgroup.WeightKnob(cg.CPU, cg.CPU == cg.V2)
			must(t, k.Write(strconv.FormatUint(2*weight.Usual, 10)))
			owners, err := k.Read()
			must(t, err)
			return k, owners
		}, func(cg testkit.CG) (bool, error) {
			w, err := cgroup.Weight(cg.CPU)
			_, usual := cgroup.WeightKnob(cg.CPU, cg.CPU == cg.V2)
			return w < 2*usual.Usual, err
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			cg, other := siblings(t)
			k, owners := c.limit(t, cg)
			id, err := cgroup.ID(cg.V2)
			must(t, err)
			layout, err := cgroup.Detect("/proc", "")
			must(t, err)
			j := testkit.Journal(t, journal.Open)
			var packets load
			ch := New(Config{
				Feature: "netcpu", Roots: kernel.Default(), Layout: layout, Journal: j, Failed: func(error) {},
				Accounts: func() (account.Reading, error) {
					took := packets.cost()
					return readingOf(map[container.ID]cost{container.ID(id): {Charge: took, Took: took}}), nil
				},
			})
			t.Cleanup(func() { ch.Close() })
			must(t, ch.Add(container.Container{ID: container.ID(id), Cgroup: container.Cgroup{V2: cg.V2, CPU: cg.CPU}}, 0))
			now := func() (value string, notes []journal.Entry) {
				value, err := k.Read()
				must(t, err)
				return value, j.Entries()
			}
			lowered := func(when string) {
				t.Helper()
				testkit.AwaitNone(t, func() string {
					is, err := c.lowered(cg)
					must(t, err)
					value, notes := now()
					if is && len(notes) == 1 && notes[0].Ref == k.Ref() && notes[0].Before == owners {
						return ""
					}
					return fmt.Sprintf("the %s is not lowered %s: %s %v", c.name, when, value, notes)
				})
			}
			burn(t, other)
			stop := burn(t, cg)
			packets.set(0.2)
			lowered("while it is charged")
			packets.set(0)
			// It also rests: with late ticks, as in an emulated guest, it runs beyond its quota and
			// continues to pay for that.
			stop()
			testkit.AwaitNone(t, func() string {
				value, notes := now()
				if value == owners && len(notes) == 0 {
					return ""
				}
				return fmt.Sprintf("the %s is not its owner's: %s %v", c.name, value, notes)
			})
			burn(t, cg)
			packets.set(0.2)
			lowered("once more")
			must(t, ch.Close())
			if value, notes := now(); value != owners || len(notes) != 0 {
				t.Errorf("%s is %q after close, want %q; journal %+v", c.name, value, owners, notes)
			}
		})
	}
}

// siblings makes a cgroup for a container, and one beside it without which a weight has no effect.
func siblings(t *testing.T) (cg, other testkit.CG) {
	t.Helper()
	parent := testkit.Cgroup(t)
	if parent.CPU == "" || parent.V2 == "" {
		testkit.Skip(t, "no cpu controller")
	}
	if parent.CPU == parent.V2 {
		must(t, os.WriteFile(filepath.Join(parent.V2, "cgroup.subtree_control"), []byte("+cpu"), 0))
	}
	// Other users of this CPU take time from both. If both got less than most of the CPU, a share of
	// the whole CPU would be too much.
	k, weight := cgroup.WeightKnob(parent.CPU, parent.CPU == parent.V2)
	must(t, k.Write(strconv.FormatUint(4*weight.Usual, 10)))
	return parent.Child(t, "charged"), parent.Child(t, "other")
}
