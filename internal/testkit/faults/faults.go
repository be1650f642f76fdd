// Package faults lets single system calls of the product fail, to show what becomes of the host.
//
// A subject is a child of the test that executes the test's own binary and does what the test asks
// for: Apply, Remove. A seccomp filter hands the subject's calls to the test process, which counts
// those of an operation, and lets one of them fail or hang, ends the operation's context there, or
// kills the subject. The product has no hook for it. The kernel does not execute a call that fails so.
//
// It knows nothing of fairlead: package topology makes subjects of features. Only tests use it.
package faults

import (
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"regexp"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/fairlead-project/fairlead/internal/testkit"
	"golang.org/x/sys/unix"
)

// Fault is what happens to one call of an operation. The zero value is no fault.
type Fault struct {
	At     Point // the zero value: none
	Error  int   // which of the errors that this call can have, from 0; modulo their number
	Cancel bool  // the operation's context ends before the call, which then goes on
	Kill   bool  // the subject is killed in place of the call
	Hang   bool  // the operation's context ends before the call, which goes on once the operation has returned
}

func (f Fault) String() string {
	switch {
	case f.Cancel:
		return "the context ends"
	case f.Kill:
		return "kill -9"
	case f.Hang:
		return "a call that hangs"
	}
	return fmt.Sprintf("error %d", f.Error)
}

// Point is a call of an operation by what it is: how many others come before it differs a little
// from one run to the next.
type Point struct {
	Kind string // the name of the call, with N for each number
	Nth  int    // from 1, of those of its kind
}

// Call is one system call of an operation.
type Call struct {
	Name   string // with its object: "openat /proc/net/dev"
	At     Point
	Errors []unix.Errno
	own    bool // a file of the product's own, which may lie where calls wait and signals interrupt them
}

// Outcome is what became of an operation.
type Outcome struct {
	Err   string     // what the operation returned; "" for nil
	Died  string     // how the subject ended meanwhile; "" if it lives
	Met   *Call      // the call that met the fault; nil: there were fewer calls
	Errno unix.Errno // that the call returned
	Calls []Call     // all of them
}

// Held is what a subject holds: descriptors by kind, and goroutines.
type Held struct {
	Files      map[string]int
	Goroutines int
	Stacks     string
}

// Subject is the process with the product in it.
type Subject struct {
	t       testing.TB
	cmd     *exec.Cmd
	control *os.File
	enc     *json.Encoder
	replies chan reply // closed when the subject has ended
	output  *tail
	super   *supervisor
	waited  sync.Once
}

// patience bounds one operation.
const patience = time.Minute

// Start starts a subject, which passes arg to the function that Reexec was called with.
func Start(t testing.TB, arg any) *Subject {
	t.Helper()
	text, err := json.Marshal(arg)
	testkit.Must(t, err)
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	testkit.Must(t, err)
	ours, theirs := os.NewFile(uintptr(pair[0]), "control"), os.NewFile(uintptr(pair[1]), "control")
	s := &Subject{t: t, control: ours, enc: json.NewEncoder(ours), replies: make(chan reply, 1), output: &tail{}}
	s.cmd = exec.Command("/proc/self/exe", verb, string(text))
	// With a given number, the runtime does not look for the CPU quota, and no call is the runtime's.
	s.cmd.Env = append(os.Environ(), "GOMAXPROCS=4")
	s.cmd.Stdout, s.cmd.Stderr, s.cmd.ExtraFiles = s.output, s.output, []*os.File{theirs}
	s.cmd.SysProcAttr = &unix.SysProcAttr{Pdeathsig: unix.SIGKILL}
	started, ended := make(chan error), make(chan struct{})
	t.Cleanup(func() { close(ended) })
	go func() {
		runtime.LockOSThread() // the subject is killed when the thread that started it ends
		started <- s.cmd.Start()
		<-ended
	}()
	testkit.Must(t, <-started)
	theirs.Close()
	go s.read()
	t.Cleanup(s.end)
	r, ok := s.reply()
	if !ok || r.Err != "" {
		t.Fatalf("start a subject: %s\n%s", r.Err, s.output)
	}
	s.super, err = supervise(s.cmd.Process.Pid, r.Listener, s.cancel)
	testkit.Must(t, err)
	return s
}

// read receives the replies.
func (s *Subject) read() {
	defer close(s.replies)
	for dec := json.NewDecoder(s.control); ; {
		var r reply
		if dec.Decode(&r) != nil {
			return
		}
		if r.Cancelled {
			s.super.cancelled <- struct{}{}
			continue
		}
		s.replies <- r
	}
}

func (s *Subject) reply() (r reply, ok bool) {
	select {
	case r, ok = <-s.replies:
	case <-time.After(patience):
		s.cmd.Process.Signal(unix.SIGQUIT) // it prints its stacks
		<-s.replies
		s.output.Write([]byte("\nno reply\n"))
	}
	return r, ok
}

func (s *Subject) cancel() { s.enc.Encode(request{Cancel: true}) }

// Do lets the subject do an operation with a fault.
func (s *Subject) Do(op string, f Fault) Outcome {
	s.t.Helper()
	s.super.arm(f)
	if err := s.enc.Encode(request{Op: op}); err != nil {
		s.t.Fatalf("ask for %s: %v", op, err)
	}
	r, ok := s.reply()
	out := s.super.disarm()
	out.Err = r.Err
	if !ok || f.Kill && out.Met != nil { // a reply may have been on its way
		s.end()
		out.Died = fmt.Sprintf("%s: %v\n%s", op, s.cmd.ProcessState, s.output.brief())
	}
	return out
}

// Look returns what the subject holds.
func (s *Subject) Look() (h Held) {
	s.t.Helper()
	if err := s.enc.Encode(request{Look: true}); err != nil {
		s.t.Fatal(err)
	}
	r, ok := s.reply()
	if !ok {
		s.t.Fatalf("the subject has ended: %s", s.output)
	}
	return *r.Held
}

// end ends the subject and waits for it.
func (s *Subject) end() {
	s.waited.Do(func() {
		s.cmd.Process.Kill()
		s.cmd.Wait()
		if s.super != nil {
			<-s.super.done
		}
		s.control.Close()
	})
}

// tail keeps the beginning of what is written to it, where a panic has its stack.
type tail struct {
	mu   sync.Mutex
	text []byte
}

func (b *tail) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.text = append(b.text, p[:min(len(p), 64<<10-len(b.text))]...)
	return len(p), nil
}

// frame is a line of a stack with what differs between two that are alike.
var frame = regexp.MustCompile(`(?m)\(0x.*\)$|\(_, .*\)$| \+0x.*$|\{0x.*\}|^\[signal.*$`)

// brief returns the beginning of a panic, without what differs from one to the next.
func (b *tail) brief() string {
	lines := strings.SplitAfter(frame.ReplaceAllString(b.String(), ""), "\n")
	return strings.Join(lines[:min(len(lines), 18)], "")
}

func (b *tail) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return string(b.text)
}
