package netdev

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// ErrNoNS means that no process and no bind mount leads to a namespace.
var ErrNoNS = errors.New("no path to network namespace")

// BindDirs returns the directories in which Docker and ip-netns keep bind
// mounts of network namespaces. Docker's overlay networks are found there only:
// no process lives in them.
func BindDirs() []string { return []string{"/run/docker/netns", "/run/netns"} }

// maxNamed bounds how many names of one directory are looked at.
const maxNamed = 8192

// Find returns a path by which the network namespace with the given inode can
// be opened now: a bind mount from [BindDirs], which outlives processes, or
// proc/PID/ns/net. It reads all of proc in the worst case. The error matches
// [ErrNoNS] if there is none; a namespace may also be kept alive by an open
// file or a socket alone.
func Find(proc string, inode uint64) (string, error) {
	for _, dir := range BindDirs() {
		for name, ino := range Named(dir) {
			if ino == inode {
				return name, nil
			}
		}
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

// Named returns the network namespaces that are bind-mounted in dir, by path,
// with their inodes. A directory that does not exist has none.
func Named(dir string) map[string]uint64 {
	d, err := os.Open(dir)
	if err != nil {
		return nil
	}
	defer d.Close()
	names, _ := d.Readdirnames(maxNamed)
	found := make(map[string]uint64, len(names))
	for _, name := range names {
		path := filepath.Join(dir, name)
		var fs unix.Statfs_t
		var st unix.Stat_t
		if unix.Statfs(path, &fs) != nil || fs.Type != unix.NSFS_MAGIC || unix.Stat(path, &st) != nil {
			continue
		}
		found[path] = st.Ino
	}
	return found
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
