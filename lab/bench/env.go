package bench

import (
	"cmp"
	"context"
	"runtime"
	"time"

	"golang.org/x/sys/unix"

	"github.com/fairlead-project/fairlead/lab/report"
	"github.com/prometheus/procfs"
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
	if fs, err := procfs.NewDefaultFS(); err == nil {
		if cpus, err := fs.CPUInfo(); err == nil && len(cpus) > 0 {
			e.CPU = cmp.Or(cpus[0].ModelName, e.CPU)
		}
	}
	return e
}

// cpuTimes are the times of one CPU, or of all together, in seconds: the idle time, the time taken by
// the hypervisor, and the total.
type cpuTimes struct{ idle, steal, all float64 }

// allCPUs selects the sum of all CPUs.
const allCPUs = -1

func readCPU(cpu int) cpuTimes {
	fs, _ := procfs.NewDefaultFS() // without /proc Stat fails, too
	stat, err := fs.Stat()
	if err != nil {
		return cpuTimes{}
	}
	t := stat.CPUTotal
	if cpu != allCPUs {
		t = stat.CPU[int64(cpu)]
	}
	idle := t.Idle + t.Iowait
	return cpuTimes{idle, t.Steal, idle + t.User + t.Nice + t.System + t.IRQ + t.SoftIRQ + t.Steal} // guest time is in user
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
	if t.all == 0 || length <= 0 {
		return 0
	}
	return 1 - (t.idle-earlier.idle)/length.Seconds()
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
	p, err := procfs.NewProc(pid)
	if err != nil {
		return 0
	}
	m, _ := p.Statm()
	return float64(m.ResidentBytes())
}

// sleep sleeps for d, or until ctx ends. rounds then discards the measurement, so only a caller that
// loops checks ctx.
func sleep(ctx context.Context, d time.Duration) {
	select {
	case <-ctx.Done():
	case <-time.After(d):
	}
}
