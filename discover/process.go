package discover

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/kernel/cgroup"
	"github.com/fairlead-project/fairlead/kernel/netdev"
	"github.com/fairlead-project/fairlead/kernel/sched"
)

const (
	userHZ   = 100 // the unit of times in proc, fixed in the kernel's ABI
	maxProcs = 64  // processes examined in one cgroup
	maxDirs  = 64  // cgroups examined below one

	firstRetry = 25 * time.Millisecond // doubled at each failure
)

// process is the init process of a container. Its pidfd proves that data read by PID belongs to
// this process.
type process struct {
	pid     int
	fd      *os.File
	started time.Time
	start   uint64 // the same in clock ticks, as in proc
	cgroup  cgroup.Paths
	id      container.ID

	claimed bool        // a record refers to it in the current round
	exited  atomic.Bool // ended has returned true

	err      error // why it could not be opened or examined
	failures int
	retry    time.Time // time of the next attempt, unless err means that it has gone
}

// openProcess opens a process. It calls ended, from another goroutine, once the process has exited.
// The error matches fs.ErrNotExist if there is no such process.
func openProcess(proc string, pid int, boot time.Time, ended func()) (*process, error) {
	fd, err := unix.PidfdOpen(pid, unix.PIDFD_NONBLOCK)
	if errors.Is(err, unix.ESRCH) || errors.Is(err, unix.EINVAL) || errors.Is(err, unix.ENOENT) {
		err = fs.ErrNotExist // EINVAL, ENOENT: a thread, not a process
	}
	if err != nil {
		return nil, fmt.Errorf("open process %d: %w", pid, err)
	}
	p := &process{pid: pid, fd: os.NewFile(uintptr(fd), "pidfd")}
	st, err := sched.StatOf(proc, pid)
	if err != nil || p.ended() {
		p.close()
		return nil, fmt.Errorf("open process %d: %w", pid, errors.Join(err, fs.ErrNotExist))
	}
	p.start = st.Start
	p.started = boot.Add(time.Duration(st.Start) * (time.Second / userHZ))

	conn, err := p.fd.SyscallConn()
	if err != nil {
		p.close()
		return nil, fmt.Errorf("watch process %d: %w", pid, err)
	}
	go func() {
		// A pidfd becomes readable when its process exits. An error means that we have closed it.
		if conn.Read(func(fd uintptr) bool { return readable(int(fd)) }) == nil {
			p.exited.Store(true)
			ended()
		}
	}()
	return p, nil
}

// gone reports whether the process is known to have exited, or could not be opened at all.
func (p *process) gone() bool { return p.fd == nil || p.exited.Load() }

// ended is gone, but asks the kernel. If it returns false, everything read by PID so far belongs to
// this process.
func (p *process) ended() bool {
	if p.gone() {
		return true
	}
	conn, err := p.fd.SyscallConn()
	if err != nil {
		return true
	}
	gone := true
	err = conn.Control(func(fd uintptr) { gone = readable(int(fd)) })
	return gone || err != nil
}

func readable(fd int) bool {
	for {
		n, err := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, 0)
		if !errors.Is(err, unix.EINTR) {
			return n > 0
		}
	}
}

func (p *process) close() {
	if p.fd != nil {
		p.fd.Close()
	}
}

// readSmall reads at most 64 KiB of a file in proc or in a cgroup tree.
func readSmall(name string) ([]byte, error) {
	f, err := os.Open(name)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	b, err := io.ReadAll(io.LimitReader(f, 64<<10))
	if errors.Is(err, unix.ESRCH) || errors.Is(err, unix.ENODEV) {
		err = fs.ErrNotExist // a process or a cgroup that has gone since
	}
	return b, err
}

// bootTime returns when the host booted, according to the present wall clock.
func bootTime(now func() time.Time) (time.Time, error) {
	var ts unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_BOOTTIME, &ts); err != nil {
		return time.Time{}, fmt.Errorf("read boot clock: %w", err)
	}
	return now().Add(-time.Duration(ts.Nano())).Round(0), nil // without the monotonic reading
}

// oldest picks the process that represents a cgroup: the oldest in the topmost directory that has
// any, preferably one with its own network namespace. The error matches fs.ErrNotExist if the
// cgroup is empty or gone.
func oldest(proc, dir string, host uint64) (int, error) {
	dirs := []string{dir}
	for i := 0; i < len(dirs) && i < maxDirs; i++ {
		pids, err := cgroup.Procs(dirs[i], maxProcs)
		if err != nil && i == 0 {
			return 0, err
		}
		best, bestStart, bestOwn := 0, uint64(0), false
		for _, pid := range pids {
			st, err := sched.StatOf(proc, pid)
			if err != nil || st.Kernel {
				continue
			}
			ns, err := netdev.InodeOf(proc, pid)
			if err != nil {
				continue
			}
			own := ns != host
			if best == 0 || own && !bestOwn || own == bestOwn && st.Start < bestStart {
				best, bestStart, bestOwn = pid, st.Start, own
			}
		}
		if best != 0 {
			return best, nil
		}
		below, _ := cgroup.Children(dirs[i], maxDirs)
		dirs = append(dirs, below...)
	}
	return 0, fmt.Errorf("no process in cgroup %s: %w", dir, fs.ErrNotExist)
}
