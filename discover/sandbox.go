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

// Sandbox is the content of a sandbox's state file, Name.json. The maker of the sandbox writes it,
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

// Process identifies a process even after its PID is reused.
type Process struct {
	PID   int    `json:"pid"`
	Start uint64 `json:"start"` // clock ticks since boot, field 22 of proc_pid_stat(5)
}

// FindProcess returns the process with a PID. The error matches fs.ErrNotExist if it has ended,
// even if its parent has not waited for it yet.
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

const (
	sandboxPoll   = 50 * time.Millisecond // between checks for changes in an existing directory
	sandboxRelist = time.Second           // between lists, as killing a sandbox changes nothing in the directory
)

// Sandboxes reports the sandboxes that have state files in dir, whichever process made them. proc
// is where proc is mounted. The directory need not exist.
func Sandboxes(proc, dir string) Source { return sandboxes{proc, dir} }

type sandboxes struct{ proc, dir string }

func (s sandboxes) Name() string { return "sandbox" }

func (s sandboxes) Run(ctx context.Context, publish func(Report)) error {
	var last Report
	var listed, changed time.Time
	for {
		info, err := os.Stat(s.dir)
		there := err == nil
		if first := listed.IsZero(); first || there && !info.ModTime().Equal(changed) || time.Since(listed) >= sandboxRelist {
			if there {
				changed = info.ModTime()
			}
			var now Report
			now.Records, now.Err = s.records()
			if first || !reflect.DeepEqual(now, last) {
				publish(now)
				last = now
			}
			listed = time.Now()
		}
		pause := sandboxRelist
		if there {
			pause = sandboxPoll
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(pause):
		}
	}
}

// ReadSandboxes reads the state files in a directory. It skips files that are not state files, and
// treats a missing directory as empty.
func ReadSandboxes(dir string) (all []Sandbox, err error) {
	entries, err := os.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	for _, e := range entries {
		var s Sandbox
		name, ok := strings.CutSuffix(e.Name(), ".json")
		if data, err := os.ReadFile(filepath.Join(dir, e.Name())); ok && err == nil && json.Unmarshal(data, &s) == nil && s.Name == name && SandboxName.MatchString(name) {
			all = append(all, s)
		}
	}
	return all, err
}

// records returns the containers with a live first process.
func (s sandboxes) records() (rs []Record, err error) {
	all, err := ReadSandboxes(s.dir)
	for _, b := range all {
		if !b.Bare && b.Init.Alive(s.proc) {
			rs = append(rs, Record{PID: b.Init.PID, Name: b.Name, Image: b.Image, Labels: b.Labels})
		}
	}
	return rs, err
}
