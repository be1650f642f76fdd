package policy

import (
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"
)

// Limits of a policy directory. A larger file, or one file more, is an error.
const (
	MaxFiles    = 256
	MaxFileSize = 64 << 10 // bytes
)

// file is the content of one policy file.
type file struct {
	name   string
	data   []byte
	writer writer
}

// writer says whether a file was open for writing when it was read, and so may be incomplete.
type writer int

const (
	noWriter writer = iota
	unknownWriter
	aWriter
)

// LoadDir reads the policy files of a directory, like [Store.Reload]. A missing directory is the
// empty policy. The error is a [Problems].
func LoadDir(dir string) (*Policy, error) {
	files, problems := readDir(dir)
	return load(files, problems)
}

func load(files []file, problems []Problem) (*Policy, error) {
	all := &Policy{}
	for _, f := range files {
		p, ps := ParseFile(f.name, f.data)
		problems = append(problems, ps...)
		if p != nil {
			all.files = append(all.files, f.name)
			all.rules = append(all.rules, p.rules...)
		}
	}
	if len(problems) > 0 {
		return nil, Problems(problems)
	}
	return all, nil
}

func readDir(dir string) (files []file, problems []Problem) {
	entries, err := os.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, []Problem{{File: dir, Reason: reasonOf(err)}}
	}
	var names []string
	for _, e := range entries {
		n := e.Name()
		if ext := filepath.Ext(n); (ext == ".yaml" || ext == ".yml") && !strings.HasPrefix(n, ".") {
			names = append(names, n)
		}
	}
	if len(names) > MaxFiles {
		return nil, []Problem{{File: dir, Reason: fmt.Sprintf("has %d policy files, more than %d", len(names), MaxFiles)}}
	}
	slices.Sort(names)
	for _, n := range names {
		name := filepath.Join(dir, n)
		data, w, err := readFile(name)
		if err != nil {
			problems = append(problems, Problem{File: name, Reason: reasonOf(err)})
			continue
		}
		files = append(files, file{name, data, w})
	}
	return files, problems
}

func readFile(name string) ([]byte, writer, error) {
	// A FIFO must not block the open: it is opened, and then refused.
	f, err := os.OpenFile(name, os.O_RDONLY|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, unknownWriter, err
	}
	defer f.Close()
	st, err := f.Stat()
	if err != nil {
		return nil, unknownWriter, err
	}
	if !st.Mode().IsRegular() {
		return nil, unknownWriter, errors.New("is not a regular file")
	}
	w := lease(f)
	data, err := io.ReadAll(io.LimitReader(f, MaxFileSize+1))
	if err == nil && len(data) > MaxFileSize {
		err = errTooLarge
	}
	return data, w, err
}

// lease asks the kernel for a read lease (fcntl(2), F_SETLEASE), which it refuses while the file is
// open for writing. An open for writing during the lease waits until f is closed; Go ignores the
// SIGIO that announces it. A network file system may report a writer without one.
func lease(f *os.File) writer {
	_, err := unix.FcntlInt(f.Fd(), unix.F_SETLEASE, unix.F_RDLCK)
	switch {
	case err == nil:
		return noWriter
	case errors.Is(err, unix.EAGAIN):
		return aWriter
	}
	// The file system has no leases, or the file is another user's and we have no CAP_LEASE.
	return unknownWriter
}

var errTooLarge = fmt.Errorf("is larger than %d bytes", MaxFileSize)

// reasonOf returns err without the path, because the Problem already names it.
func reasonOf(err error) string {
	var pe *fs.PathError
	if errors.As(err, &pe) {
		return pe.Op + ": " + pe.Err.Error()
	}
	return err.Error()
}

// digest distinguishes states of a directory.
func digest(files []file, problems []Problem) [sha256.Size]byte {
	h := sha256.New()
	for _, f := range files {
		fmt.Fprintf(h, "%q %d\n", f.name, len(f.data))
		h.Write(f.data)
	}
	for _, p := range problems {
		fmt.Fprintln(h, p)
	}
	return [sha256.Size]byte(h.Sum(nil))
}
