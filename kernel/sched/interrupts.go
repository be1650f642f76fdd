package sched

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"
)

// Interrupts counts how often one source has interrupted each CPU since boot.
type Interrupts struct {
	Source string   // "NET_RX" for softirqs; "virtio0-req.0" for devices, or "LOC" where there is no device
	Number int      // of the interrupt; -1 if it has none
	Counts []uint64 // by CPU, the online ones in order
}

// Softirqs reads proc_softirqs(5).
func Softirqs(proc string) ([]Interrupts, error) { return interrupts(filepath.Join(proc, "softirqs")) }

// IRQs reads /proc/interrupts.
func IRQs(proc string) ([]Interrupts, error) { return interrupts(filepath.Join(proc, "interrupts")) }

func interrupts(path string) ([]Interrupts, error) {
	data, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	all, err := parseInterrupts(string(data))
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
	cpus := len(strings.Fields(head))
	if cpus == 0 {
		return nil, errors.New("no line that names the CPUs")
	}
	for line := range strings.Lines(rest) {
		source, counts, ok := strings.Cut(strings.TrimSpace(line), ":")
		if !ok {
			return nil, fmt.Errorf("bad line %q", line)
		}
		fields := strings.Fields(counts)
		if len(fields) < cpus {
			continue
		}
		i := Interrupts{Source: source, Number: -1, Counts: make([]uint64, cpus)}
		for cpu := range cpus {
			if i.Counts[cpu], err = strconv.ParseUint(fields[cpu], 10, 64); err != nil {
				return nil, fmt.Errorf("bad line %q", line)
			}
		}
		if n, err := strconv.ParseUint(source, 10, 31); err == nil {
			i.Number = int(n)
			if len(fields) > cpus {
				i.Source = fields[len(fields)-1]
			}
		}
		all = append(all, i)
	}
	return all, nil
}

// Switches returns how often a thread of any process has given up its CPU voluntarily and
// involuntarily (proc_pid_status(5)). Error: journal.ErrGone.
func Switches(proc string, tid int) (voluntary, involuntary uint64, err error) {
	text, err := readFile(filepath.Join(proc, strconv.Itoa(tid), "status"))
	if err != nil {
		return 0, 0, fmt.Errorf("thread %d: %w", tid, gone(err))
	}
	for line := range strings.Lines(string(text)) {
		key, value, _ := strings.Cut(line, ":")
		to := map[string]*uint64{"voluntary_ctxt_switches": &voluntary, "nonvoluntary_ctxt_switches": &involuntary}[key]
		if to == nil {
			continue
		}
		if *to, err = strconv.ParseUint(strings.TrimSpace(value), 10, 64); err != nil {
			return 0, 0, fmt.Errorf("thread %d: bad line %q", tid, line)
		}
	}
	return voluntary, involuntary, nil
}

// Stolen returns the machine's total steal time since boot, summed over its CPUs; 0 on a machine
// without a hypervisor. See proc_stat(5).
func Stolen(proc string) (time.Duration, error) {
	data, err := os.ReadFile(filepath.Join(proc, "stat"))
	if err != nil {
		return 0, err
	}
	return parseStolen(string(data))
}

func parseStolen(text string) (time.Duration, error) {
	line, _, _ := strings.Cut(text, "\n")
	// cpu user nice system idle iowait irq softirq steal
	fields := strings.Fields(line)
	if len(fields) >= 9 && fields[0] == "cpu" {
		if n, err := strconv.ParseUint(fields[8], 10, 40); err == nil {
			return time.Duration(n) * (time.Second / ticks), nil
		}
	}
	return 0, fmt.Errorf("stat: bad line %q", line)
}
