package enter

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"

	"golang.org/x/sys/unix"
)

// HostCgroups makes all cgroups of the host visible to a program in a container with the host's
// processes and cgroup tree. On cgroup v2 a runtime gives such a container its own cgroup namespace,
// in which proc shows the cgroups of others by paths that lead nowhere. HostCgroups joins the
// namespace of process 1, and executes the program again, since a thread's namespace is not shared by
// other threads. If the paths are already right, it does nothing. Call it before anything else.
func HostCgroups(proc string) error {
	init, err := os.ReadFile(filepath.Join(proc, "1/cgroup"))
	if err != nil {
		return fmt.Errorf("read cgroups of process 1: %w", err)
	}
	if !bytes.Contains(init, []byte(":/..")) {
		return nil // its paths are valid
	}
	name := filepath.Join(proc, "1/ns/cgroup")
	its, err := os.Readlink(name)
	if err != nil {
		return fmt.Errorf("read cgroup namespace of process 1: %w", err)
	}
	own, err := os.Readlink("/proc/thread-self/ns/cgroup")
	if err != nil {
		return fmt.Errorf("read own cgroup namespace: %w", err)
	}
	if its == own { // executing again would change nothing, forever
		return errors.New("process 1 is outside the root of its own cgroup namespace: paths of cgroups lead nowhere")
	}
	f, err := os.Open(name)
	if err != nil {
		return fmt.Errorf("open cgroup namespace of process 1: %w", err)
	}
	defer f.Close()
	runtime.LockOSThread() // execve keeps the namespaces of the calling thread
	defer runtime.UnlockOSThread()
	if err := unix.Setns(int(f.Fd()), unix.CLONE_NEWCGROUP); err != nil {
		return fmt.Errorf("enter cgroup namespace of process 1: %w", err)
	}
	if err := unix.Exec("/proc/self/exe", os.Args, os.Environ()); err != nil {
		return fmt.Errorf("execute %s again: %w", os.Args[0], err)
	}
	return nil
}
