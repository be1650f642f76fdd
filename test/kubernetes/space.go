package kubernetes

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"syscall"
	"time"
)

// space is a network namespace and a mount namespace, held by a process that sleeps.
type space struct {
	dir   string
	mark  string // a variable of all its processes
	files bool   // its mounts differ from the machine's
	pid   int
}

// hold makes the namespaces. script is the shell's, with the space's directory as $0; it makes
// mounts there.
func (s *space) hold(ctx context.Context, script string) error {
	if err := os.Mkdir(s.dir, 0o755); err != nil {
		return err
	}
	log, err := os.Create(s.path("namespaces.log"))
	if err != nil {
		return err
	}
	defer log.Close()
	cmd := exec.Command("sh", "-ec", script+"\n: >\"$0/ready\"\nexec sleep infinity", s.dir)
	cmd.Env = append(os.Environ(), s.mark)
	cmd.Stdout, cmd.Stderr = log, log
	cmd.SysProcAttr = &syscall.SysProcAttr{Unshareflags: syscall.CLONE_NEWNET | syscall.CLONE_NEWNS, Setsid: true}
	if err := cmd.Start(); err != nil {
		return err
	}
	s.pid = cmd.Process.Pid
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	for {
		if _, err := os.Stat(s.path("ready")); err == nil {
			return os.WriteFile(s.path("pid"), []byte(strconv.Itoa(s.pid)), 0o644)
		}
		select {
		case err := <-ended:
			text, _ := os.ReadFile(log.Name())
			return fmt.Errorf("make namespaces: %w\n%s", err, text)
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(5 * time.Millisecond):
		}
	}
}

// open finds the namespaces that another process has made.
func (s *space) open() error {
	text, err := os.ReadFile(s.path("pid"))
	if err != nil {
		return err
	}
	s.pid, err = parsePID(text)
	return err
}

func (s *space) path(name string) string { return filepath.Join(s.dir, name) }

// command prepares a program in the space. With files of the space's own, its working directory
// there is the root.
func (s *space) command(ctx context.Context, args ...string) *exec.Cmd {
	// Not `ip netns exec`, which mounts another sysfs and so hides /sys/fs/cgroup.
	enter := []string{"--target", strconv.Itoa(s.pid), "--net"}
	if s.files {
		enter = append(enter, "--mount")
	}
	cmd := exec.CommandContext(ctx, "nsenter", slices.Concat(enter, []string{"--"}, args)...)
	cmd.Env = os.Environ()
	return cmd
}

// run runs a script of the shell's in the space, up to the first command that fails.
func (s *space) run(ctx context.Context, script string) (string, error) {
	return output(s.command(ctx, "sh", "-ec", script))
}

// start starts a program that runs until it is killed, with a log of its name.
func (s *space) start(name string, args ...string) error {
	log, err := os.Create(s.path(name + ".log"))
	if err != nil {
		return err
	}
	defer log.Close()
	cmd := s.command(context.Background(), args...)
	cmd.Env = append(cmd.Env, s.mark, "TMPDIR=/tmp", "NOTIFY_SOCKET=")
	cmd.Stdout, cmd.Stderr = log, log
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if err := cmd.Start(); err != nil {
		return err
	}
	go cmd.Wait() // so that its end leaves no zombie
	return nil
}
