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

	"github.com/fsnotify/fsnotify"
)

const sandboxSource = "sandbox"

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
	s, err := readStat(proc, pid)
	if err != nil {
		return Process{}, fmt.Errorf("process %d: %w", pid, err)
	}
	if s.ended {
		return Process{}, fmt.Errorf("process %d has ended: %w", pid, fs.ErrNotExist)
	}
	return Process{pid, s.start}, nil
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

// sandboxRelist is how often a source looks without an event: a sandbox of a killed process leaves none.
const sandboxRelist = time.Second

// sandboxSettle is how long events are gathered: a state takes a few steps, and sandboxes may come in
// bursts.
const sandboxSettle = 20 * time.Millisecond

// Sandboxes reports the sandboxes with state files in dir, of any process. proc is where proc is
// mounted. The directory need not exist.
func Sandboxes(proc, dir string) Source { return sandboxes{proc, dir} }

type sandboxes struct{ proc, dir string }

func (s sandboxes) Name() string { return sandboxSource }

func (s sandboxes) Run(ctx context.Context, publish func(Report)) error {
	tick := time.NewTicker(sandboxRelist)
	defer tick.Stop()
	// Without a watcher (too many of them on this host) only the ticks remain.
	var events <-chan fsnotify.Event
	watch := func() {}
	if w, err := fsnotify.NewBufferedWatcher(1024); err == nil {
		defer w.Close()
		events = w.Events
		// Again and again: the directory may come later, or go and come.
		watch = func() { w.Add(s.dir) }
		go func() {
			for range w.Errors {
				// Events were lost; the next tick looks.
			}
		}()
	}
	files := &states{dir: s.dir}
	first := true
	var last Report
	for {
		watch()
		var now Report
		now.Records, now.Err = files.records(s.proc)
		if first || !reflect.DeepEqual(now, last) {
			publish(now)
			first, last = false, now
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-tick.C:
		case <-events:
			select {
			case <-ctx.Done():
				return ctx.Err()
			case <-time.After(sandboxSettle):
			}
			for len(events) > 0 {
				<-events
			}
		}
	}
}

// states are the state files of a directory. A file is read again only when it is replaced: a state
// is always written as a new file.
type states struct {
	dir   string
	known map[string]knownState // by the name of the file
	reads int
}

type knownState struct {
	Sandbox
	info fs.FileInfo
	ok   bool // it is a state
}

// read reads the state files. It skips files that are no states, and ignores a missing directory.
func (ss *states) read() ([]Sandbox, error) {
	entries, err := os.ReadDir(ss.dir)
	if errors.Is(err, fs.ErrNotExist) {
		ss.known = nil
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	var all []Sandbox
	now := make(map[string]knownState, len(entries))
	for _, e := range entries {
		name, ok := strings.CutSuffix(e.Name(), ".json")
		if !ok || !SandboxName.MatchString(name) {
			continue
		}
		info, err := e.Info()
		if err != nil {
			continue
		}
		k := ss.known[name]
		if k.info == nil || !os.SameFile(k.info, info) || !k.info.ModTime().Equal(info.ModTime()) || k.info.Size() != info.Size() {
			k = knownState{info: info}
			ss.reads++
			data, err := os.ReadFile(filepath.Join(ss.dir, e.Name()))
			k.ok = err == nil && json.Unmarshal(data, &k.Sandbox) == nil && k.Name == name
		}
		if now[name] = k; k.ok {
			all = append(all, k.Sandbox)
		}
	}
	ss.known = now
	return all, nil
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
