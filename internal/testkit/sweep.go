package testkit

import (
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// Sweep removes what a killed run of the tests has left, before another run meets it: processes
// with the mark of a run, its cgroups, and the names of namespaces. A cgroup with any other process
// in it stays. Sweep returns what it has removed. The caller makes sure that no other run is in
// progress; inside one, Sweep does nothing.
func Sweep() []string {
	if os.Getenv(runVar) != "" {
		return nil
	}
	// Cgroups of tests and sandboxes, of an agent's threads that poll uplinks, whose namespaces
	// have gone with the run, and of a test's own runtimes.
	groups := []string{"flsandbox-*", "fairlead-test-*", "fairlead-uplink-*", "fldocker-*", "flcontainerd-*", "flpodman-*", "flkubernetes-*"}
	return append(sweep(runVar+"=", "/sys/fs/cgroup", groups...), sweepNames(netnsNames)...)
}

// sweepNames removes the names that NS.Bind gave to namespaces of processes that have ended.
func sweepNames(dir string) (removed []string) {
	names, _ := filepath.Glob(filepath.Join(dir, "flt-*-*")) // a good pattern
	for _, path := range names {
		pid, err := strconv.Atoi(strings.Split(filepath.Base(path), "-")[1])
		if err != nil || unix.Kill(pid, 0) == nil {
			continue
		}
		unix.Unmount(path, unix.MNT_DETACH) // EINVAL: there is only the file
		if os.Remove(path) == nil {
			removed = append(removed, "netns "+path)
		}
	}
	return removed
}

// sweep ends the processes with a variable in their environment that begins with mark, and removes
// cgroups with these names below root or the hierarchies in it.
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
			dirs, _ := cgroupsIn(top) // it may have gone
			for _, dir := range dirs {
				// Some of our processes may not have ended yet: the removal waits for them.
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
