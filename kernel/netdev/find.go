package netdev

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

// ErrNoNS means that no process and no bind mount leads to a namespace.
var ErrNoNS = errors.New("no path to network namespace")

// maxMountinfo bounds what is read of one mount table, which a container may
// fill as it likes.
const maxMountinfo = 4 << 20

// Find returns a path by which the network namespace with the given inode can
// be opened now: a bind mount (in /run/netns, say), which outlives processes,
// or proc/PID/ns/net. It reads all of proc in the worst case. The error matches
// [ErrNoNS] if there is none; a namespace may also be kept alive by an open
// file or a socket alone.
func Find(proc string, inode uint64) (string, error) {
	if path, ok := Mounted(proc, "self")[inode]; ok {
		return path, nil
	}
	d, err := os.Open(proc)
	if err != nil {
		return "", fmt.Errorf("find netns %d: %w", inode, err)
	}
	defer d.Close()
	for {
		// In portions: proc is long, and the answer is often near its start.
		names, err := d.Readdirnames(256)
		for _, name := range names {
			if _, err := strconv.Atoi(name); err != nil {
				continue
			}
			path := filepath.Join(proc, name, "ns", "net")
			if ino, ok := linkInode(path); ok && ino == inode {
				return path, nil
			}
		}
		if err != nil {
			return "", fmt.Errorf("find netns %d: %w", inode, ErrNoNS)
		}
	}
}

// Mounted returns the network namespaces that are bind-mounted in the mount
// namespace of a process (a PID, or "self"), by inode, with the path of each as
// it is seen from here. Docker's overlay networks, for one, are found in no
// other way: no process lives in them. What is mounted may be hidden by another
// mount, so that the path leads elsewhere. A process that has ended has none.
func Mounted(proc, pid string) map[uint64]string {
	f, err := os.Open(filepath.Join(proc, pid, "mountinfo"))
	if err != nil {
		return nil
	}
	defer f.Close()
	root := ""
	if pid != "self" {
		root = filepath.Join(proc, pid, "root")
	}
	found := make(map[uint64]string)
	sc := bufio.NewScanner(io.LimitReader(f, maxMountinfo))
	for sc.Scan() { // a table that cannot be read to its end still has a beginning
		if inode, dir, ok := parseMount(sc.Text()); ok && found[inode] == "" {
			found[inode] = root + dir
		}
	}
	return found
}

// parseMount reads a line of mountinfo (proc(5)) that is about a network
// namespace: its fourth field is "net:[inode]", its fifth the mount point.
func parseMount(line string) (inode uint64, dir string, ok bool) {
	if !strings.Contains(line, " - nsfs ") {
		return 0, "", false
	}
	fields := strings.SplitN(line, " ", 6)
	if len(fields) < 6 || !strings.HasPrefix(fields[4], "/") {
		return 0, "", false
	}
	inode, ok = parseNSLink(fields[3])
	return inode, unescape(fields[4]), ok
}

// unescape undoes the octal escapes of mountinfo.
func unescape(s string) string {
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

// InodeOf returns the inode of the network namespace of a process. An error
// matches fs.ErrNotExist if the process has ended.
func InodeOf(proc string, pid int) (uint64, error) {
	path := filepath.Join(proc, strconv.Itoa(pid), "ns", "net")
	target, err := os.Readlink(path)
	if err != nil {
		return 0, fmt.Errorf("netns of process %d: %w", pid, err)
	}
	ino, ok := parseNSLink(target)
	if !ok {
		return 0, fmt.Errorf("netns of process %d: unexpected link %q", pid, target)
	}
	return ino, nil
}

func linkInode(path string) (uint64, bool) {
	target, err := os.Readlink(path)
	if err != nil {
		return 0, false
	}
	return parseNSLink(target)
}

// parseNSLink reads the form "net:[4026531840]".
func parseNSLink(s string) (uint64, bool) {
	s, ok := strings.CutPrefix(s, "net:[")
	if !ok {
		return 0, false
	}
	s, ok = strings.CutSuffix(s, "]")
	if !ok {
		return 0, false
	}
	ino, err := strconv.ParseUint(s, 10, 64)
	return ino, err == nil
}
