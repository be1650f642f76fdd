package cgroup

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/fairlead-project/fairlead/kernel/journal"
)

// KindFile is the journal kind of a cgroup file.
const KindFile = "file"

// maxValue bounds the value of a file, in bytes.
const maxValue = 64 << 10

// File returns the knob of one cgroup file with a single value, such as cpu.shares. path is
// absolute and has no symbolic link in it. Write takes the form in which the kernel shows the value
// ("max 100000" for cpu.max, "0-3,8" for cpuset.cpus), without the newline. Both methods return an
// error that matches journal.ErrGone when the cgroup has been removed.
//
// For files that hold a line for each device (io.max), use [Throttle]: they read back differently
// from what was written. Weights and quotas, which several features turn, have [WeightKnob] and
// [Quota].
func File(path string) journal.Knob { return file(path) }

// Open opens a knob of this package that an earlier process wrote into the journal. It refuses a
// path that is not clean or not below root, the directory above all hierarchies, and a file that
// does not have the kind.
func Open(root string, ref journal.Ref) (journal.Knob, error) {
	path, device := ref.Object, ""
	if ref.Kind == KindLine {
		path, device, _ = strings.Cut(path, " ")
	}
	root = filepath.Clean(root)
	if filepath.Clean(path) != path || path == root || !below(path, root) {
		return nil, fmt.Errorf("open knob %s %q: not a clean path below %s", ref.Kind, path, root)
	}
	dir, name := filepath.Dir(path), filepath.Base(path)
	switch {
	case ref.Kind == KindFile:
		return fileOf(path), nil
	case ref.Kind == KindGroup:
		return group(path), nil
	case ref.Kind == KindRT && name == rtFile:
		return rt(dir), nil
	case ref.Kind == KindSlices && name == threadsFile:
		return slicesOf(dir), nil
	case deviceNumber.MatchString(device) && IsThrottle(ref),
		device == usual && (name == "io.weight" || name == "io.bfq.weight"):
		return line{path, device}, nil
	}
	return nil, fmt.Errorf("open knob %s %q: no file of that kind", ref.Kind, ref.Object)
}

// fileOf opens the knob to which a file belongs: cpu.idle belongs to the weight's.
func fileOf(path string) journal.Knob {
	switch f := file(path); filepath.Base(path) {
	case weightFile, sharesFile:
		return weight{f}
	case idleFile:
		_, err := file(filepath.Join(filepath.Dir(path), sharesFile)).Read()
		k, _ := WeightKnob(filepath.Dir(path), err != nil)
		return k
	case bandFile, quotaFile:
		return quota{f}
	default:
		return f
	}
}

type file string

func (f file) Ref() journal.Ref { return journal.Ref{Kind: KindFile, Object: string(f)} }

func (f file) Read() (string, error) {
	return (*Files)(nil).read(string(f))
}

func (f file) Write(value string) error {
	h, err := f.open(unix.O_WRONLY | unix.O_TRUNC) // as a shell does: tests use files on a disk
	if err != nil {
		return fmt.Errorf("write cgroup file: %w", err)
	}
	defer h.Close()
	if value == "" {
		value = "\n" // the kernel does not see an empty write
	}
	if _, err := h.WriteString(value); err != nil {
		return fmt.Errorf("write %q to cgroup file: %w", value, gone(err))
	}
	return nil
}

// open follows no symbolic link anywhere in the path. Cgroup trees have none, so another user who
// may make directories must have made it.
func (f file) open(flags uint64) (*os.File, error) {
	path := string(f)
	if !filepath.IsAbs(path) || filepath.Clean(path) != path {
		return nil, fmt.Errorf("%q is not a clean absolute path", path)
	}
	fd, err := unix.Openat2(unix.AT_FDCWD, path, &unix.OpenHow{
		Flags:   flags | unix.O_CLOEXEC | unix.O_NONBLOCK, // a FIFO must not block us
		Resolve: unix.RESOLVE_NO_SYMLINKS | unix.RESOLVE_NO_MAGICLINKS,
	})
	if err != nil {
		return nil, gone(&os.PathError{Op: "open", Path: path, Err: err})
	}
	h := os.NewFile(uintptr(fd), path)
	info, err := h.Stat()
	if err == nil && !info.Mode().IsRegular() {
		err = fmt.Errorf("%s is not a regular file", path)
	}
	if err != nil {
		h.Close()
		return nil, err
	}
	return h, nil
}

// gone adds journal.ErrGone to the errors of a file if its cgroup was removed, before the file was
// opened or after.
func gone(err error) error {
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ENODEV) {
		return fmt.Errorf("%w: %w", journal.ErrGone, err)
	}
	return err
}

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

// readFrom reads a file from its beginning, where the kernel generates the text again.
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
