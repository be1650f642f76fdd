package discover

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"reflect"
	"regexp"
	"strings"
	"time"

	"github.com/fairlead-project/fairlead/kernel/journal"
	"github.com/fairlead-project/fairlead/kernel/sched"
)

// DefaultSandboxes is the default directory of the sandboxes' state files.
const DefaultSandboxes = "/run/fairlead/sandbox"

// SandboxName matches the names that a sandbox may have.
var SandboxName = regexp.MustCompile(`^[a-z0-9][a-z0-9_.-]{0,62}$`)

// Sandbox is the content of a sandbox's state file, Name.json. Whoever makes a sandbox writes it,
// always as a new file.
type Sandbox struct {
	Name    string            `json:"name"`
	Image   string            `json:"image,omitempty"`
	Labels  map[string]string `json:"labels,omitempty"`
	Bare    bool              `json:"bare,omitempty"` // no container
	Maker   Process           `json:"maker"`
	Init    Process           `json:"init"` // zero until it runs
	Cgroups []string          `json:"cgroups,omitempty"`
}

// Process identifies a process also after its number is reused.
type Process struct {
	PID   int    `json:"pid"`
	Start uint64 `json:"start"` // clock ticks since boot, field 22 of proc_pid_stat(5)
}

// FindProcess returns the process with a number. The error matches fs.ErrNotExist if it has ended,
// also where its parent has not yet waited for it.
func FindProcess(proc string, pid int) (Process, error) {
	s, err := sched.StatOf(proc, pid)
	if s.Ended || errors.Is(err, journal.ErrGone) {
		err = fs.ErrNotExist
	}
	if err != nil {
		return Process{}, fmt.Errorf("process %d: %w", pid, err)
	}
	return Process{pid, s.Start}, nil
}

// Alive reports whether the process still runs.
func (p Process) Alive(proc string) bool {
	if p.PID == 0 {
		return false
	}
	now, err := FindProcess(proc, p.PID)
	return err == nil && now == p
}

// ReadSandboxes reads the state files in a directory. It skips files that are no states, and
// ignores a missing directory.
func ReadSandboxes(dir string) ([]Sandbox, error) { return (&states{dir: dir}).read() }

const (
	sandboxPoll   = 50 * time.Millisecond // between two looks whether a directory that exists has changed
	sandboxRelist = time.Second           // between lists: a killed sandbox changes nothing there
)

// Sandboxes reports the sandboxes with state files in dir, of any process. proc is where proc is
// mounted. The directory need not exist.
func Sandboxes(proc, dir string) Source { return sandboxes{proc, dir} }

type sandboxes struct{ proc, dir string }

func (s sandboxes) Name() string { return "sandbox" }

func (s sandboxes) Run(ctx context.Context, publish func(Report)) error {
	files := &states{dir: s.dir}
	var last Report
	var listed time.Time
	for {
		changed := files.changed()
		if first := listed.IsZero(); first || changed || time.Since(listed) >= sandboxRelist {
			var now Report
			now.Records, now.Err = files.records(s.proc)
			if first || !reflect.DeepEqual(now, last) {
				publish(now)
				last = now
			}
			listed = time.Now()
		}
		pause := sandboxRelist
		if files.there {
			pause = sandboxPoll
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(pause):
		}
	}
}

// states are the state files of a directory, which are read again only after it has changed: a state
// is always written as a new file.
type states struct {
	dir   string
	there bool
	at    time.Time // of the last change of the directory; zero if another may have had the same time
	all   []Sandbox
	reads int
}

// changed reports whether the directory may have changed since read.
func (ss *states) changed() bool {
	info, err := os.Stat(ss.dir)
	if ss.there = err == nil; !ss.there {
		return ss.all != nil
	}
	return !info.ModTime().Equal(ss.at)
}

// read reads the state files. It skips files that are no states, and ignores a missing directory.
func (ss *states) read() ([]Sandbox, error) {
	info, err := os.Stat(ss.dir)
	if errors.Is(err, fs.ErrNotExist) {
		ss.at, ss.all = time.Time{}, nil
		return nil, nil
	}
	if err != nil || info.ModTime().Equal(ss.at) {
		return ss.all, err
	}
	began := time.Now()
	entries, err := os.ReadDir(ss.dir)
	if err != nil {
		return nil, err
	}
	ss.reads++
	ss.at, ss.all = time.Time{}, nil
	for _, e := range entries {
		var s Sandbox
		name, ok := strings.CutSuffix(e.Name(), ".json")
		if data, err := os.ReadFile(filepath.Join(ss.dir, e.Name())); ok && err == nil && json.Unmarshal(data, &s) == nil && s.Name == name && SandboxName.MatchString(name) {
			ss.all = append(ss.all, s)
		}
	}
	// The clock of files has ticks, in which the directory may change twice.
	if began.Sub(info.ModTime()) > sandboxRelist {
		ss.at = info.ModTime()
	}
	return ss.all, nil
}

// records returns the containers of the directory with a live first process.
func (ss *states) records(proc string) ([]Record, error) {
	all, err := ss.read()
	if err != nil {
		return nil, err
	}
	var rs []Record
	for _, s := range all {
		if s.Bare || !s.Init.Alive(proc) {
			continue
		}
		rs = append(rs, Record{PID: s.Init.PID, Name: s.Name, Image: s.Image, Labels: s.Labels})
	}
	return rs, nil
}
