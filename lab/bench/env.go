package bench

import (
	"context"
	"fmt"
	"os"
	"runtime"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/fairlead-project/fairlead/lab/report"
)

// environment describes this machine.
func environment(version string, quick bool) report.Env {
	e := report.Env{
		CPU: "unknown CPU", CPUs: runtime.NumCPU(), Arch: runtime.GOARCH, Version: version, Quick: quick,
		Started: time.Now().UTC().Format(time.RFC3339),
	}
	var u unix.Utsname
	if unix.Uname(&u) == nil {
		e.Kernel = unix.ByteSliceToString(u.Release[:])
	}
	if data, err := os.ReadFile("/proc/cpuinfo"); err == nil {
		for line := range strings.Lines(string(data)) {
			if key, value, ok := strings.Cut(line, ":"); ok && strings.TrimSpace(key) == "model name" {
				e.CPU = strings.TrimSpace(value)
				break
			}
		}
	}
	return e
}

// cpuTimes is one line of proc_stat(5), about one CPU or all together: the idle time, the
// time taken by the hypervisor, and the total, in clock ticks.
type cpuTimes struct{ idle, steal, all float64 }

// allCPUs selects the first line of proc_stat(5), the sum of the others.
const allCPUs = -1

func readCPU(cpu int) cpuTimes {
	data, err := os.ReadFile("/proc/stat")
	if err != nil {
		return cpuTimes{}
	}
	return parseCPU(string(data), cpu)
}

func parseCPU(stat string, cpu int) cpuTimes {
	name := "cpu"
	if cpu != allCPUs {
		name += strconv.Itoa(cpu)
	}
	var t cpuTimes
	for line := range strings.Lines(stat) {
		fields := strings.Fields(line)
		if len(fields) == 0 || fields[0] != name {
			continue
		}
		// user nice system idle iowait irq softirq steal; guest time is in user.
		for i, f := range fields[1:min(len(fields), 9)] {
			v, err := strconv.ParseFloat(f, 64)
			if err != nil {
				continue
			}
			t.all += v
			switch i {
			case 3, 4:
				t.idle += v
			case 7:
				t.steal += v
			}
		}
		break
	}
	return t
}

// busySince returns how many CPUs were busy on average.
func (t cpuTimes) busySince(earlier cpuTimes) float64 {
	all := t.all - earlier.all
	if all <= 0 {
		return 0
	}
	return (1 - (t.idle-earlier.idle)/all) * float64(runtime.NumCPU())
}

// usedSince returns the fraction of the time in which one CPU was not idle. The kernel
// measures idle time by the clock and samples all other time, so only idle time is exact.
func (t cpuTimes) usedSince(earlier cpuTimes, length time.Duration) float64 {
	const tick = 10 * time.Millisecond // USER_HZ is 100 everywhere
	if t.all == 0 || length <= 0 {
		return 0
	}
	return 1 - (t.idle-earlier.idle)*float64(tick)/float64(length)
}

// stealSince returns the fraction of the time that the hypervisor took from the CPUs. The
// kernel counts it in addition to all other time, including idle time.
func (t cpuTimes) stealSince(earlier cpuTimes) float64 {
	all := t.all - earlier.all
	if all <= 0 {
		return 0
	}
	return (t.steal - earlier.steal) / all
}

// notes returns what a reader must know about the machine to judge the report.
func notes(foreign float64, q quiet) []string {
	var n []string
	if foreign > 0.15 {
		n = append(n, fmt.Sprintf("other work took up to %.0f %% of a CPU while the rig was idle, so the figures are noisy", foreign*100))
	}
	if note := q.note(); note != "" {
		n = append(n, note)
	}
	return n
}

// cpuTime is the CPU time of a process so far; 0 if it has ended. It is exact, unlike the
// ticks of proc_pid_stat(5). clock_getcpuclockid(3) computes the clock's number the same way.
func cpuTime(pid int) time.Duration {
	const sched = 2 // CPUCLOCK_SCHED
	var ts unix.Timespec
	if unix.ClockGettime(int32(^pid)<<3|sched, &ts) != nil {
		return 0
	}
	return time.Duration(ts.Nano())
}

// resident is the resident memory of a process in bytes; 0 if it has ended.
func resident(pid int) float64 {
	var size, pages float64
	data, _ := os.ReadFile(fmt.Sprintf("/proc/%d/statm", pid)) // proc_pid_statm(5)
	fmt.Sscan(string(data), &size, &pages)
	return pages * float64(os.Getpagesize())
}

func sleep(ctx context.Context, d time.Duration) error {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-t.C:
		return nil
	}
}
