package testkit

import (
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// Sweep removes what a run of the tests has left that was killed, before another
// run meets it: processes that bear the mark of one, and the cgroups of tests and
// sandboxes. A cgroup in which anything else runs stays. It returns what it has
// removed. The caller makes sure that no other run is under way; inside one, Sweep does
// nothing.
func Sweep() []string {
	if os.Getenv(runVar) != "" {
		return nil
	}
	return sweep(runVar+"=", "/sys/fs/cgroup", "fairlead-sandbox", "fairlead-test-*")
}

// sweep ends the processes whose environment has a variable that begins with mark,
// and removes cgroups with these names below root or the hierarchies in it.
func sweep(mark, root string, names ...string) (removed []string) {
	pids := withVariable(func(v string) bool { return strings.HasPrefix(v, mark) })
	for _, p := range pids {
		removed = append(removed, "process "+named(p))
		pid, _ := strconv.Atoi(p)    // a name in /proc
		unix.Kill(pid, unix.SIGKILL) // ESRCH: it has just ended
	}
	for end := time.Now().Add(patience); time.Now().Before(end); time.Sleep(10 * time.Millisecond) {
		if !slices.ContainsFunc(pids, running) {
			break
		}
	}
	for _, name := range names {
		here, _ := filepath.Glob(filepath.Join(root, name)) // the patterns are good ones
		below, _ := filepath.Glob(filepath.Join(root, "*", name))
		for _, top := range append(here, below...) {
			var dirs []string
			filepath.WalkDir(top, func(path string, d fs.DirEntry, err error) error {
				if err == nil && d.IsDir() {
					dirs = append(dirs, path)
				}
				return nil
			})
			slices.Reverse(dirs)
			for _, dir := range dirs {
				if os.Remove(dir) == nil {
					removed = append(removed, "cgroup "+dir)
				}
			}
		}
	}
	return removed
}

// running says whether a process holds on to anything; a zombie does not.
func running(pid string) bool {
	exe, err := os.Readlink(filepath.Join("/proc", pid, "exe"))
	return err == nil && exe != ""
}
