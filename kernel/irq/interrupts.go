package irq

import (
	"errors"
	"fmt"
	"path/filepath"
	"strconv"
	"strings"
	"time"
)

// Interrupts counts how often one source has interrupted each CPU since boot.
type Interrupts struct {
	Source string   // "NET_RX" for softirqs; "virtio0-req.0" for devices, or "LOC" where there is no device
	Number int      // of the interrupt; -1 if it has none
	CPUs   []int    // the same for all sources
	Counts []uint64 // by CPU
}

// Softirqs reads proc_softirqs(5).
func Softirqs(proc string) ([]Interrupts, error) { return interrupts(filepath.Join(proc, "softirqs")) }

// IRQs reads /proc/interrupts.
func IRQs(proc string) ([]Interrupts, error) { return interrupts(filepath.Join(proc, "interrupts")) }

func interrupts(path string) ([]Interrupts, error) {
	text, err := readLong(path)
	if err != nil {
		return nil, err
	}
	all, err := parseInterrupts(text)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	return all, nil
}

// parseInterrupts parses a line "SOURCE: COUNT... DESCRIPTION" for each source, below a line that
// names the CPUs. It skips lines with fewer counts (ERR, MIS), which belong to the machine and not
// to its CPUs. The last word of a description names the device that the interrupt belongs to.
func parseInterrupts(text string) (all []Interrupts, err error) {
	head, rest, _ := strings.Cut(text, "\n")
	var cpus []int
	for _, name := range strings.Fields(head) {
		cpu, err := strconv.ParseUint(strings.TrimPrefix(name, "CPU"), 10, 16)
		if err != nil {
			return nil, fmt.Errorf("bad line %q", head)
		}
		cpus = append(cpus, int(cpu))
	}
	if cpus == nil {
		return nil, errors.New("no line that names the CPUs")
	}
	for line := range strings.Lines(rest) {
		source, counts, ok := strings.Cut(strings.TrimSpace(line), ":")
		if !ok {
			return nil, fmt.Errorf("bad line %q", line)
		}
		fields := strings.Fields(counts)
		if len(fields) < len(cpus) {
			continue
		}
		i := Interrupts{Source: source, Number: -1, CPUs: cpus, Counts: make([]uint64, len(cpus))}
		for column := range cpus {
			if i.Counts[column], err = strconv.ParseUint(fields[column], 10, 64); err != nil {
				return nil, fmt.Errorf("bad line %q", line)
			}
		}
		if n, err := strconv.ParseUint(source, 10, 31); err == nil {
			i.Number = int(n)
			if len(fields) > len(cpus) {
				i.Source = fields[len(fields)-1]
			}
		}
		all = append(all, i)
	}
	return all, nil
}

// Stolen returns the machine's total steal time since boot, summed over its CPUs; 0 on a machine
// without a hypervisor. See proc_stat(5).
func Stolen(proc string) (time.Duration, error) {
	text, err := readLong(filepath.Join(proc, "stat"))
	if err != nil {
		return 0, err
	}
	return parseStolen(text)
}

func parseStolen(text string) (time.Duration, error) {
	line, _, _ := strings.Cut(text, "\n")
	// cpu user nice system idle iowait irq softirq steal
	fields := strings.Fields(line)
	if len(fields) >= 9 && fields[0] == "cpu" {
		if n, err := strconv.ParseUint(fields[8], 10, 48); err == nil {
			return ticks(n), nil
		}
	}
	return 0, fmt.Errorf("stat: bad line %q", line)
}
