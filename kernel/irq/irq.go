// Package irq finds the interrupts of devices and what CPUs do for them, counts how often CPUs were
// interrupted, and has a knob for the affinity of an interrupt. It does not choose the CPUs:
// feature/blockio does, and turns the knob through package journal.
package irq

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/fairlead-project/fairlead/kernel/cgroup"
	"github.com/fairlead-project/fairlead/kernel/journal"
)

// KindIRQ is the journal kind of an interrupt's affinity.
const KindIRQ = "irq"

// Of returns the interrupts of a device, such as /sys/block/vda or /sys/class/net/eth0, in
// ascending order. They belong to the bus device behind it. A device without interrupts, such as a
// loop device or a veth, has none. Neither has a plain file, such as
// /sys/class/net/bonding_masters. That is no error.
func Of(sys, device string) ([]int, error) {
	dir, err := filepath.EvalSymlinks(filepath.Join(device, "device"))
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ENOTDIR) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("interrupts of %s: %w", device, err)
	}
	// virtio and SCSI devices lie below the PCI device that raises their interrupts.
	for top := filepath.Join(sys, "devices"); strings.HasPrefix(dir, top+"/"); dir = filepath.Dir(dir) {
		entries, err := os.ReadDir(filepath.Join(dir, "msi_irqs"))
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return nil, fmt.Errorf("interrupts of %s: %w", device, err)
		}
		var irqs []int
		for _, e := range entries {
			if n, err := strconv.Atoi(e.Name()); err == nil {
				irqs = append(irqs, n)
			}
		}
		slices.Sort(irqs)
		return irqs, nil
	}
	return nil, nil
}

// CPUs returns the CPUs to which the kernel delivers an interrupt, in ascending order. The list is
// empty before a driver has requested the interrupt. The error matches journal.ErrGone if there is
// no such interrupt.
func CPUs(proc string, irq int) ([]int, error) {
	text, err := read(filepath.Join(dirOf(proc, irq), "effective_affinity_list"))
	if err != nil {
		return nil, fmt.Errorf("cpus of interrupt %d: %w", irq, err)
	}
	return cgroup.ParseCPUs(text)
}

// Movable reports whether an interrupt's affinity can be set. The kernel manages the affinity of
// multi-queue disks itself and refuses any change. Movable changes nothing: it writes text that is
// no CPU list, which the kernel parses only after it has checked whether the affinity can be set
// (kernel/irq/proc.c, write_irq_affinity).
func Movable(proc string, irq int) bool {
	err := write(listOf(proc, irq), "none")
	return errors.Is(err, unix.EINVAL)
}

// Affinity returns the knob of an interrupt's affinity: the CPUs that the kernel may choose from,
// as a list in the form of cgroup.FormatCPUs.
func Affinity(proc string, irq int) journal.Knob { return affinity(listOf(proc, irq)) }

// Open opens a knob that an earlier process wrote into the journal.
func Open(proc string, ref journal.Ref) (journal.Knob, error) {
	m := object.FindStringSubmatch(strings.TrimPrefix(ref.Object, filepath.Clean(proc)))
	if ref.Kind != KindIRQ || m == nil || !strings.HasPrefix(ref.Object, filepath.Clean(proc)+"/") {
		return nil, fmt.Errorf("open knob %s %q: not the affinity of an interrupt", ref.Kind, ref.Object)
	}
	return affinity(ref.Object), nil
}

var object = regexp.MustCompile(`^/irq/[0-9]{1,9}/smp_affinity_list$`)

func dirOf(proc string, irq int) string { return filepath.Join(proc, "irq", strconv.Itoa(irq)) }
func listOf(proc string, irq int) string {
	return filepath.Join(dirOf(proc, irq), "smp_affinity_list")
}

type affinity string

func (a affinity) Ref() journal.Ref { return journal.Ref{Kind: KindIRQ, Object: string(a)} }

func (a affinity) Read() (string, error) {
	text, err := read(string(a))
	if err != nil {
		return "", fmt.Errorf("read affinity of interrupt: %w", err)
	}
	return text, nil
}

func (a affinity) Write(list string) error {
	if cpus, err := cgroup.ParseCPUs(list); err != nil || len(cpus) == 0 {
		return fmt.Errorf("write affinity of interrupt: %q is not a list of CPUs", list)
	}
	if err := write(string(a), list); err != nil {
		return fmt.Errorf("write %q as affinity of interrupt: %w", list, err)
	}
	return nil
}

// readLong reads a file of proc or sys. The kernel alone writes the files that it is used for.
func readLong(path string) (string, error) {
	data, err := os.ReadFile(path)
	return string(data), gone(err)
}

func read(path string) (string, error) {
	text, err := readLong(path)
	return strings.TrimSpace(text), err
}

func write(path, text string) error {
	f, err := os.OpenFile(path, os.O_WRONLY, 0)
	if err != nil {
		return gone(err)
	}
	_, err = f.WriteString(text)
	return errors.Join(gone(err), f.Close())
}

func gone(err error) error {
	if errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("%w: %w", journal.ErrGone, err)
	}
	return err
}
