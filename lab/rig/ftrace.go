package rig

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// Ftrace is a recording of tracepoints by the kernel's own tracer, as trace-cmd makes it. It has
// its own instance, and reads and discards the instance's buffers.
type Ftrace struct {
	fs   *os.File // tracefs, mounted nowhere
	dir  string   // of the instance
	stop chan struct{}
	done chan struct{}
	read uint64 // bytes
}

// ftracePrefix begins the names of all instances.
const ftracePrefix = "fairlead-"

// NewFtrace begins to record events, such as net/net_dev_queue. It returns an error for an event
// that this kernel does not have. The caller closes it.
func NewFtrace(events ...string) (_ *Ftrace, err error) {
	fs, err := openTracefs()
	if err != nil {
		return nil, fmt.Errorf("record by ftrace: %w", err)
	}
	f := &Ftrace{fs: fs, dir: filepath.Join(instances(fs), ftracePrefix+strconv.Itoa(os.Getpid())), stop: make(chan struct{}), done: make(chan struct{})}
	if err := os.Mkdir(f.dir, 0o700); err != nil {
		return nil, errors.Join(fmt.Errorf("record by ftrace: %w", err), fs.Close())
	}
	for _, event := range events {
		if err := os.WriteFile(filepath.Join(f.dir, "events", event, "enable"), []byte("1"), 0); err != nil {
			return nil, errors.Join(fmt.Errorf("record by ftrace: %w", err), f.remove())
		}
	}
	go f.discard()
	return f, nil
}

// openTracefs returns a tracefs that is mounted nowhere on the host. Its name is a path to it.
func openTracefs() (*os.File, error) {
	fs, err := unix.Fsopen("tracefs", unix.FSOPEN_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("open tracefs: %w", err)
	}
	defer unix.Close(fs)
	at := -1
	if err = unix.FsconfigCreate(fs); err == nil {
		at, err = unix.Fsmount(fs, unix.FSMOUNT_CLOEXEC, 0)
	}
	if err != nil {
		return nil, fmt.Errorf("open tracefs: %w", err)
	}
	return os.NewFile(uintptr(at), fmt.Sprintf("/proc/self/fd/%d", at)), nil
}

func instances(fs *os.File) string { return filepath.Join(fs.Name(), "instances") }

// discard reads the recording until stop is closed. It never waits for events: a wakeup for each of
// them would disturb the measurement.
func (f *Ftrace) discard() {
	defer close(f.done)
	var cpus []int
	for {
		pipe := filepath.Join(f.dir, "per_cpu", fmt.Sprintf("cpu%d", len(cpus)), "trace_pipe_raw")
		fd, err := unix.Open(pipe, unix.O_RDONLY|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
		if err != nil {
			break // there are no more
		}
		defer unix.Close(fd)
		cpus = append(cpus, fd)
	}
	const most = 256 // pages of a CPU at a time
	page := make([]byte, os.Getpagesize())
	for ended := false; !ended; {
		select {
		case <-f.stop:
			ended = true
		case <-time.After(10 * time.Millisecond):
		}
		for _, fd := range cpus {
			for range most {
				n, err := unix.Read(fd, page)
				if err != nil || n <= 0 {
					break
				}
				f.read += uint64(n)
			}
		}
	}
}

func (f *Ftrace) remove() error { return errors.Join(unix.Rmdir(f.dir), f.fs.Close()) }

// Close ends the recording, and returns its size in bytes.
func (f *Ftrace) Close() (read uint64, err error) {
	close(f.stop)
	<-f.done
	if err := f.remove(); err != nil {
		return f.read, fmt.Errorf("end ftrace: %w", err)
	}
	return f.read, nil
}

// sweepFtrace removes the instances of killed processes.
func sweepFtrace() error {
	fs, err := openTracefs()
	if err != nil {
		return nil // without tracefs there are none
	}
	defer fs.Close()
	left, _ := filepath.Glob(filepath.Join(instances(fs), ftracePrefix+"*"))
	var errs []error
	for _, dir := range left {
		_, pid, _ := strings.Cut(filepath.Base(dir), ftracePrefix)
		if n, err := strconv.Atoi(pid); err == nil && unix.Kill(n, 0) == unix.ESRCH {
			errs = append(errs, unix.Rmdir(dir))
		}
	}
	return errors.Join(errs...)
}
