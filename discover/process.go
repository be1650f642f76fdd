package discover

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/kernel/cgroup"
	"github.com/fairlead-project/fairlead/kernel/netdev"
)

const (
	userHZ   = 100      // the unit of times in proc, fixed in the kernel's ABI
	kthread  = 0x200000 // PF_KTHREAD
	maxProcs = 64       // processes of one cgroup that are looked at
	maxDirs  = 64       // cgroups below one that are looked at

	firstRetry = 25 * time.Millisecond // doubled at each failure
)

// process is the init process of a container. A pidfd holds it, so that data read by its number is
// known to be about it.
type process struct {
	pid     int
	fd      *os.File
	started time.Time
	start   uint64 // the same, as in proc
	cgroup  cgroup.Paths
	id      container.ID

	claimed bool        // by a record, in the current round
	exited  atomic.Bool // ended has returned true

	err      error // why it could not be opened or examined
	failures int
	retry    time.Time // when to try again, unless err means that it has gone
}

// openProcess opens a process and calls ended, from another goroutine, once that process has
// exited. The error matches fs.ErrNotExist if there is none.
func openProcess(proc string, pid int, boot time.Time, ended func()) (*process, error) {
	fd, err := unix.PidfdOpen(pid, unix.PIDFD_NONBLOCK)
	if errors.Is(err, unix.ESRCH) || errors.Is(err, unix.EINVAL) || errors.Is(err, unix.ENOENT) {
		err = fs.ErrNotExist // EINVAL, ENOENT: a thread, not a process
	}
	if err != nil {
		return nil, fmt.Errorf("open process %d: %w", pid, err)
	}
	p := &process{pid: pid, fd: os.NewFile(uintptr(fd), "pidfd")}
	st, err := readStat(proc, pid)
	if err != nil || p.ended() {
		p.close()
		return nil, fmt.Errorf("open process %d: %w", pid, errors.Join(err, fs.ErrNotExist))
	}
	p.start = st.start
	p.started = boot.Add(time.Duration(st.start) * (time.Second / userHZ))

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

// ended is gone, but asks the kernel. If it returns false, all that was read by number so far was
// about this process.
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

// stat is the part of /proc/PID/stat in use.
type stat struct {
	flags uint64
	start uint64 // ticks of userHZ since boot
	ended bool   // a zombie, or about to be none
}

func readStat(proc string, pid int) (stat, error) {
	b, err := readSmall(filepath.Join(proc, strconv.Itoa(pid), "stat"))
	if err != nil {
		return stat{}, err
	}
	return parseStat(b)
}

// parseStat reads the form of proc_pid_stat(5). The process chooses its name, the second field,
// which may hold blanks and parentheses.
func parseStat(b []byte) (stat, error) {
	end := bytes.LastIndexByte(b, ')')
	if end < 0 {
		return stat{}, errors.New("stat: no end of the name")
	}
	fields := strings.Fields(string(b[end+1:])) // from the third on
	if len(fields) < 20 {
		return stat{}, fmt.Errorf("stat: %d fields", len(fields)+2)
	}
	flags, err := strconv.ParseUint(fields[9-3], 10, 64)
	if err != nil {
		return stat{}, fmt.Errorf("stat: flags: %w", err)
	}
	start, err := strconv.ParseUint(fields[22-3], 10, 64)
	if err != nil {
		return stat{}, fmt.Errorf("stat: start time: %w", err)
	}
	// A year has 3.2e9 ticks; more than 100 of them would overflow a Duration.
	if start > 3e11 {
		return stat{}, fmt.Errorf("stat: start time %d", start)
	}
	return stat{flags, start, fields[0] == "Z" || fields[0] == "X"}, nil
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
		err = fs.ErrNotExist // a process, or a cgroup, that has gone meanwhile
	}
	return b, err
}

// bootTime returns when the host booted, by the present clock.
func bootTime(now func() time.Time) (time.Time, error) {
	var ts unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_BOOTTIME, &ts); err != nil {
		return time.Time{}, fmt.Errorf("read boot clock: %w", err)
	}
	return now().Add(-time.Duration(ts.Nano())).Round(0), nil // without the monotonic reading
}

// procsIn lists processes in the cgroup dir itself, kernel threads included, at most maxProcs.
func procsIn(dir string) ([]int, error) {
	b, err := readSmall(filepath.Join(dir, "cgroup.procs"))
	if err != nil && !errors.Is(err, unix.EOPNOTSUPP) { // a threaded cgroup
		return nil, err
	}
	return parseProcs(b), nil
}

func parseProcs(b []byte) []int {
	var pids []int
	for line := range strings.Lines(string(b)) {
		pid, err := strconv.Atoi(strings.TrimSuffix(line, "\n"))
		// 0 is a process outside of our pid namespace. A truncated number names no process, or a
		// wrong one, which its cgroup then reveals.
		if err != nil || pid <= 0 {
			continue
		}
		if pids = append(pids, pid); len(pids) == maxProcs {
			break
		}
	}
	return pids
}

// oldest picks the process that stands for a cgroup: the first one started, if possible with a
// network namespace of its own, in the topmost directory that has any. The error matches
// fs.ErrNotExist if the cgroup is empty or gone.
func oldest(proc, dir string, host uint64) (int, error) {
	dirs := []string{dir}
	for i := 0; i < len(dirs) && i < maxDirs; i++ {
		pids, err := procsIn(dirs[i])
		if err != nil && i == 0 {
			return 0, err
		}
		best, bestStart, bestOwn := 0, uint64(0), false
		for _, pid := range pids {
			st, err := readStat(proc, pid)
			if err != nil || st.flags&kthread != 0 {
				continue
			}
			ns, err := netdev.InodeOf(proc, pid)
			if err != nil {
				continue
			}
			own := ns != host
			if best == 0 || own && !bestOwn || own == bestOwn && st.start < bestStart {
				best, bestStart, bestOwn = pid, st.start, own
			}
		}
		if best != 0 {
			return best, nil
		}
		dirs = append(dirs, subdirs(dirs[i], maxDirs)...)
	}
	return 0, fmt.Errorf("no process in cgroup %s: %w", dir, fs.ErrNotExist)
}

// subdirs lists the cgroups directly below dir, at most so many.
func subdirs(dir string, most int) []string {
	d, err := os.Open(dir)
	if err != nil {
		return nil
	}
	defer d.Close()
	var dirs []string
	for len(dirs) < most {
		entries, _ := d.ReadDir(128) // what was read before an error still counts
		if len(entries) == 0 {
			break
		}
		for _, e := range entries {
			if e.IsDir() && len(dirs) < most {
				dirs = append(dirs, filepath.Join(dir, e.Name()))
			}
		}
	}
	return dirs
}
