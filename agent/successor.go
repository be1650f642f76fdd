package agent

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"

	"github.com/fairlead-project/fairlead/kernel/journal"
)

// ErrQueued means that another agent waits to take over already.
var ErrQueued = errors.New("another agent waits to take over already")

// successorFile is the file in the state directory by which an agent that waits and the one that
// works agree on who undoes what is in force. The lock on it is held by the agent that waits. It is
// empty unless the one that works was told to stop.
//
// The agent that stops writes to it first, and then looks at the lock. The one that gives up waiting
// releases the lock first, and then looks whether something was written. So at least one of them
// sees the other, and it never happens that each leaves the undoing to the other. If both undo, the
// second finds nothing to undo.
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
// stops cleanly. Succeeded waits until another agent comes, patience is over, or ctx ends.
func Succeeded(ctx context.Context, cfg Config, patience time.Duration) (bool, error) {
	f, err := openSuccession(cfg.StateDir)
	if err != nil {
		return false, fmt.Errorf("look for an agent that takes over: %w", err)
	}
	defer f.Close()
	if _, err := f.WriteAt([]byte("told to stop\n"), 0); err != nil {
		return false, fmt.Errorf("look for an agent that takes over: %w", err)
	}
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	for {
		switch err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); {
		case errors.Is(err, unix.EWOULDBLOCK):
			return true, nil
		case err != nil:
			return false, fmt.Errorf("look for an agent that takes over: %w", err)
		case ctx.Err() != nil:
			return false, nil
		}
		if err := unix.Flock(int(f.Fd()), unix.LOCK_UN); err != nil {
			return false, fmt.Errorf("look for an agent that takes over: %w", err)
		}
		select {
		case <-time.After(100 * time.Millisecond):
		case <-ctx.Done():
		}
	}
}

func openSuccession(dir string) (*os.File, error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, err
	}
	return os.OpenFile(filepath.Join(dir, successorFile), os.O_RDWR|os.O_CREATE|unix.O_NOFOLLOW, 0o600)
}

// queue locks f, or closes it. An agent that looks for its successor has the lock for a moment.
func queue(f *os.File) error {
	var err error
	for deadline := time.Now().Add(time.Second); ; time.Sleep(10 * time.Millisecond) {
		err = unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		if !errors.Is(err, unix.EWOULDBLOCK) {
			break
		}
		if time.Now().After(deadline) {
			err = ErrQueued
			break
		}
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
//
// The lock of the journal tells whether there is one: only root can open that, while any process in
// the host's network namespace can take the name by which agents notice each other, or fill its
// backlog.
func (s *Successor) Wait(ctx context.Context) error {
	// It outlives ctx where the agent that works was told to stop.
	waits, cancel := context.WithCancel(context.WithoutCancel(ctx))
	defer cancel()
	released, err := journal.WhenFree(waits, s.cfg.StateDir)
	if err != nil {
		return fmt.Errorf("wait to take over: %w", err)
	}
	select {
	case err = <-released:
	default:
		s.cfg.Log.Info("another agent works here; this one takes over when it stops")
		err = s.outlive(ctx, released)
	}
	if err != nil {
		return err
	}
	return s.alone(ctx)
}

// outlive waits until the agent that works has ended.
func (s *Successor) outlive(ctx context.Context, released <-chan error) error {
	select {
	case err := <-released:
		return err
	case <-ctx.Done():
	}
	if err := unix.Flock(int(s.file.Fd()), unix.LOCK_UN); err != nil {
		return fmt.Errorf("give up waiting: %w", err)
	}
	if !s.told() {
		return ctx.Err()
	}
	return <-released
}

// alone waits until no agent with another state directory works in this network namespace. That of
// this one may have released its journal a moment before its name.
func (s *Successor) alone(ctx context.Context) error {
	for told := false; ; told = true {
		name, err := alone(s.name, s.cfg.Roots.Proc, slog.New(slog.DiscardHandler)) // New logs
		if err == nil {
			return name.Close()
		}
		if !told {
			s.cfg.Log.Info("this one takes over when it stops", "err", err)
		}
		select {
		case <-time.After(100 * time.Millisecond):
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// told reports whether the agent that works was told to stop.
func (s *Successor) told() bool {
	info, err := s.file.Stat()
	return err == nil && info.Size() > 0
}

// untold notes that this agent, which holds the journal, was not told to stop.
func untold(dir string) error {
	err := os.Truncate(filepath.Join(dir, successorFile), 0)
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	return err
}

// Close makes room for the next that waits.
func (s *Successor) Close() error { return s.file.Close() }
