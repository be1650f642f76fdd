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

// HostCgroups makes all cgroups of the host visible to a program in a container that has the host's
// processes and cgroup tree: on cgroup v2 a runtime gives it a cgroup namespace of its own, in which
// proc names the cgroups of others by paths that lead nowhere. It joins that of process 1, and
// executes the program again, since a namespace counts for one thread only. Where it sees process 1,
// it does nothing. Call it before anything else is done.
func HostCgroups(proc string) error {
	init, err := os.ReadFile(filepath.Join(proc, "1/cgroup"))
	if err != nil {
		return fmt.Errorf("read cgroups of process 1: %w", err)
	}
	if !bytes.Contains(init, []byte(":/..")) {
		return nil // its paths lead somewhere
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
	if its == own { // to execute again would change nothing, for ever
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
