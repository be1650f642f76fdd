package blockio

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/kernel/sched"
)

// errNoFio is the error of a host without fio, which makes the load of io calibrate.
var errNoFio = errors.New("io calibrate needs fio: install the package fio")

// fio is a load on a file or device: reads or writes of one size at random offsets, with direct I/O.
type fio struct {
	size  int // bytes of a request
	write bool
	depth int // requests in flight

	// budget, if not 0, has a process for each request, and gives each this runtime in every
	// budgetPeriod under SCHED_DEADLINE.
	budget time.Duration
}

const (
	budgetPeriod = 100 * time.Millisecond
	budgetRamp   = 500 * time.Millisecond // fio does not count these, in which the processes get their budgets
	perJob       = 16                     // requests in flight for which one process suffices
	fioGrace     = 5 * time.Second        // for fio to end once interrupted
)

// run puts the load on a file for the time over, and returns the requests completed per second. The
// processes end with ctx, and with this one.
func (l fio) run(ctx context.Context, file *os.File, over time.Duration) (perSecond float64, err error) {
	runtime.LockOSThread() // Pdeathsig is sent when this thread ends
	defer runtime.UnlockOSThread()
	var out, errs bytes.Buffer
	cmd := exec.CommandContext(ctx, "fio", l.args(over)...)
	cmd.ExtraFiles = []*os.File{file}
	cmd.Stdout, cmd.Stderr = &out, &errs
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGTERM} // of which it ends its own processes
	cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGTERM) }
	cmd.WaitDelay = fioGrace
	if err := cmd.Start(); err != nil {
		return 0, fmt.Errorf("start fio: %w", err)
	}
	var unbudgeted error
	if l.budget > 0 {
		if unbudgeted = l.limit(ctx, cmd.Process.Pid); unbudgeted != nil {
			cmd.Cancel()
		}
	}
	err = cmd.Wait()
	switch {
	case ctx.Err() != nil:
		return 0, ctx.Err()
	case unbudgeted != nil:
		return 0, unbudgeted
	case err != nil:
		return 0, fmt.Errorf("fio: %w: %s", err, strings.TrimSpace(errs.String()))
	}
	return l.parse(out.Bytes())
}

// args are fio's arguments. It opens the file that it inherits.
func (l fio) args(over time.Duration) []string {
	way, engine, jobs, ramp := "randread", "libaio", 1, time.Duration(0)
	if l.write {
		way = "randwrite"
	}
	for most := min(runtime.NumCPU(), l.depth/perJob); 2*jobs <= most; {
		jobs *= 2
	}
	if l.depth == 1 {
		engine = "psync"
	}
	if l.budget > 0 {
		engine, jobs, ramp = "psync", l.depth, budgetRamp
	}
	return []string{
		"--name=calibrate", "--filename=/proc/self/fd/3", "--allow_file_create=0", "--direct=1", "--rw=" + way, "--bs=" + strconv.Itoa(l.size),
		"--ioengine=" + engine, "--iodepth=" + strconv.Itoa(l.depth/jobs), "--numjobs=" + strconv.Itoa(jobs), "--group_reporting",
		"--randrepeat=0", "--norandommap", "--time_based", fmt.Sprintf("--runtime=%dms", over.Milliseconds()), fmt.Sprintf("--ramp_time=%dms", ramp.Milliseconds()),
		"--eta=never", "--output-format=json",
	}
}

// limit gives each process of fio its budget.
func (l fio) limit(ctx context.Context, pid int) error {
	limited := make(map[int]bool)
	for end := time.Now().Add(fioGrace); len(limited) < l.depth; time.Sleep(time.Millisecond) {
		if ctx.Err() != nil || time.Now().After(end) {
			return fmt.Errorf("budget %v: fio has started %d of %d processes", l.budget, len(limited), l.depth)
		}
		text, err := os.ReadFile(filepath.Join("/proc", strconv.Itoa(pid), "task", strconv.Itoa(pid), "children"))
		if err != nil {
			return fmt.Errorf("list the processes of fio: %w", err)
		}
		for _, field := range strings.Fields(string(text)) {
			tid, err := strconv.Atoi(field)
			if err != nil || limited[tid] {
				continue
			}
			task, err := sched.FindTask("/proc", tid)
			if err == nil {
				err = sched.Deadline("/proc", task).Write(sched.FormatDeadline(l.budget, budgetPeriod))
			}
			if err != nil {
				return fmt.Errorf("budget %v: %w", l.budget, err)
			}
			limited[tid] = true
		}
	}
	return nil
}

// parse reads fio's report.
func (l fio) parse(data []byte) (perSecond float64, err error) {
	type way struct {
		IOPS float64 `json:"iops"`
	}
	var report struct {
		Jobs []struct {
			Error       int `json:"error"`
			Read, Write way
		} `json:"jobs"`
	}
	if start := bytes.IndexByte(data, '{'); start > 0 { // after its notes
		data = data[start:]
	}
	if err := json.Unmarshal(data, &report); err != nil {
		return 0, fmt.Errorf("report of fio: %w", err)
	}
	if len(report.Jobs) != 1 {
		return 0, fmt.Errorf("report of fio: %d jobs", len(report.Jobs))
	}
	job := report.Jobs[0]
	if job.Error != 0 {
		return 0, fmt.Errorf("report of fio: %w", syscall.Errno(job.Error))
	}
	if perSecond = job.Read.IOPS; l.write {
		perSecond = job.Write.IOPS
	}
	if perSecond <= 0 {
		return 0, errors.New("nothing was done: it takes more time")
	}
	return perSecond, nil
}

// The request sizes of a calibration, in bytes, and its queue depths. The depth of operations is
// raised for as long as that gains a twentieth.
const (
	smallRequest = 4 << 10
	largeRequest = 128 << 10
	smallDepth   = 16
	mostDepth    = 256
	bytesDepth   = 16
	worthwhile   = 1.05
)

// figures measures a disk, each figure for the time each and by itself. file is a scratch file on
// the disk or the device itself, and is overwritten.
func figures(ctx context.Context, file *os.File, each time.Duration) (in api.CapacityRequest, err error) {
	run := func(size int, write bool, depth int) (n float64) {
		if err == nil {
			n, err = fio{size: size, write: write, depth: depth}.run(ctx, file, each)
		}
		return n
	}
	for _, x := range []struct {
		write           bool
		one, ops, bytes *uint64
	}{{false, &in.Depth1.ReadIOPS, &in.ReadIOPS, &in.ReadBytes}, {true, &in.Depth1.WriteIOPS, &in.WriteIOPS, &in.WriteBytes}} {
		one := run(smallRequest, x.write, 1)
		most, at := one, 1
		for depth := smallDepth; depth <= mostDepth && err == nil; depth *= 4 {
			n := run(smallRequest, x.write, depth)
			if n < worthwhile*most && depth > smallDepth {
				break
			}
			if n > most {
				most, at = n, depth
			}
		}
		// No disk transfers fewer bytes per second in large requests than in small ones,
		// but a measurement may show that.
		bytes := max(largeRequest*run(largeRequest, x.write, bytesDepth), smallRequest*most)
		*x.one, *x.ops, *x.bytes, in.Depth = uint64(one), uint64(most), uint64(math.Ceil(bytes)), max(in.Depth, at)
	}
	return in, err
}
