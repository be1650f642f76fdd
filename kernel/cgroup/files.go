package cgroup

import (
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"
)

// maxKept is how many files a Files keeps open: five for each of two hundred containers on v1.
const maxKept = 1024

// Files reads the counters of cgroups that are looked at again and again. It keeps files open, 1024
// at most, because opening one costs ten times as much as reading it. The zero value is ready; a nil
// Files keeps none. It is not safe for concurrent use.
type Files struct{ open map[string]*os.File }

// Keep closes the files of all directories but these.
func (f *Files) Keep(dirs map[string]bool) {
	maps.DeleteFunc(f.open, func(path string, h *os.File) bool {
		if dirs[filepath.Dir(path)] {
			return false
		}
		h.Close()
		return true
	})
}

// has reports whether a file is open.
func (f *Files) has(path string) bool { return f != nil && f.open[path] != nil }

// read returns the content of a file, without white space around it.
func (f *Files) read(path string) (string, error) {
	if f.has(path) {
		text, err := readFrom(f.open[path])
		if err == nil {
			return text, nil
		}
		// Its cgroup was removed. There may be another one with that name.
		f.open[path].Close()
		delete(f.open, path)
	}
	h, err := file(path).open(unix.O_RDONLY)
	if err != nil {
		return "", fmt.Errorf("read cgroup file: %w", err)
	}
	text, err := readFrom(h)
	if f == nil || err != nil || len(f.open) >= maxKept {
		h.Close()
		return text, err
	}
	if f.open == nil {
		f.open = make(map[string]*os.File)
	}
	f.open[path] = h
	return text, nil
}

// readFrom reads a file from its beginning, at which the kernel makes the text anew.
func readFrom(h *os.File) (string, error) {
	b, err := io.ReadAll(io.NewSectionReader(h, 0, maxValue+1))
	if err != nil {
		return "", fmt.Errorf("read cgroup file: %w", gone(err))
	}
	if len(b) > maxValue {
		return "", fmt.Errorf("read cgroup file %s: longer than %d bytes", h.Name(), maxValue)
	}
	return strings.TrimSpace(string(b)), nil
}
