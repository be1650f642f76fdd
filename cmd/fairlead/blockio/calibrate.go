package blockio

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/cmd/fairlead/verb"
	"github.com/fairlead-project/fairlead/cmd/internal/cli"
	"github.com/fairlead-project/fairlead/kernel"
	"github.com/fairlead-project/fairlead/kernel/block"
	"github.com/fairlead-project/fairlead/kernel/sched"
)

// calibration says how to measure a device.
type calibration struct {
	dir   string        // directory for a scratch file
	raw   bool          // write to the device itself
	yes   bool          // without asking first
	size  int64         // size of the file in MiB
	phase time.Duration // time for each figure

	realtime bool // also the profile of real-time budgets
}

func blockioCalibrateVerb(e verb.Env) *cobra.Command {
	var how calibration
	var headroom float64
	cmd := &cobra.Command{
		Use:   "calibrate DEVICE",
		Short: "Measure what a device can do, and tell the agent",
		Long: `Measure what a device can do with the load that costs it most: reads alone and writes
alone at random places, past the page cache. Two figures are of 4 KiB: one request at
a time, which is what a program with one thread gets, and 16, 64 and 256 at once, of
which the most counts: reservations share that. Bytes per second are of 128 KiB, 16 at
once. It takes half a minute, and needs fio. A disk may do less for longer (burst credits, a cache
that is full): --for 1m tells more of that.

The requests go to a scratch file in --scratch, a directory of a file system on the
device, of which nothing stays however this ends. Do it while nothing else uses the
device, and the CPUs are idle.

With --raw they go to the device itself, and what is on it is lost. A device is refused
that is mounted, is swap, is part of another one (LVM, RAID), or has a signature, such
as that of a file system or a partition table. Else you are asked for its name again,
unless you give --yes-destroy-data.

With --realtime also what real-time threads of some budgets do (SCHED_DEADLINE), one for
each CPU, beside processes that keep all CPUs busy: io.realtime=auto takes a budget from
that. The host is slow for these 12 figures. All threads end with this command.`,
		Example: `  fairlead io calibrate /dev/vdb --scratch /srv
  fairlead io calibrate /dev/vdc --raw      # whatever is on /dev/vdc is lost`,
		Args: cli.NArgs(1, 1, "DEVICE"),
	}
	out := cli.FormatFlag(cmd)
	cmd.Flags().StringVar(&how.dir, "scratch", "", "directory on the device for the scratch file")
	cmd.Flags().BoolVar(&how.raw, "raw", false, "read and WRITE the device itself: what is on it is lost")
	cmd.Flags().BoolVar(&how.yes, "yes-destroy-data", false, "with --raw: do not ask for the device's name again")
	cmd.Flags().Int64Var(&how.size, "size", 256, "size of the scratch file, in MiB")
	cmd.Flags().DurationVar(&how.phase, "for", 3*time.Second, "measure each figure for so long")
	cmd.Flags().BoolVar(&how.realtime, "realtime", false, "also measure the profile for io.realtime=auto, beside busy CPUs")
	busy := cmd.Flags().Bool("busy", false, "")
	hidden := cmd.Flags().MarkHidden("busy")
	cmd.Flags().Float64Var(&headroom, "headroom", 0.1, "part of it that is never reserved")
	return verb.Dialed(e, cmd, func(cmd *cobra.Command, c *api.Client, args []string) error {
		if *busy {
			return burn(cmd.Context())
		}
		if hidden != nil {
			return hidden
		}
		if (how.dir == "") != how.raw {
			return cli.Usagef("want either --scratch DIRECTORY or --raw")
		}
		if how.yes && !how.raw {
			return cli.Usagef("--yes-destroy-data is for --raw")
		}
		if how.size < 1 || how.size > 1<<20 || how.phase < 100*time.Millisecond || how.phase > time.Minute {
			return cli.Usagef("--size is 1 to %d, --for 100ms to 1m", 1<<20)
		}
		in, err := how.measure(cmd.Context(), e, args[0])
		if err != nil {
			return fmt.Errorf("measure %s: %w", args[0], err)
		}
		in.Headroom = headroom
		return showCapacity(cmd, c, e, out, in)
	})
}

// measure measures the figures of a device, and the profile.
func (how calibration) measure(ctx context.Context, e verb.Env, device string) (in api.CapacityRequest, err error) {
	disk, err := block.Open(kernel.Default().Sys, device)
	if err != nil {
		return in, err
	}
	if how.realtime && disk.Loop != "" {
		return in, errors.New("profile of real-time budgets: it is a loop device, whose work the kernel's workers do, which no budget is given to")
	}
	file, err := how.target(ctx, e, device, disk)
	if err != nil {
		return in, err
	}
	defer file.Close()
	if in, err = figures(ctx, file, how.phase); err != nil {
		return in, err
	}
	in.Device, in.Measured, in.Seconds = device, true, how.phase.Seconds()
	if how.realtime {
		in.Realtime, err = how.profile(ctx, device, file)
	}
	return in, err
}

