package agent

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// ErrQueued means that another agent waits to take over already.
var ErrQueued = errors.New("another agent waits to take over already")

// successorFile is the file in the state directory by which an agent that waits and the one that
// works agree on who undoes what is in force. The lock on it is held by the agent that waits. Its
// content is the number of the process that was last told to stop.
//
// The agent that stops writes its number first, and then looks at the lock. The one that gives up
// waiting releases the lock first, and then looks at the number. So at least one of them sees the
// other, and it never happens that each leaves the undoing to the other. If both undo, the second
// finds nothing to undo.
const successorFile = "successor"

// Successor is an agent's place behind the one that works on this host.
type Successor struct {
	cfg  Config
	name string   // by which agents notice each other
	file *os.File // carries the lock
}

// Succeed takes the place behind the agent that works on this host, or the first place if none
// does. The caller waits for its turn, makes its Agent, and then closes the Successor. Errors:
// ErrQueued.
func Succeed(cfg Config) (*Successor, error) {
	f, err := openSuccession(cfg.StateDir)
	if err == nil {
		err = queue(f)
	}
	if err != nil {
		return nil, fmt.Errorf("wait to take over: %w", err)
	}
	return &Successor{cfg: cfg, name: aloneSocket, file: f}, nil
}

// Succeeded reports whether another agent takes over from this process, which was told to stop.
// Then this one must end as if it were killed: the other one adopts what it leaves. Otherwise it
// stops cleanly.
func Succeeded(cfg Config) (bool, error) {
	f, err := openSuccession(cfg.StateDir)
	if err != nil {
		return false, fmt.Errorf("look for an agent that takes over: %w", err)
	}
	defer f.Close()
	if _, err := f.WriteAt(fmt.Appendf(nil, "%-10d\n", os.Getpid()), 0); err != nil {
		return false, fmt.Errorf("look for an agent that takes over: %w", err)
	}
	switch err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); {
	case errors.Is(err, unix.EWOULDBLOCK):
		return true, nil
	case err != nil:
		return false, fmt.Errorf("look for an agent that takes over: %w", err)
	}
	return false, nil
}

func openSuccession(dir string) (*os.File, error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, err
	}
	return os.OpenFile(filepath.Join(dir, successorFile), os.O_RDWR|os.O_CREATE|unix.O_NOFOLLOW, 0o600)
}

// queue locks f, or closes it.
func queue(f *os.File) error {
	err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
	if errors.Is(err, unix.EWOULDBLOCK) {
		err = ErrQueued
	}
	if err != nil {
		return errors.Join(err, f.Close())
	}
	return nil
}

// Wait returns nil when no agent works on this host, so that the caller has to. It returns the
// error of ctx if that ends first and the agent that works goes on, or undoes its changes itself.
// If that agent has been told to stop at the same moment, Wait returns nil after its end: the
// caller then undoes what it has left.
func (s *Successor) Wait(ctx context.Context) error {
	for {
		pid, err := other(s.name, s.cfg.Roots.Proc)
		if err != nil {
			s.cfg.Log.Warn("cannot tell whether another agent works here", "err", err)
		}
		if pid == 0 {
			return nil
		}
		s.cfg.Log.Info("another agent works here; this one takes over when it stops", "pid", pid)
		if err := s.outlive(ctx, pid); err != nil {
			return err
		}
	}
}

// outlive waits for the end of the process, after which nothing of it is left open.
func (s *Successor) outlive(ctx context.Context, pid int) error {
	fd, err := unix.PidfdOpen(pid, unix.PIDFD_NONBLOCK)
	if errors.Is(err, unix.ESRCH) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("wait for process %d: %w", pid, err)
	}
	process := os.NewFile(uintptr(fd), "pidfd")
	defer process.Close()
	conn, err := process.SyscallConn()
	if err != nil {
		return fmt.Errorf("wait for process %d: %w", pid, err)
	}
	ended := make(chan error, 1)
	go func() {
		// It becomes readable when the process has ended. An error means that it is closed.
		ended <- conn.Read(func(fd uintptr) bool {
			n, err := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, 0)
			return n > 0 || err != nil && !errors.Is(err, unix.EINTR)
		})
	}()
	select {
	case err := <-ended:
		return err
	case <-ctx.Done():
	}
	if err := unix.Flock(int(s.file.Fd()), unix.LOCK_UN); err != nil {
		return fmt.Errorf("give up waiting: %w", err)
	}
	if s.told() != pid {
		return ctx.Err()
	}
	return <-ended
}

// told returns the process that was last told to stop; 0: none was.
func (s *Successor) told() int {
	text, err := io.ReadAll(io.NewSectionReader(s.file, 0, 64))
	if err != nil {
		return 0
	}
	pid, _ := strconv.Atoi(strings.TrimSpace(string(text))) // 0 if there is none
	return pid
}

// Close makes room for the next that waits.
func (s *Successor) Close() error { return s.file.Close() }
