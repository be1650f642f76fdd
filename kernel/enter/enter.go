// Package enter starts programs inside containers: in the cgroups and the network namespace of a
// container, but with the host's files, users and processes.
//
// It makes neither cgroups nor namespaces, and writes nothing that has to be undone. The verb
// latency run and the sandboxes of lab call it.
package enter

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/fairlead-project/fairlead/kernel"
	"github.com/fairlead-project/fairlead/kernel/cgroup"
)

// Place is where programs are started.
type Place struct {
	Proc   string   // where proc is mounted
	Groups []Group  // one for each tree
	NetNS  *os.File // nil: the caller's
}

// Of returns the place of a process. The caller closes it. Errors match fs.ErrNotExist if the
// process has ended.
func Of(roots kernel.Roots, pid int) (Place, error) {
	layout, err := cgroup.Detect(roots.Proc, roots.Cgroup)
	if err != nil {
		return Place{}, err
	}
	if layout.V2 == "" {
		return Place{}, errors.New("no cgroup v2 tree is mounted")
	}
	return In(roots.Proc, Trees(layout, roots.Cgroup), pid)
}

// In is Of with the trees already known.
func In(proc string, trees []Tree, pid int) (Place, error) {
	p := Place{Proc: proc}
	for _, t := range trees {
		dir, err := t.Of(proc, strconv.Itoa(pid))
		if err != nil {
			return Place{}, err
		}
		p.Groups = append(p.Groups, Group{t, dir})
	}
	var err error
	p.NetNS, err = os.Open(filepath.Join(proc, strconv.Itoa(pid), "ns", "net"))
	return p, err
}

// Close releases the network namespace.
func (p Place) Close() error { return p.NetNS.Close() }

// Process is a program that was started in a place. It is killed when the process that started it
// ends, in whatever way.
type Process struct {
	PID  int
	cmd  *exec.Cmd
	done chan struct{}
	err  error
}

// Done is closed once the process has ended.
func (p *Process) Done() <-chan struct{} { return p.done }

// Wait waits for the end of the process and returns what [exec.Cmd.Wait] did.
func (p *Process) Wait() error {
	<-p.done
	return p.err
}

// Signal sends a signal; to a process that has ended it does nothing.
func (p *Process) Signal(sig os.Signal) error {
	err := p.cmd.Process.Signal(sig)
	if errors.Is(err, os.ErrProcessDone) {
		return nil
	}
	return err
}

// Kill ends the process; the caller may wait for Done.
func (p *Process) Kill() { p.Signal(unix.SIGKILL) }

// Start runs cmd in the place and, if cpus are given, only on those. The caller sets the command;
// of SysProcAttr only Pdeathsig and Cloneflags count, and without it the program is killed when
// this process ends. The caller waits through the Process, not through cmd.
func (p Place) Start(cmd *exec.Cmd, cpus ...int) (*Process, error) {
	process := &Process{cmd: cmd, done: make(chan struct{})}
	started := make(chan error, 1)
	// The child is killed when the *thread* that forked it ends. So one thread stays with each
	// child: it forks, returns to its own namespaces, and waits.
	go aside(func() error {
		err := p.fork(cmd, cpus)
		started <- err
		if err == nil {
			process.err = cmd.Wait()
		}
		close(process.done)
		return nil
	})
	if err := <-started; err != nil {
		return nil, fmt.Errorf("start %s: %w", cmd.Path, err)
	}
	process.PID = cmd.Process.Pid
	return process, nil
}

