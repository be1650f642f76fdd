package agent

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/url"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/fairlead-project/fairlead/kernel"
	"github.com/fairlead-project/fairlead/kernel/journal"
	"github.com/fairlead-project/fairlead/kernel/probe"
	"github.com/fairlead-project/fairlead/kernel/qdisc"
)

// errQueued means that another agent is already waiting to take over.
var errQueued = errors.New("another agent waits to take over already")

// successorFile is the file in the state directory by which a waiting agent and the working agent
// agree on who undoes what is in force. The waiting agent holds the lock on it. The file is empty
// until the working agent is told to stop.
//
// An agent that stops first writes to the file, and then checks the lock. An agent that gives up
// waiting first releases the lock, and then checks for content. So at least one of them sees the
// other, and they never both leave the undoing to each other. If both undo, the second finds
// nothing.
//
// If the stopping agent sees that another waits, it writes which programs it has attached. It ends
// when the other has opened them, or after handTime. So the programs never stop working.
const successorFile = "successor"

// handTime bounds the wait for a successor that does not open the programs.
const handTime = 500 * time.Millisecond

// glance is the interval at which both agents read the file.
const glance = 20 * time.Millisecond

// told is the first line of the file once the working agent is told to stop. A line of JSON with
// its programs follows. held is the content once the waiting agent has opened them.
const (
	told = "told to stop\n"
	held = "programs held\n"
)

// Successor is an agent's place in the queue behind the agent that works on this host.
type Successor struct {
	cfg  Config
	file *os.File // carries the lock

	inherited *qdisc.Inherited // nil: nothing
}

// Succeed takes the place behind the agent that works on this host, or the first place if there is
// none. The caller calls Wait, makes its Agent by New, and then closes the Successor. Errors:
// probe.ErrKernel.
func Succeed(cfg Config) (*Successor, error) {
	if err := probe.Supported(); err != nil {
		return nil, fmt.Errorf("wait to take over: %w", err)
	}
	f, err := openLock(cfg.StateDir, successorFile, 0o700)
	if err == nil {
		err = queue(f)
	}
	if err != nil {
		return nil, fmt.Errorf("wait to take over: %w", err)
	}
	return &Successor{cfg: cfg, file: f}, nil
}

// New is [New] for an agent that has waited its turn. It keeps the previous agent's programs
// attached until this agent has attached its own.
func (s *Successor) New() (*Agent, error) {
	a, err := New(s.cfg)
	if err == nil && s.inherited != nil {
		a.ends.Inherit(s.inherited)
		s.inherited = nil
	}
	return a, err
}

// disinherit detaches the previous agent's programs that this one has not replaced.
func (a *Agent) disinherit() error {
	if a.ends == nil {
		return nil
	}
	if err := a.ends.Disinherit(); err != nil {
		return fmt.Errorf("detach programs of the agent before this one: %w", err)
	}
	return nil
}

// Succeeded reports whether another agent takes over from this one, which was told to stop. If so,
// this process must end as if it were killed, and the other agent adopts what it leaves. With true,
// an error means that its programs end before the other agent has attached its own. If not, this
// agent stops cleanly. Succeeded waits for another agent until patience is over or ctx ends.
func (a *Agent) Succeeded(ctx context.Context, patience time.Duration) (bool, error) {
	return succeeded(ctx, a.cfg.StateDir, patience, a.ends.Left)
}

