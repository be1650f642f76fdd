package sandbox

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"

	"github.com/fairlead-project/fairlead/kernel/enter"
	"golang.org/x/sys/unix"
)

const (
	initVerb  = "sandbox-init"
	insideEnv = "FAIRLEAD_SANDBOX"
)

// Reexec turns this process into the first process of a sandbox if args, usually os.Args, begin with
// the program and the word sandbox-init. It then does not return. Otherwise it returns false. Call it
// first in main and TestMain.
func Reexec(args []string) (status int, ok bool) {
	if len(args) < 2 || args[1] != initVerb {
		return 0, false
	}
	// The maker waits on a pipe that is descriptor 3 here. A container engine passes no pipe, and its
	// runtime may use the number otherwise.
	var st unix.Stat_t
	if unix.Fstat(3, &st) == nil && st.Mode&unix.S_IFMT == unix.S_IFIFO {
		unix.Write(3, []byte{1})
		unix.Close(3)
	}
	for {
		unix.Pause()
	}
}

// Process is a program that runs in a sandbox. It is killed when the sandbox is destroyed, or when the
// process that started it ends in any way.
type Process = enter.Process

// Start runs cmd in the sandbox. The process starts in the sandbox's cgroups and network namespace, and
// runs only on cpus if there are any. The caller fills in cmd; of its SysProcAttr Start uses only
// Pdeathsig. The caller waits through the Process, not through cmd.
func (b *Box) Start(cmd *exec.Cmd, cpus ...int) (*Process, error) {
	place := enter.Place{Proc: b.host.roots.Proc, Groups: b.dirs, NetNS: b.ns}
	if cmd.Env == nil {
		cmd.Env = os.Environ()
	}
	cmd.Env = append(cmd.Env, insideEnv+"="+b.Name)
	p, err := place.Start(cmd, cpus...)
	if err != nil {
		return nil, fmt.Errorf("sandbox %s: %w", b.Name, err)
	}
	b.mu.Lock()
	b.procs = append(b.procs, p)
	gone := b.gone
	b.mu.Unlock()
	if gone {
		p.Kill()
		<-p.Done()
		return nil, fmt.Errorf("start %s in sandbox %s: sandbox is destroyed", cmd.Path, b.Name)
	}
	return p, nil
}

// Run runs cmd in the sandbox, as Start does, and waits until it ends. The error contains the
// standard error of the program.
func (b *Box) Run(ctx context.Context, cmd *exec.Cmd, cpus ...int) error {
	var said strings.Builder
	cmd.Stderr = &said
	p, err := b.Start(cmd, cpus...)
	if err != nil {
		return err
	}
	select {
	case <-ctx.Done():
		p.Kill()
		<-p.Done()
		return ctx.Err()
	case <-p.Done():
	}
	if err := p.Wait(); err != nil {
		return fmt.Errorf("run %s in sandbox %s: %w: %s", filepath.Base(cmd.Path), b.Name, err, strings.TrimSpace(said.String()))
	}
	return nil
}

// startInit starts the container's first process, which keeps its network namespace open.
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
	if b.net != nil {
		b.ns, err = os.Open(b.net.NetNS())
	} else {
		cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL, Cloneflags: unix.CLONE_NEWNET}
	}
	if err == nil {
		b.init, err = b.Start(cmd)
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

// Done returns a channel that is closed when the sandbox's first process ends; nil if it was adopted.
func (b *Box) Done() <-chan struct{} {
	if b.init == nil {
		return nil
	}
	return b.init.Done()
}