// target opens the file to read and write: the device, claimed, or a scratch file on its disk. The
// caller closes it.
func (how calibration) target(ctx context.Context, e verb.Env, device string, disk block.Disk) (*os.File, error) {
	r := kernel.Default()
	_, missing := exec.LookPath("fio")
	if how.raw {
		file, err := block.Claim(r.Proc, r.Sys, device)
		if err != nil {
			return nil, err
		}
		if missing != nil {
			return nil, errors.Join(errNoFio, file.Close())
		}
		if how.yes {
			return file, nil
		}
		if err := confirm(ctx, e, device, disk); err != nil {
			return nil, errors.Join(err, file.Close())
		}
		return file, nil
	}
	on, err := block.Holding(r.Sys, how.dir)
	if errors.Is(err, os.ErrNotExist) {
		return nil, err
	}
	if err != nil || on != disk {
		return nil, fmt.Errorf("%s is not on %s", how.dir, disk.Name)
	}
	if missing != nil {
		return nil, errNoFio
	}
	return block.Scratch(ctx, how.dir, how.size)
}

// confirm asks the user to type a device's name.
func confirm(ctx context.Context, e verb.Env, device string, disk block.Disk) error {
	fmt.Fprintf(e.Stderr, "All that is on %s is lost (%s). Type %s to go on: ", cli.Show(device), cli.Show(disk.Identity()), cli.Show(device))
	answer := make(chan string, 1)
	go func() { // no signal interrupts a read from a terminal
		line, _ := bufio.NewReader(io.LimitReader(e.Stdin, 4096)).ReadString('\n')
		answer <- strings.TrimSpace(line)
	}()
	select {
	case <-ctx.Done():
		return ctx.Err()
	case a := <-answer:
		if a != device {
			return errors.New("nothing was written: its name was not typed again, and --yes-destroy-data was not given")
		}
		return nil
	}
}

// profile measures operations against budgets of real-time processes. Only these processes have the
// scheduling policy, and it ends with them, as do the burners: profile changes nothing on the host.
func (how calibration) profile(ctx context.Context, device string, file *os.File) (out []api.RealtimePoint, err error) {
	if err := sched.TryDeadline(); err != nil {
		return nil, fmt.Errorf("profile of real-time budgets: %w", err)
	}
	exe, err := os.Executable()
	if err != nil {
		return nil, fmt.Errorf("find own program: %w", err)
	}
	runtime.LockOSThread() // Pdeathsig is sent when this thread ends
	defer runtime.UnlockOSThread()
	cpus := runtime.NumCPU()
	for range 4 * cpus {
		cmd := exec.Command(exe, "io", "calibrate", "--busy", device)
		cmd.Stderr = os.Stderr
		cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
		if err := cmd.Start(); err != nil {
			return nil, fmt.Errorf("keep the CPUs busy: %w", err)
		}
		defer func() { cmd.Process.Kill(); cmd.Wait() }()
	}
	for _, budget := range []time.Duration{20, 50, 100, 200, 300, 400} {
		at := budget * time.Millisecond
		point := api.RealtimePoint{Budget: at.Seconds()}
		for write, to := range map[bool]*uint64{false: &point.ReadIOPS, true: &point.WriteIOPS} {
			inPeriod := at * budgetPeriod / time.Second // at is for each second
			rate, err := fio{size: smallRequest, write: write, depth: cpus, budget: inPeriod}.run(ctx, file, how.phase)
			if err != nil {
				return nil, fmt.Errorf("profile of real-time budgets, %v: %w", at, err)
			}
			*to = uint64(rate)
		}
		out = append(out, point)
	}
	return out, nil
}

// burn computes until ctx ends, at nice 19. So profile and fio still get CPU time, and fio's
// processes with a budget run before both.
func burn(ctx context.Context) error {
	if err := sched.BeNice(19); err != nil {
		return err
	}
	for ctx.Err() == nil {
	}
	return ctx.Err()
}

// errNoFio is the error of a host without fio, which generates the load of io calibrate.
var errNoFio = errors.New("io calibrate needs fio: install the package fio")

// fio is a load on a file or device: reads or writes of one size at random offsets, with direct I/O.
type fio struct {
	size  int // bytes of a request
	write bool
	depth int // requests in flight

	// budget, if not 0, makes fio use one process per request, and gives each process this runtime
	// in every budgetPeriod under SCHED_DEADLINE.
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

// args returns fio's arguments. fio opens the file that it inherits.
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
// raised as long as each step gains a twentieth.
const (
	smallRequest = 4 << 10
	largeRequest = 128 << 10
	smallDepth   = 16
	mostDepth    = 256
	bytesDepth   = 16
	worthwhile   = 1.05
)

// figures measures the figures of a disk one by one, each for the time each. file is a scratch file
// on the disk or the device itself, and is overwritten.
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
