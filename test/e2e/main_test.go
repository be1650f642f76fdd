// Package e2e tests the real program from outside: it builds fairlead once, runs it as an agent
// with separate directories, sockets and network namespace, and observes it only through its
// commands and package api. It reads the agent's changes to the host from the kernel.
//
// An agent treats the network namespace in which it runs as the host's, and changes the devices
// there. So every agent here runs in a namespace that a test made; this machine's own devices are
// never touched.
package e2e

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/lab/load"
	"github.com/fairlead-project/fairlead/lab/sandbox"
)

// program is the path of the binary under test, laboratory the path of fairlead-lab.
var program, laboratory string

// askSelfVerb turns the test binary into a client inside a container.
const askSelfVerb = "e2e-ask-self"

// writeVerb turns the test binary into a process that waits for its disk.
const writeVerb = "e2e-write"

func TestMain(m *testing.M) {
	for _, reexec := range []func([]string) (int, bool){sandbox.Reexec, load.Reexec} {
		if status, ok := reexec(os.Args); ok {
			os.Exit(status)
		}
	}
	if len(os.Args) == 3 && os.Args[1] == askSelfVerb {
		os.Exit(askSelf(os.Args[2]))
	}
	if len(os.Args) == 2 && os.Args[1] == sandboxVerb {
		os.Exit(keepSandbox())
	}
	if len(os.Args) == 2 && os.Args[1] == confinedVerb {
		os.Exit(confined())
	}
	if len(os.Args) == 3 && os.Args[1] == writeVerb {
		fmt.Fprintln(os.Stderr, keepWriting(os.Args[2]))
		os.Exit(1)
	}
	os.Exit(buildAndRun(m))
}

func buildAndRun(m *testing.M) int {
	dir, err := os.MkdirTemp("/tmp", "fle2e-")
	if err == nil {
		defer os.RemoveAll(dir)
		err = os.Chmod(dir, 0o755) // it also runs without root
	}
	if err == nil {
		program, laboratory = filepath.Join(dir, "fairlead"), filepath.Join(dir, "fairlead-lab")
		cmd := exec.Command("go", "build", "-o", dir, "github.com/fairlead-project/fairlead/cmd/fairlead", "github.com/fairlead-project/fairlead/cmd/fairlead-lab")
		cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
		cmd.Stderr = os.Stderr
		err = cmd.Run()
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "build fairlead:", err)
		return 1
	}
	return testkit.Run(m)
}

// askSelf prints the agent's answer to the asking container.
func askSelf(socket string) int {
	c := api.Dial(socket)
	defer c.Close()
	self, err := c.Self(context.Background())
	if err != nil {
		fmt.Println(err)
		return 1
	}
	data, err := json.Marshal(self)
	if err != nil {
		fmt.Println(err)
		return 1
	}
	fmt.Printf("%s\n", data)
	return 0
}

// output is the result of a command of the program.
type output struct {
	out, err string
	status   int
}

func (o output) String() string {
	return fmt.Sprintf("exit status %d\n%s%s", o.status, o.out, o.err)
}

// fairlead runs the program in the test's own namespaces.
func fairlead(t *testing.T, args ...string) output {
	t.Helper()
	return run(t, exec.Command(program, args...), (*exec.Cmd).Start)
}

func run(t *testing.T, cmd *exec.Cmd, start func(*exec.Cmd) error) output {
	t.Helper()
	var out, errs bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errs
	// A command without an engine's address must not find this machine's own engine.
	cmd.Env = append(os.Environ(), "DOCKER_HOST=unix:///nonexistent/docker.sock")
	must(t, start(cmd))
	ended := make(chan struct{})
	var err error
	go func() { err = cmd.Wait(); close(ended) }()
	ends(t, cmd.Process.Pid, ended)
	if exit := (*exec.ExitError)(nil); err != nil && !errors.As(err, &exit) {
		t.Fatalf("run %s: %v", strings.Join(cmd.Args, " "), err)
	}
	return output{out.String(), errs.String(), cmd.ProcessState.ExitCode()}
}

// startAtOnce starts a command with precedence over all computing loads, where the kernel grants
// it. Beside loads on both CPUs Linux 6.18.44 may let a new thread wait for minutes
// (docs/limits.md), and clients are not the subject of a test.
func startAtOnce(cmd *exec.Cmd) error {
	runtime.LockOSThread() // a command inherits what its thread has
	defer runtime.UnlockOSThread()
	now := unix.SchedAttr{Size: unix.SizeofSchedAttr, Policy: unix.SCHED_RR, Priority: 1}
	if unix.SchedSetAttr(0, &now, 0) == nil {
		defer unix.SchedSetAttr(0, &unix.SchedAttr{Size: unix.SizeofSchedAttr, Policy: unix.SCHED_NORMAL}, 0)
	}
	return cmd.Start()
}

// startIn starts a command in a network namespace, which is killed with this process. ended is closed
// once the command has ended, with its error in err.
func startIn(t *testing.T, ns netns, cmd *exec.Cmd, err *error) (ended <-chan struct{}) {
	t.Helper()
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: unix.SIGKILL}
	started, done := make(chan error, 1), make(chan struct{})
	// The parent-death signal fires when the thread that forked the process ends, so that thread
	// stays.
	go ns.Do(func() error {
		defer close(done)
		failed := cmd.Start()
		if started <- failed; failed == nil {
			*err = cmd.Wait()
		}
		return failed
	})
	must(t, <-started)
	return done
}

// mustSay fails the test unless the command ended with the status and printed all of the words.
func mustSay(t *testing.T, o output, status int, words ...string) {
	t.Helper()
	testkit.Check(t, says(o, status, words...))
}

// says returns an error if a command did not end with the status or did not print one of the words.
func says(o output, status int, words ...string) error {
	if o.status != status {
		return fmt.Errorf("%v\nwant exit status %d", o, status)
	}
	for _, w := range words {
		if !strings.Contains(o.out+o.err, w) {
			return fmt.Errorf("%v\nwant it to say %q", o, w)
		}
	}
	return nil
}

// patience bounds operations that take milliseconds, so that they may take longer on a busy machine.
const patience = 90 * time.Second

// ends waits for the end of a process. If the process does not end, the test fails and logs where
// in the kernel its threads are.
func ends(t *testing.T, pid int, ended <-chan struct{}) {
	t.Helper()
	select {
	case <-ended:
		return
	case <-time.After(patience):
	}
	cmdline, _ := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
	stacks, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/stack", pid))
	var where strings.Builder
	for _, path := range stacks {
		comm, _ := os.ReadFile(filepath.Join(filepath.Dir(path), "comm"))
		stack, _ := os.ReadFile(path)
		fmt.Fprintf(&where, "%s, %s%s", filepath.Base(filepath.Dir(path)), comm, stack)
	}
	t.Fatalf("process %d, %q, does not end:\n%s", pid, cmdline, &where)
}

// await waits until try succeeds, and fails the test if it never does.
func await(t *testing.T, what string, try func() error) {
	t.Helper()
	if err := within(patience, try); err != nil {
		t.Fatalf("%s: %v", what, err)
	}
}

func within(limit time.Duration, try func() error) error {
	for deadline := time.Now().Add(limit); ; time.Sleep(5 * time.Millisecond) {
		err := try()
		if err == nil || time.Now().After(deadline) {
			return err
		}
	}
}

var must = testkit.Must
