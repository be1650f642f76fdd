package testkit

import (
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// Sweep removes what a run of the tests has left that was killed, before another
// run meets it: processes that bear the mark of one, and the cgroups that swept
// names. A cgroup in which anything else runs stays. It returns what it has
// removed. The caller makes sure that no other run is under way; inside one, Sweep does
// nothing.
func Sweep() []string {
	if os.Getenv(runVar) != "" {
		return nil
	}
	return sweep(runVar+"=", "/sys/fs/cgroup", swept()...)
}

// swept are the names of cgroups: of tests and sandboxes, of an agent's threads that poll
// uplinks, whose namespaces have gone with the run, and of a test's own Docker Engine.
func swept() []string {
	return []string{"fairlead-sandbox", "fairlead-test-*", "fairlead-uplink-*", "fldocker-*"}
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
	var kept []string
	for _, name := range names {
		here, _ := filepath.Glob(filepath.Join(root, name)) // the patterns are good ones
		below, _ := filepath.Glob(filepath.Join(root, "*", name))
		for _, top := range append(here, below...) {
			dirs, _ := cgroupsIn(top) // gone meanwhile
			for _, dir := range dirs {
				// Of ours some may not have ended yet: the removal waits for them.
				strangers := slices.DeleteFunc(processesIn(dir), func(p string) bool { return slices.Contains(pids, p) })
				if len(strangers) > 0 || slices.ContainsFunc(kept, func(k string) bool { return filepath.Dir(k) == dir }) {
					kept = append(kept, dir)
				} else if emptyAndRemove(dir) == nil {
					removed = append(removed, "cgroup "+dir)
				}
			}
		}
	}
	return removed
}
