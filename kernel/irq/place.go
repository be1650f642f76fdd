package irq

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/fairlead-project/fairlead/kernel/cgroup"
	"github.com/fairlead-project/fairlead/kernel/journal"
	"github.com/fairlead-project/fairlead/kernel/netdev"
)

// Usable returns the CPUs that may be given interrupts, in ascending order: the online CPUs in
// default_smp_affinity, without the isolated ones (isolcpus, nohz_full).
func Usable(proc, sys string) ([]int, error) {
	cpus, err := initial(proc, sys)
	if err != nil {
		return nil, fmt.Errorf("cpus for interrupts: %w", err)
	}
	for _, kept := range []string{"isolated", "nohz_full"} {
		list, err := list(filepath.Join(sys, "devices/system/cpu", kept))
		if err != nil && !errors.Is(err, journal.ErrGone) {
			return nil, fmt.Errorf("cpus for interrupts: %w", err)
		}
		cpus = without(cpus, list)
	}
	return cpus, nil
}

// initial returns an interrupt's default affinity, wherever its device is: the online CPUs in
// default_smp_affinity.
func initial(proc, sys string) ([]int, error) {
	online, err := list(filepath.Join(sys, "devices/system/cpu/online"))
	if err != nil {
		return nil, err
	}
	given, err := mask(filepath.Join(proc, "irq/default_smp_affinity"))
	if errors.Is(err, journal.ErrGone) { // a proc that shows only the minimum
		return online, nil
	}
	return common(online, given), err
}

// Chosen reports whether the host's owner has set an interrupt's affinity. The kernel's own choice
// is default_smp_affinity, or the CPUs of it that are near the device (kernel/irq/manage.c,
// irq_setup_affinity). The driver's choice is its affinity hint, for example one CPU for each
// queue. Any other affinity was set. The error matches journal.ErrGone if there is no such
// interrupt.
func Chosen(proc, sys string, irq int) (bool, error) {
	given, err := initial(proc, sys)
	if err != nil {
		return false, fmt.Errorf("cpus of interrupt %d: %w", irq, err)
	}
	now, err := list(listOf(proc, irq))
	if err != nil {
		return false, fmt.Errorf("cpus of interrupt %d: %w", irq, err)
	}
	if len(without(given, now)) == 0 {
		return false, nil
	}
	if node, err := read(filepath.Join(dirOf(proc, irq), "node")); err == nil && node != "-1" {
		near, err := list(filepath.Join(sys, "devices/system/node", "node"+node, "cpulist"))
		if err == nil && slices.Equal(common(given, near), now) {
			return false, nil
		}
	}
	hint, err := mask(filepath.Join(dirOf(proc, irq), "affinity_hint"))
	return err != nil || len(hint) == 0 || !slices.Equal(hint, now), nil
}

// list reads a file that holds a CPU list. nohz_full shows an empty list as "(null)".
func list(path string) ([]int, error) {
	text, err := read(path)
	if err != nil || text == "(null)" {
		return nil, err
	}
	return cgroup.ParseCPUs(text)
}

func mask(path string) ([]int, error) {
	text, err := read(path)
	if err != nil {
		return nil, err
	}
	return netdev.MaskCPUs(text)
}

// common returns the elements of a that are also in b.
func common(a, b []int) []int { return without(a, without(a, b)) }

func without(a, b []int) []int {
	return slices.DeleteFunc(slices.Clone(a), func(cpu int) bool { return slices.Contains(b, cpu) })
}

// balancer is the irqbalance of this host, which would undo any other placement.
type balancer struct {
	Runs   bool
	Banned []int // the interrupts that its options exclude
}

// Places reports whether irqbalance places an interrupt.
func (b balancer) Places(irq int) bool { return b.Runs && !slices.Contains(b.Banned, irq) }

// Balancing looks for irqbalance. It ignores a process of that name in another pid namespace than
// ours, because a container may start one.
func Balancing(proc string) (balancer, error) {
	ours, err := os.Readlink(filepath.Join(proc, "self/ns/pid"))
	list, lerr := os.ReadDir(proc)
	if err := cmp.Or(err, lerr); err != nil {
		return balancer{}, fmt.Errorf("look for irqbalance: %w", err)
	}
	for _, e := range list {
		if _, err := strconv.Atoi(e.Name()); err != nil {
			continue
		}
		comm, err := read(filepath.Join(proc, e.Name(), "comm"))
		if err != nil || comm != "irqbalance" {
			continue
		}
		if ns, err := os.Readlink(filepath.Join(proc, e.Name(), "ns/pid")); err != nil || ns != ours {
			continue
		}
		line, err := readLong(filepath.Join(proc, e.Name(), "cmdline"))
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return balancer{}, fmt.Errorf("options of irqbalance: %w", err)
		}
		return balancer{Runs: true, Banned: banned(strings.Split(line, "\x00"))}, nil
	}
	return balancer{}, nil
}

// banned parses irqbalance's options -i and --banirq, see irqbalance(1).
func banned(args []string) (irqs []int) {
	for i, arg := range args {
		value, isLong := strings.CutPrefix(arg, "--banirq")
		value, joined := strings.CutPrefix(value, "=")
		if !isLong {
			if value, isLong = strings.CutPrefix(arg, "-i"); !isLong {
				continue
			}
			joined = value != ""
		}
		if !joined && value == "" && i+1 < len(args) {
			value = args[i+1]
		}
		if n, err := strconv.Atoi(value); err == nil {
			irqs = append(irqs, n)
		}
	}
	return irqs
}
