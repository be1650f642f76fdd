package rig

import (
	"errors"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// Ftrace is a recording of tracepoints by the kernel's own tracer, as trace-cmd makes it. It has
// its own instance, and reads and discards the instance's buffers.
type Ftrace struct {
	fs   int // tracefs, mounted nowhere
	name string
	stop chan struct{}
	done chan struct{}
	read uint64 // bytes
}

// ftracePrefix begins the names of all instances.
const ftracePrefix = "fairlead-"

// NewFtrace begins to record events, such as net/net_dev_queue. It returns an error for an event
// that this kernel does not have. The caller closes it.
func NewFtrace(events ...string) (_ *Ftrace, err error) {
	f := &Ftrace{name: "instances/" + ftracePrefix + strconv.Itoa(os.Getpid())}
	defer func() {
		if err != nil {
			err = fmt.Errorf("record by ftrace: %w", err)
		}
	}()
	if f.fs, err = openTracefs(); err != nil {
		return nil, err
	}
	if err := unix.Mkdirat(f.fs, f.name, 0o700); err != nil {
		return nil, errors.Join(fmt.Errorf("make instance: %w", err), unix.Close(f.fs))
	}
	for _, event := range events {
		if err := f.write("events/"+event+"/enable", "1"); err != nil {
			return nil, errors.Join(err, f.remove())
		}
	}
	f.stop, f.done = make(chan struct{}), make(chan struct{})
	go f.discard()
	return f, nil
}

// openTracefs returns a tracefs without a path: it mounts nothing on the host.
func openTracefs() (int, error) {
	fs, err := unix.Fsopen("tracefs", unix.FSOPEN_CLOEXEC)
	if err != nil {
		return -1, fmt.Errorf("open tracefs: %w", err)
	}
	defer unix.Close(fs)
	if err := unix.FsconfigCreate(fs); err != nil {
		return -1, fmt.Errorf("open tracefs: %w", err)
	}
	at, err := unix.Fsmount(fs, unix.FSMOUNT_CLOEXEC, 0)
	if err != nil {
		return -1, fmt.Errorf("open tracefs: %w", err)
	}
	return at, nil
}

// open opens a file of the instance.
func (f *Ftrace) open(name string, flags int) (fd int, err error) {
	if fd, err = unix.Openat(f.fs, f.name+"/"+name, flags|unix.O_CLOEXEC, 0); err != nil {
		return -1, &os.PathError{Op: "open", Path: name, Err: err}
	}
	return fd, nil
}

func (f *Ftrace) write(name, value string) error {
	fd, err := f.open(name, unix.O_WRONLY)
	if err != nil {
		return err
	}
	_, err = unix.Write(fd, []byte(value))
	return errors.Join(err, unix.Close(fd))
}

// discard reads the recording until stop is closed. It never waits for events: a wakeup for each of
// them would disturb the measurement.
func (f *Ftrace) discard() {
	defer close(f.done)
	var cpus []int
	for {
		fd, err := f.open(fmt.Sprintf("per_cpu/cpu%d/trace_pipe_raw", len(cpus)), unix.O_RDONLY|unix.O_NONBLOCK)
		if err != nil {
			break // there are no more
		}
		defer unix.Close(fd)
		cpus = append(cpus, fd)
	}
	const most = 256 // pages of a CPU at a time
	page := make([]byte, os.Getpagesize())
	for {
		select {
		case <-f.stop:
			return
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

func (f *Ftrace) remove() error {
	return errors.Join(unix.Unlinkat(f.fs, f.name, unix.AT_REMOVEDIR), unix.Close(f.fs))
}

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
	defer unix.Close(fs)
	fd, err := unix.Openat(fs, "instances", unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil
	}
	dir := os.NewFile(uintptr(fd), "instances")
	defer dir.Close()
	names, err := dir.Readdirnames(-1)
	if err != nil && !errors.Is(err, io.EOF) {
		return fmt.Errorf("sweep ftrace: %w", err)
	}
	var errs []error
	for _, name := range names {
		pid, ours := strings.CutPrefix(name, ftracePrefix)
		if n, err := strconv.Atoi(pid); ours && err == nil && unix.Kill(n, 0) == unix.ESRCH {
			errs = append(errs, unix.Unlinkat(fs, "instances/"+name, unix.AT_REMOVEDIR))
		}
	}
	return errors.Join(errs...)
}
