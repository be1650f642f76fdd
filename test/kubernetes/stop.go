package kubernetes

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// Stop ends everything of the cluster and removes its directory. It asks no program to end, so
// what pods have in the machine's own state, they remove before: delete them first.
func (c *Cluster) Stop() error {
	if err := c.kill(); err != nil {
		return err
	}
	return os.RemoveAll(c.dir)
}

// kill ends all processes of the cluster: its programs, which bear its mark, and those of its pods,
// which are in its cgroups. Namespaces, devices and mounts vanish with them. Then it removes the
// cgroups.
func (c *Cluster) kill() error {
	deadline := time.Now().Add(patience)
	for {
		pids := append(withVariable(c.mark()), c.inCgroups()...)
		if len(pids) == 0 {
			break
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("stop cluster %s: processes %v do not end", c.dir, pids)
		}
		for _, pid := range pids {
			unix.Kill(pid, unix.SIGKILL) // ESRCH: it has just ended
		}
		time.Sleep(20 * time.Millisecond)
	}
	var errs []error
	dirs := c.cgroups()
	slices.Reverse(dirs) // those below first
	for _, dir := range dirs {
		// A cgroup is busy until its last process has been reaped.
		err := unix.Rmdir(dir)
		for errors.Is(err, unix.EBUSY) && time.Now().Before(deadline) {
			time.Sleep(20 * time.Millisecond)
			err = unix.Rmdir(dir)
		}
		if err != nil && !errors.Is(err, unix.ENOENT) {
			errs = append(errs, fmt.Errorf("remove cgroup %s: %w", dir, err))
		}
	}
	return errors.Join(errs...)
}

// cgroups lists the cluster's cgroups in all hierarchies, each before those in it.
func (c *Cluster) cgroups() (list []string) {
	name := filepath.Base(c.dir)
	tops, _ := filepath.Glob(filepath.Join("/sys/fs/cgroup", "*", name)) // a good pattern
	for _, top := range append(tops, filepath.Join("/sys/fs/cgroup", name)) {
		filepath.WalkDir(top, func(path string, d fs.DirEntry, err error) error {
			if err == nil && d.IsDir() {
				list = append(list, path)
			}
			return nil // it may be gone by now
		})
	}
	return list
}

func (c *Cluster) inCgroups() (pids []int) {
	for _, dir := range c.cgroups() {
		text, _ := os.ReadFile(filepath.Join(dir, "cgroup.procs")) // it may be gone by now
		for line := range strings.Lines(string(text)) {
			if pid, err := parsePID([]byte(line)); err == nil {
				pids = append(pids, pid)
			}
		}
	}
	return pids
}

// withVariable lists the processes that were started with a variable, such as "A=b", except this
// one.
func withVariable(variable string) (pids []int) {
	environs, _ := filepath.Glob("/proc/[0-9]*/environ") // a good pattern
	for _, path := range environs {
		text, _ := os.ReadFile(path) // it may have ended
		if !slices.Contains(strings.Split(string(text), "\x00"), variable) {
			continue
		}
		if pid, err := parsePID([]byte(strings.Split(path, "/")[2])); err == nil && pid != os.Getpid() {
			pids = append(pids, pid)
		}
	}
	return pids
}
