package irq

import (
	"cmp"
	"fmt"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/prometheus/procfs"
)

// Work is what one CPU has done for interrupts since boot.
type Work struct {
	Time    time.Duration // in interrupts and softirqs
	Network uint64        // softirqs of packets received and sent
	Block   uint64        // softirqs of completed disk requests
	Idle    time.Duration // without a task that could run
}

// tick is the unit of /proc/stat, USER_HZ, the same on all architectures that Go knows.
const tick = 10 * time.Millisecond

// Works returns what each CPU has done, by CPU number, from proc/stat and proc/softirqs. Time is
// counted in ticks: an interrupt of a CPU that idles without ticks is missed.
func Works(proc string) (map[int]Work, error) {
	stat, err := readLong(filepath.Join(proc, "stat"))
	softirqs, serr := Softirqs(proc)
	if err := cmp.Or(err, serr); err != nil {
		return nil, fmt.Errorf("read work for interrupts: %w", err)
	}
	return parseWorks(stat, softirqs), nil
}

func ticks(n uint64) time.Duration { return time.Duration(min(n, 1<<38)) * tick }

func parseWorks(stat string, softirqs []Interrupts) map[int]Work {
	works := make(map[int]Work)
	for l := range strings.Lines(stat) {
		// cpuN user nice system idle iowait irq softirq ..., proc_stat(5)
		f := strings.Fields(l)
		if len(f) < 8 || !strings.HasPrefix(f[0], "cpu") {
			continue
		}
		cpu, err := strconv.ParseUint(f[0][len("cpu"):], 10, 16)
		if err != nil {
			continue // the sum of all CPUs
		}
		hard, _ := strconv.ParseUint(f[6], 10, 48)
		soft, _ := strconv.ParseUint(f[7], 10, 48)
		idle, _ := strconv.ParseUint(f[4], 10, 48)
		iowait, _ := strconv.ParseUint(f[5], 10, 48)
		works[int(cpu)] = Work{Time: ticks(hard + soft), Idle: ticks(idle + iowait)}
	}
	for _, s := range softirqs {
		network := s.Source == "NET_RX" || s.Source == "NET_TX"
		if !network && s.Source != "BLOCK" {
			continue
		}
		for column, n := range s.Counts {
			cpu := s.CPUs[column]
			w, known := works[cpu]
			switch {
			case !known:
				continue
			case network:
				w.Network += n
			default:
				w.Block += n
			}
			works[cpu] = w
		}
	}
	return works
}

// ForNetwork estimates the time that a CPU spent on the network since an earlier reading: its time
// in interrupts, times the network's share of its network and block softirqs.
func (w Work) ForNetwork(before Work) time.Duration {
	network, block := w.Network-min(before.Network, w.Network), w.Block-min(before.Block, w.Block)
	if network == 0 || w.Time < before.Time {
		return 0
	}
	return time.Duration(float64(w.Time-before.Time) * float64(network) / float64(network+block))
}

// Count returns how often an interrupt has arrived since boot. It returns 0 where the kernel does
// not report that.
func Count(sys string, irq int) (sum uint64) {
	text, err := read(filepath.Join(sys, "kernel/irq", strconv.Itoa(irq), "per_cpu_count"))
	if err != nil {
		return 0
	}
	for part := range strings.SplitSeq(text, ",") {
		n, _ := strconv.ParseUint(part, 10, 32) // the width of the kernel's counter
		sum += n
	}
	return sum
}

// Packets returns how many packets each CPU has handed to the network stack, by CPU number, modulo
// 2^32. A packet counts again at each device by which it arrives, in every network namespace.
func Packets(proc string) (map[int]uint32, error) {
	fs, err := procfs.NewFS(proc)
	if err != nil {
		return nil, fmt.Errorf("count packets: %w", err)
	}
	rows, err := fs.NetSoftnetStat()
	if err != nil {
		return nil, fmt.Errorf("count packets: %w", err)
	}
	packets := make(map[int]uint32, len(rows))
	for _, r := range rows {
		packets[int(r.Index)] = r.Processed
	}
	return packets, nil
}
