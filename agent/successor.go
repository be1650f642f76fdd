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

// errQueued means that another agent waits to take over already.
var errQueued = errors.New("another agent waits to take over already")

// successorFile is the file in the state directory by which an agent that waits and the one that
// works agree on who undoes what is in force. The lock on it is held by the agent that waits. It is
// empty unless the one that works was told to stop.
//
// The agent that stops writes to it first, and then looks at the lock. The one that gives up waiting
// releases the lock first, and then looks whether something was written. So at least one of them
// sees the other, and it never happens that each leaves the undoing to the other. If both undo, the
// second finds nothing to undo.
//
// Once it has seen that another waits, the agent that stops writes which programs it has attached,
// and ends when the other has opened them, or handTime later. So they never stop working.
const successorFile = "successor"

// handTime bounds the wait for an agent that takes over and does not open the programs.
const handTime = 500 * time.Millisecond

// glance is how often the two look into the file.
const glance = 20 * time.Millisecond

// told is the first line of the file once the agent that works was told to stop. It is held when the
// one that waits has opened the programs, which follow in one line of JSON.
const (
	told = "told to stop\n"
	held = "programs held\n"
)

// Successor is an agent's place behind the one that works on this host.
type Successor struct {
	cfg  Config
	file *os.File // carries the lock

	inherited *qdisc.Inherited // nil: nothing
}

// Succeed takes the place behind the agent that works on this host, or the first place if none
// does. The caller waits for its turn, makes its Agent by New, and then closes the Successor. Errors:
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

// New is [New] for an agent whose turn has come. It keeps what the programs of the one before it do
// in force until it has attached its own.
func (s *Successor) New() (*Agent, error) {
	a, err := New(s.cfg)
	if err == nil && s.inherited != nil {
		a.ends.Inherit(s.inherited)
		s.inherited = nil
	}
	return a, err
}

// disinherit detaches the programs of the agent before this one that this one has not replaced.
func (a *Agent) disinherit() error {
	if a.ends == nil {
		return nil
	}
	if err := a.ends.Disinherit(); err != nil {
		return fmt.Errorf("detach programs of the agent before this one: %w", err)
	}
	return nil
}

// Succeeded reports whether another agent takes over from this one, which was told to stop. Then
// this process must end as if it were killed: the other one adopts what it leaves, with an error too,
// which says that its programs end before the other one has its own. Otherwise this one stops
// cleanly. Succeeded waits until another agent comes, patience is over, or ctx ends.
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

// hand tells the agent that takes over which programs are attached, and waits until it holds them.
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

// take opens the programs that the agent that stops has told of. done reports whether it has told,
// and is true with an error.
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

// put replaces the content of the file. An agent that reads it meanwhile sees at least that
// something is there, if something was.
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

// mostTold bounds the file: some 60 bytes for each program.
const mostTold = 4 << 20

// queue locks f, or closes it. An agent that looks for its successor has the lock for a moment.
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

// Wait returns nil when no agent works on this host, so that the caller has to. It returns the
// error of ctx if that ends first and the agent that works goes on, or undoes its changes itself.
// If that agent has been told to stop at the same moment, Wait returns nil after its end: the
// caller then undoes what it has left. Wait opens the programs of that agent before its end.
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

// untold notes that this agent, which holds the journal, was not told to stop.
func untold(dir string) error {
	err := os.Truncate(filepath.Join(dir, successorFile), 0)
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	return err
}

// Close makes room for the next that waits.
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
// kernel releases the lock with the process, however that ends; the file stays. Errors: ErrTwo.
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
		pid, _ := io.ReadAll(io.LimitReader(f, 20)) // nothing: it has only just taken the lock
		return nil, errors.Join(fmt.Errorf("%w: process %s", ErrTwo, pid), f.Close())
	}
	pid := ""
	if err == nil {
		pid, err = os.Readlink(filepath.Join(proc, "self")) // as the host counts
	}
	if err == nil {
		err = put(f, pid)
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("lock this network namespace: %w", err), f.Close())
	}
	return f, nil
}

// own returns the directory of what belongs to a network namespace, and the number of this one. It
// is /run/fairlead as process 1 sees it: agents in containers meet there, too, and no other container
// gets there. Where this process may not look through that one's root, its own has to do.
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

// openLock opens a file for flock(2), and makes it and its directory if they are missing.
func openLock(dir, name string, mode os.FileMode) (*os.File, error) {
	if err := os.MkdirAll(dir, mode); err != nil {
		return nil, err
	}
	return os.OpenFile(filepath.Join(dir, name), os.O_RDWR|os.O_CREATE|unix.O_NOFOLLOW, 0o600)
}

// openJournal opens the journal in the state directory, with a copy in /run/fairlead: what an agent has
// changed is found although its state was damaged or removed.
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

// RestoreAlone undoes the changes that match, which an agent has left; it finds them although the
// journal was damaged or removed, and those with fairlead's mark also without its copy. The error does
// not contain those of the outcomes. Errors: journal.ErrBusy if an agent has StateDir; journal.ErrVersion.
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