func succeeded(ctx context.Context, dir string, patience time.Duration, left func() []qdisc.Left) (bool, error) {
	f, err := openLock(dir, successorFile, 0o700)
	if err != nil {
		return false, fmt.Errorf("look for an agent that takes over: %w", err)
	}
	defer f.Close()
	if err := put(f, told); err != nil {
		return false, fmt.Errorf("look for an agent that takes over: %w", err)
	}
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	for {
		switch err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); {
		case errors.Is(err, unix.EWOULDBLOCK):
			return true, hand(f, left())
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

// hand passes the list of attached programs to the successor, and waits until it holds them.
func hand(f *os.File, left []qdisc.Left) error {
	if len(left) == 0 {
		return nil
	}
	list, err := json.Marshal(left)
	if err == nil {
		err = put(f, told+string(list)+"\n")
	}
	if err != nil {
		return fmt.Errorf("hand over programs: %w", err)
	}
	for end := time.Now().Add(handTime); time.Now().Before(end); time.Sleep(glance) {
		if text, err := content(f); err != nil || strings.HasPrefix(text, held) {
			return err
		}
	}
	return errors.New("hand over programs: the agent that takes over does not open them: they end, until it attaches its own")
}

// take opens the programs that the stopping agent has listed. done reports whether the list was
// there; it is also true with an error.
func (s *Successor) take() (done bool, err error) {
	text, err := content(s.file)
	if err != nil {
		return true, err
	}
	list, found := strings.CutPrefix(text, told)
	if !found || !strings.HasSuffix(list, "\n") {
		return false, nil
	}
	var left []qdisc.Left
	if err := json.Unmarshal([]byte(list), &left); err != nil {
		return true, fmt.Errorf("read which programs are left: %w", err)
	}
	s.inherited, err = qdisc.Inherit(left)
	return true, errors.Join(err, put(s.file, held))
}

// put replaces the content of the file. A concurrent reader never sees the file empty if it had
// content before.
func put(f *os.File, text string) error {
	if _, err := f.WriteAt([]byte(text), 0); err != nil {
		return err
	}
	return f.Truncate(int64(len(text)))
}

func content(f *os.File) (string, error) {
	b, err := io.ReadAll(io.NewSectionReader(f, 0, mostTold))
	return string(b), err
}

// mostTold bounds the file: a program takes some 60 bytes.
const mostTold = 4 << 20

// queue locks f, or closes it. It retries, as a stopping agent locks f for a moment.
func queue(f *os.File) error {
	for deadline := time.Now().Add(time.Second); ; time.Sleep(10 * time.Millisecond) {
		err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		switch {
		case err == nil:
			return nil
		case !errors.Is(err, unix.EWOULDBLOCK):
			return errors.Join(err, f.Close())
		case time.Now().After(deadline):
			return errors.Join(errQueued, f.Close())
		}
	}
}

// Wait returns nil when no agent works on this host, so that the caller must. If ctx ends first, it
// returns the error of ctx, provided that the working agent continues or undoes its own changes. If
// the working agent was told to stop at the same moment, Wait returns nil after that agent's end,
// and the caller undoes its changes. Wait opens the programs of that agent before it ends.
func (s *Successor) Wait(ctx context.Context) error {
	look := time.NewTicker(glance)
	defer look.Stop()
	stopped, waiting, taken := ctx.Done(), false, false
	for {
		only, err := alone(s.cfg.Roots.Proc)
		switch {
		case err == nil:
			return only.Close()
		case !errors.Is(err, ErrTwo):
			return fmt.Errorf("wait to take over: %w", err)
		case !waiting:
			s.cfg.Log.Info("another agent works here; this one takes over when it stops", "why", err)
			waiting = true
		}
		select {
		case <-stopped:
			stopped = nil
			if err := unix.Flock(int(s.file.Fd()), unix.LOCK_UN); err != nil {
				return fmt.Errorf("give up waiting: %w", err)
			}
			if !s.told() {
				return ctx.Err()
			}
		case <-look.C:
		}
		if !taken {
			if taken, err = s.take(); err != nil {
				s.cfg.Log.Warn("programs of the agent that stops end before this one attaches its own", "err", err)
			}
		}
	}
}

// told reports whether the agent that works was told to stop.
func (s *Successor) told() bool {
	info, err := s.file.Stat()
	return err == nil && info.Size() > 0
}

// untold clears the note of a stop: this agent, which holds the journal, was not told to stop.
func untold(dir string) error {
	err := os.Truncate(filepath.Join(dir, successorFile), 0)
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	return err
}

// Close gives up the place, so that another agent can wait.
func (s *Successor) Close() error {
	var err error
	if s.inherited != nil {
		err = s.inherited.Close()
	}
	return errors.Join(err, s.file.Close())
}

// ErrTwo means that another agent works in this network namespace: the two would undo each other's
// qdiscs and offloads, whatever their state directories.
var ErrTwo = errors.New("another agent works in this network namespace")

// alone makes this process the only agent of its network namespace until the file is closed. The
// kernel releases the lock when the process ends; the file stays. Errors: ErrTwo.
func alone(proc string) (*os.File, error) {
	dir, ns, err := own(proc)
	var f *os.File
	if err == nil {
		f, err = openLock(dir, ns+".lock", 0o755)
	}
	if err != nil {
		return nil, fmt.Errorf("look for another agent in this network namespace: %w", err)
	}
	err = unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
	if errors.Is(err, unix.EWOULDBLOCK) {
		pid, _ := io.ReadAll(io.LimitReader(f, 20)) // empty if the other has only just taken the lock
		return nil, errors.Join(fmt.Errorf("%w: process %s", ErrTwo, pid), f.Close())
	}
	pid := ""
	if err == nil {
		pid, err = os.Readlink(filepath.Join(proc, "self")) // its PID in the host's PID namespace
	}
	if err == nil {
		err = put(f, pid)
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("lock this network namespace: %w", err), f.Close())
	}
	return f, nil
}

// own returns the directory for what belongs to a network namespace, and the inode of this one. The
// directory is /run/fairlead in the root of process 1: agents in containers meet there, and other
// containers cannot reach it. A process without access to that root uses its own.
func own(proc string) (dir, number string, err error) {
	var ns unix.Stat_t
	if err := unix.Stat(filepath.Join(proc, "self/ns/net"), &ns); err != nil {
		return "", "", err
	}
	root := filepath.Join(proc, "1/root")
	if unix.Access(root, unix.X_OK) != nil {
		root = "/"
	}
	return filepath.Join(root, "run/fairlead"), strconv.FormatUint(ns.Ino, 10), nil
}

// openLock opens a file for flock(2). It creates the file and its directory if they are missing.
func openLock(dir, name string, mode os.FileMode) (*os.File, error) {
	if err := os.MkdirAll(dir, mode); err != nil {
		return nil, err
	}
	return os.OpenFile(filepath.Join(dir, name), os.O_RDWR|os.O_CREATE|unix.O_NOFOLLOW, 0o600)
}

// openJournal opens the journal in the state directory, with a copy in /run/fairlead. The copy
// preserves an agent's changes if the state directory is damaged or removed.
func openJournal(cfg Config) (*journal.Journal, error) {
	second := ""
	if state, err := filepath.Abs(cfg.StateDir); err == nil {
		if dir, _, err := own(cfg.Roots.Proc); err == nil { // the journal works without the copy
			second = filepath.Join(dir, url.PathEscape(state))
		}
	}
	j, err := journal.Open(cfg.StateDir, second)
	if errors.Is(err, journal.ErrCorrupt) {
		cfg.Log.Error("journal was damaged; going on with the rest of it", "err", err)
		j, err = journal.Open(cfg.StateDir, second)
	}
	return j, err
}

// RestoreAlone undoes the matching changes that an agent has left. It finds them even if the
// journal was damaged or removed; those with fairlead's mark it finds without the copy, too. The error excludes the outcomes'. Errors: journal.ErrBusy if an agent has StateDir;
// journal.ErrVersion.
func RestoreAlone(cfg Config, match func(journal.Entry) bool) (out []journal.Outcome, err error) {
	cfg.Log = slog.New(slog.DiscardHandler)
	j, err := openJournal(cfg)
	if err != nil {
		return nil, err
	}
	if only, aerr := alone(cfg.Roots.Proc); aerr == nil { // no agent works with another state directory
		defer only.Close()
		err = kernel.Reclaim(cfg.Roots, j, shaper, poller)
	}
	out, _ = j.Restore(kernel.Opener(cfg.Roots), match)
	return out, errors.Join(err, kernel.Tidy(cfg.Roots, out), j.Close())
}
