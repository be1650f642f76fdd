package sandbox

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/fairlead-project/fairlead/discover"
	"github.com/fairlead-project/fairlead/kernel"
	"golang.org/x/sys/unix"
)

// process identifies a process also after its number is reused.
type process struct {
	PID   int    `json:"pid"`
	Start uint64 `json:"start"` // clock ticks since boot, field 22 of proc_pid_stat(5)
}

func findProcess(proc string, pid int) (process, error) {
	data, err := os.ReadFile(filepath.Join(proc, strconv.Itoa(pid), "stat"))
	if err != nil {
		return process{}, err
	}
	f := statFields(data)
	if len(f) < 20 {
		return process{}, fmt.Errorf("read %s/%d/stat: too short", proc, pid)
	}
	if f[0] == "Z" || f[0] == "X" {
		return process{}, fmt.Errorf("process %d has ended: %w", pid, fs.ErrNotExist)
	}
	start, err := strconv.ParseUint(f[19], 10, 64)
	if err != nil {
		return process{}, fmt.Errorf("read %s/%d/stat: %w", proc, pid, err)
	}
	return process{pid, start}, nil
}

// statFields returns the fields of proc_pid_stat(5) from the third (state) on. The second is the
// program's name, which may hold blanks and brackets.
func statFields(stat []byte) []string {
	s := string(stat)
	i := strings.LastIndexByte(s, ')')
	if i < 0 {
		return nil
	}
	return strings.Fields(s[i+1:])
}

func (p process) alive(proc string) bool {
	if p.PID == 0 {
		return false
	}
	now, err := findProcess(proc, p.PID)
	return err == nil && now == p
}

// state is the content of a sandbox's file.
type state struct {
	Name    string            `json:"name"`
	Image   string            `json:"image,omitempty"`
	Labels  map[string]string `json:"labels,omitempty"`
	Bare    bool              `json:"bare,omitempty"`
	Maker   process           `json:"maker"`
	Init    process           `json:"init"` // zero until it runs
	Cgroups []string          `json:"cgroups,omitempty"`

	file string
}

// create writes the state for the first time, which reserves the name.
func (s *state) create() error {
	data, err := json.Marshal(s)
	if err != nil {
		return err
	}
	// Written whole before it appears under its name.
	tmp, err := s.temp(data)
	if err != nil {
		return err
	}
	defer os.Remove(tmp)
	err = os.Link(tmp, s.file)
	if errors.Is(err, fs.ErrExist) {
		return ErrExists
	}
	return err
}

func (s *state) write() error {
	data, err := json.Marshal(s)
	if err != nil {
		return err
	}
	tmp, err := s.temp(data)
	if err != nil {
		return err
	}
	return os.Rename(tmp, s.file)
}

func (s *state) temp(data []byte) (string, error) {
	f, err := os.CreateTemp(filepath.Dir(s.file), "."+s.Name+".*.tmp")
	if err != nil {
		return "", err
	}
	_, err = f.Write(data)
	if err := errors.Join(err, f.Close()); err != nil {
		os.Remove(f.Name())
		return "", err
	}
	return f.Name(), nil
}

// states are the state files of a directory. A file is read again only when it is replaced: a state
// is always written as a new file.
type states struct {
	dir   string
	known map[string]knownState // by the name of the file
	reads int
}

type knownState struct {
	state
	info fs.FileInfo
	ok   bool // it is a state
}

// read reads the state files. It skips files that are no states, and ignores a missing directory.
func (ss *states) read() ([]state, error) {
	entries, err := os.ReadDir(ss.dir)
	if errors.Is(err, fs.ErrNotExist) {
		ss.known = nil
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	var all []state
	now := make(map[string]knownState, len(entries))
	for _, e := range entries {
		name, ok := strings.CutSuffix(e.Name(), ".json")
		if !ok || !validName.MatchString(name) {
			continue
		}
		info, err := e.Info()
		if err != nil {
			continue
		}
		k := ss.known[name]
		if k.info == nil || !os.SameFile(k.info, info) || !k.info.ModTime().Equal(info.ModTime()) || k.info.Size() != info.Size() {
			k = knownState{state: state{file: filepath.Join(ss.dir, e.Name())}, info: info}
			ss.reads++
			data, err := os.ReadFile(k.state.file)
			k.ok = err == nil && json.Unmarshal(data, &k.state) == nil && k.Name == name
		}
		if now[name] = k; k.ok {
			all = append(all, k.state)
		}
	}
	ss.known = now
	return all, nil
}

// records returns the containers of the directory with a live first process.
func (ss *states) records(proc string) ([]discover.Record, error) {
	all, err := ss.read()
	if err != nil {
		return nil, err
	}
	var rs []discover.Record
	for _, s := range all {
		if s.Bare || !s.Init.alive(proc) {
			continue
		}
		rs = append(rs, discover.Record{PID: s.Init.PID, Name: s.Name, Image: s.Image, Labels: s.Labels})
	}
	return rs, nil
}

// Sweep removes what sandboxes in dir have left behind after their maker ended: the cgroups with
// all that still runs in them, and the state files. It returns their names. Those of living makers,
// this process included, stay. roots may be zero.
func Sweep(roots kernel.Roots, dir string) (swept []string, err error) {
	if roots == (kernel.Roots{}) {
		roots = kernel.Default()
	}
	all, err := (&states{dir: dir}).read()
	if err != nil {
		return nil, fmt.Errorf("sweep sandboxes: %w", err)
	}
	var errs []error
	for _, s := range all {
		if s.Maker.alive(roots.Proc) {
			continue
		}
		if err := s.remove(roots); err != nil {
			errs = append(errs, fmt.Errorf("sweep sandbox %s: %w", s.Name, err))
			continue
		}
		swept = append(swept, s.Name)
	}
	os.Remove(dir) // fails while there is anything in it
	return swept, errors.Join(errs...)
}

func (s *state) remove(roots kernel.Roots) error {
	if s.Init.alive(roots.Proc) {
		if err := unix.Kill(s.Init.PID, unix.SIGKILL); err != nil && err != unix.ESRCH {
			return err
		}
	}
	for _, dir := range s.Cgroups {
		// Only below our own parent: a file decides what to kill and remove.
		rest, ok := strings.CutPrefix(dir, roots.Cgroup+"/")
		if !ok || dir != filepath.Clean(dir) || !slices.Contains(strings.Split(rest, "/"), Parent) || filepath.Base(dir) != s.Name {
			return fmt.Errorf("state file names %q, which is not a sandbox's cgroup", dir)
		}
	}
	if err := removeGroups(s.Cgroups); err != nil {
		return err
	}
	return os.Remove(s.file)
}
