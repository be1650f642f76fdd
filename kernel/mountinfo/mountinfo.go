// Package mountinfo parses the mount tables of processes (proc_pid_mountinfo(5)). A container
// chooses the contents of its table, so the package bounds what it reads, and does not follow the
// paths in it. Packages cgroup and netdev use it.
package mountinfo

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"strings"
)

// maxTable bounds the bytes read of one table.
const maxTable = 4 << 20

// ErrLong means that a table was not read to its end.
var ErrLong = errors.New("mount table is too long")

// Mount is one line of a table.
type Mount struct {
	Device string // number of the file system's device, as 254:1
	Root   string // of the mount within its file system, "/" for all of it
	Dir    string // where it is mounted, absolute, as the process sees it
	Type   string // of the file system
	Source string // what is mounted, as the file system reports it: "/dev/vda1"
	Super  string // options of the file system, separated by commas
}

// Read calls each with the mounts of a process (a PID, or "self"), in the order in which they were
// made, until it returns false. It skips lines that it cannot parse, and everything beyond the
// first 4 MiB. The error matches fs.ErrNotExist if there is no such process, and ErrLong if the
// table is longer than 4 MiB; the mounts read before an error are valid.
func Read(proc, pid string, each func(Mount) bool) error {
	name := filepath.Join(proc, pid, "mountinfo")
	f, err := os.Open(name)
	if err != nil {
		return err
	}
	defer f.Close()
	if err := scan(f, each); err != nil {
		return fmt.Errorf("read %s: %w", name, err)
	}
	return nil
}

func scan(r io.Reader, each func(Mount) bool) error {
	rest := &io.LimitedReader{R: r, N: maxTable + 1}
	sc := bufio.NewScanner(rest)
	sc.Buffer(make([]byte, 0, 4096), maxTable+2) // no line is too long
	for sc.Scan() {
		if m, ok := parse(sc.Text()); ok && !each(m) {
			return nil
		}
	}
	if err := sc.Err(); err != nil || rest.N > 0 {
		return err
	}
	return ErrLong
}

// parse reads one line: six fields, any number of optional ones, a hyphen, and
// three more. A blank inside of a field is escaped by the kernel.
func parse(line string) (Mount, bool) {
	before, after, ok := strings.Cut(line, " - ")
	fields := strings.SplitN(before, " ", 6)
	super := strings.SplitN(after, " ", 3)
	if !ok || len(fields) < 6 || len(super) < 3 || !strings.HasPrefix(fields[4], "/") {
		return Mount{}, false
	}
	return Mount{
		Device: fields[2], Root: unescape(fields[3]), Dir: unescape(fields[4]), Type: super[0], Source: unescape(super[1]), Super: super[2],
	}, true
}

// unescape undoes the octal escapes of blank, tab, newline and backslash.
func unescape(s string) string {
	if !strings.Contains(s, `\`) {
		return s
	}
	var b strings.Builder
	for i := 0; i < len(s); i++ {
		if s[i] == '\\' && i+3 < len(s) {
			if n, err := strconv.ParseUint(s[i+1:i+4], 8, 8); err == nil {
				b.WriteByte(byte(n))
				i += 3
				continue
			}
		}
		b.WriteByte(s[i])
	}
	return b.String()
}