// fork moves the calling thread into the place, starts the command, which inherits everything
// from the thread, and moves the thread back.
func (p Place) fork(cmd *exec.Cmd, cpus []int) (err error) {
	var back []func() error
	defer func() {
		var errs []error
		for i := len(back) - 1; i >= 0; i-- {
			errs = append(errs, back[i]())
		}
		if berr := errors.Join(errs...); berr != nil && err == nil {
			cmd.Process.Kill()
			cmd.Wait()
			err = fmt.Errorf("leave it: %w", berr)
		}
	}()

	var mask unix.CPUSet
	if err := unix.SchedGetaffinity(0, &mask); err != nil {
		return fmt.Errorf("get affinity: %w", err)
	}
	back = append(back, func() error { return unix.SchedSetaffinity(0, &mask) })

	attr := &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if cmd.SysProcAttr != nil {
		attr.Pdeathsig, attr.Cloneflags = cmd.SysProcAttr.Pdeathsig, cmd.SysProcAttr.Cloneflags
	}
	for _, g := range p.Groups {
		if g.V2 {
			// clone3 can place the child; the thread need not move.
			dir, err := os.Open(g.Dir)
			if err != nil {
				return err
			}
			defer dir.Close()
			attr.UseCgroupFD, attr.CgroupFD = true, int(dir.Fd())
			continue
		}
		home, err := g.Of(p.Proc, "thread-self")
		if err != nil {
			return err
		}
		if err := moveThread(g.Dir); err != nil {
			return err
		}
		back = append(back, func() error { return moveThread(home) })
	}
	if p.NetNS != nil {
		home, err := os.Open("/proc/thread-self/ns/net")
		if err != nil {
			return err
		}
		back = append(back, func() error {
			defer home.Close()
			return unix.Setns(int(home.Fd()), unix.CLONE_NEWNET)
		})
		if err := unix.Setns(int(p.NetNS.Fd()), unix.CLONE_NEWNET); err != nil {
			return fmt.Errorf("enter network namespace: %w", err)
		}
	}
	if len(cpus) > 0 {
		var want unix.CPUSet
		for _, c := range cpus {
			want.Set(c)
		}
		if err := unix.SchedSetaffinity(0, &want); err != nil {
			return fmt.Errorf("set affinity to CPUs %v: %w", cpus, err)
		}
	}
	cmd.SysProcAttr = attr
	return cmd.Start()
}

// aside runs fn on a thread that ends with it, so that fn may leave the thread in any state.
func aside(fn func() error) error {
	done := make(chan error, 1)
	go func() {
		runtime.LockOSThread()
		if unix.Gettid() == unix.Getpid() {
			// The first thread cannot end, and /proc/self describes it. While it is locked here,
			// the next goroutine gets another.
			done <- aside(fn)
			runtime.UnlockOSThread()
			return
		}
		done <- fn()
	}()
	return <-done
}

// Tree is one mounted cgroup hierarchy.
type Tree struct {
	Mount      string
	V2         bool
	Controller string // name of a v1 tree in /proc/PID/cgroup; "" for v2
}

// Group is a directory in a tree.
type Group struct {
	Tree
	Dir string
}

// Trees lists the hierarchies in which each container has a separate group, v2 first. root is where
// the v1 hierarchies are mounted.
func Trees(l cgroup.Layout, root string) []Tree {
	trees := []Tree{{Mount: l.V2, V2: true}}
	seen := map[string]bool{realPath(l.V2): true}
	for _, c := range []struct{ mount, controller string }{
		{l.CPU, "cpu"},
		{l.CPUSet, "cpuset"},
		{filepath.Join(root, "cpuacct"), "cpuacct"},
		{l.IO, "blkio"},
	} {
		if c.mount == "" || seen[realPath(c.mount)] {
			continue // absent, or mounted together with another
		}
		if _, err := os.Stat(filepath.Join(c.mount, "cgroup.procs")); err != nil {
			continue
		}
		seen[realPath(c.mount)] = true
		trees = append(trees, Tree{Mount: c.mount, Controller: c.controller})
	}
	return trees
}

func realPath(path string) string {
	if p, err := filepath.EvalSymlinks(path); err == nil {
		return p
	}
	return path
}

// Of returns the directory of a process in this tree; "thread-self" is the calling thread.
func (t Tree) Of(proc, pid string) (string, error) {
	data, err := os.ReadFile(filepath.Join(proc, pid, "cgroup"))
	if err != nil {
		return "", err
	}
	for line := range strings.Lines(string(data)) {
		f := strings.SplitN(strings.TrimSpace(line), ":", 3)
		// The v2 tree has the line 0::path, and "" for its controllers.
		if len(f) == 3 && slices.Contains(strings.Split(f[1], ","), t.Controller) {
			return filepath.Join(t.Mount, f[2]), nil
		}
	}
	return "", fmt.Errorf("%s/%s/cgroup: no controller %q", proc, pid, t.Controller)
}

// moveThread puts the calling thread alone into a v1 group.
func moveThread(dir string) error {
	f, err := os.OpenFile(filepath.Join(dir, "tasks"), os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	_, err = f.WriteString(strconv.Itoa(unix.Gettid()))
	return errors.Join(err, f.Close())
}
