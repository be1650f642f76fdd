package sandbox

import (
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"runtime"
	"syscall"

	"golang.org/x/sys/unix"
)

const (
	initVerb  = "sandbox-init"
	insideEnv = "FAIRLEAD_SANDBOX"
)

// Reexec runs this program's part inside a sandbox if it was started for that: args, usually
// os.Args, begin with the program and the word sandbox-init. It then returns true and the exit
// status; else false. Call it first thing in main and TestMain.
func Reexec(args []string) (status int, ok bool) {
	if len(args) < 2 || args[1] != initVerb {
		return 0, false
	}
	// Descriptor 3, if it is a pipe, is the one that the maker waits on: a container engine passes
	// none, and the number may be in use by the runtime.
	var st unix.Stat_t
	if unix.Fstat(3, &st) == nil && st.Mode&unix.S_IFMT == unix.S_IFIFO {
		unix.Write(3, []byte{1})
		unix.Close(3)
	}
	for {
		unix.Pause()
	}
}

// Process is a program that runs in a sandbox. It is killed when the sandbox is destroyed, and when
// the process that started it ends in any way.
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

// Start runs cmd inside the sandbox: it is born in the sandbox's cgroups and network namespace,
// and, if cpus are given, may run on those only. The caller sets the command except for
// SysProcAttr, and waits through the Process, not through cmd.
func (b *Box) Start(cmd *exec.Cmd, cpus ...int) (*Process, error) {
	return b.start(cmd, 0, cpus)
}

func (b *Box) start(cmd *exec.Cmd, cloneflags uintptr, cpus []int) (*Process, error) {
	p := &Process{cmd: cmd, done: make(chan struct{})}
	started := make(chan error, 1)
	// The child is killed when the *thread* that forked it ends. So one thread stays with each
	// child: it forks, returns to its own namespaces, and waits.
	go aside(func() error {
		err := b.fork(cmd, cloneflags, cpus)
		started <- err
		if err == nil {
			p.err = cmd.Wait()
		}
		close(p.done)
		return nil
	})
	if err := <-started; err != nil {
		return nil, fmt.Errorf("start %s in sandbox %s: %w", cmd.Path, b.Name, err)
	}
	p.PID = cmd.Process.Pid
	b.mu.Lock()
	b.procs = append(b.procs, p)
	gone := b.gone
	b.mu.Unlock()
	if gone {
		p.Kill()
		<-p.done
		return nil, fmt.Errorf("start %s in sandbox %s: sandbox is destroyed", cmd.Path, b.Name)
	}
	return p, nil
}

// fork moves the calling thread into the sandbox, starts the command, which inherits everything
// from the thread, and moves the thread back.
func (b *Box) fork(cmd *exec.Cmd, cloneflags uintptr, cpus []int) (err error) {
	var back []func() error
	defer func() {
		var errs []error
		for i := len(back) - 1; i >= 0; i-- {
			errs = append(errs, back[i]())
		}
		if berr := errors.Join(errs...); berr != nil && err == nil {
			cmd.Process.Kill()
			cmd.Wait()
			err = fmt.Errorf("leave sandbox: %w", berr)
		}
	}()

	var mask unix.CPUSet
	if err := unix.SchedGetaffinity(0, &mask); err != nil {
		return fmt.Errorf("get affinity: %w", err)
	}
	back = append(back, func() error { return unix.SchedSetaffinity(0, &mask) })

	attr := &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL, Cloneflags: cloneflags}
	if cmd.SysProcAttr != nil {
		attr.Pdeathsig = cmd.SysProcAttr.Pdeathsig
	}
	for _, g := range b.dirs {
		if g.v2 {
			// clone3 can place the child; the thread need not move.
			dir, err := os.Open(g.dir)
			if err != nil {
				return err
			}
			defer dir.Close()
			attr.UseCgroupFD, attr.CgroupFD = true, int(dir.Fd())
			continue
		}
		home, err := g.of(b.host.roots.Proc, "thread-self")
		if err != nil {
			return err
		}
		if err := moveThread(g.dir); err != nil {
			return err
		}
		back = append(back, func() error { return moveThread(home) })
	}
	if cloneflags&unix.CLONE_NEWNET == 0 {
		home, err := os.Open("/proc/thread-self/ns/net")
		if err != nil {
			return err
		}
		back = append(back, func() error {
			defer home.Close()
			return unix.Setns(int(home.Fd()), unix.CLONE_NEWNET)
		})
		if err := unix.Setns(int(b.ns.Fd()), unix.CLONE_NEWNET); err != nil {
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
	if cmd.Env == nil {
		cmd.Env = os.Environ()
	}
	cmd.Env = append(cmd.Env, insideEnv+"="+b.Name)
	cmd.SysProcAttr = attr
	return cmd.Start()
}

// startInit starts the process that stands for the container and holds its namespace open.
func (b *Box) startInit() error {
	exe, err := os.Executable()
	if err != nil {
		return fmt.Errorf("find own program: %w", err)
	}
	r, w, err := os.Pipe()
	if err != nil {
		return err
	}
	defer r.Close()
	cmd := exec.Command(exe, initVerb, b.Name)
	cmd.Args[0] = "fairlead"
	cmd.ExtraFiles = []*os.File{w}
	var flags uintptr
	if b.net != nil {
		b.ns, err = os.Open(b.net.NetNS())
	} else {
		flags = unix.CLONE_NEWNET
	}
	if err == nil {
		b.init, err = b.start(cmd, flags, nil)
	}
	w.Close()
	if err != nil {
		return err
	}
	b.PID = b.init.PID
	if _, err := io.ReadFull(r, make([]byte, 1)); err != nil {
		return errors.New("the sandbox's first process ended (does main or TestMain call sandbox.Reexec?)")
	}
	if b.net != nil {
		return nil
	}
	if b.ns, err = os.Open(b.NetNS()); err != nil {
		return err
	}
	return b.loopbackUp()
}

// Done is closed once the sandbox's first process has ended, except for an adopted container.
func (b *Box) Done() <-chan struct{} {
	if b.init == nil {
		return nil
	}
	return b.init.done
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
