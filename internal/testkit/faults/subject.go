package faults

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"runtime"
	"runtime/pprof"
	"strconv"
	"strings"
	"sync"

	"golang.org/x/sys/unix"
)

// verb makes a test binary a subject.
const verb = "fairlead-faults-subject"

// control is the subject's descriptor for requests and replies.
const control = 3

// request asks a subject for one thing.
type request struct {
	Op     string
	Look   bool
	Cancel bool // ends the context of the operation under way
}

type reply struct {
	Err       string
	Listener  int // the descriptor of the filter
	Held      *Held
	Cancelled bool
}

// Op is an operation of a subject.
type Op func(context.Context) error

// Reexec returns a function for topology.Reexec, or for TestMain: if the program was started as a
// subject, it calls open with the argument of Start, does what is asked for, and ends with the test.
func Reexec(open func(arg []byte) (map[string]Op, error)) func(args []string) (status int, ok bool) {
	return func(args []string) (status int, ok bool) {
		if len(args) != 3 || args[1] != verb {
			return 0, false
		}
		if err := serve(open, args[2]); err != nil {
			fmt.Fprintln(os.Stderr, err)
			return 1, true
		}
		return 0, true
	}
}

func serve(open func([]byte) (map[string]Op, error), arg string) error {
	unix.CloseOnExec(control)
	file := os.NewFile(control, "control")
	enc := json.NewEncoder(file)
	var writing sync.Mutex
	answer := func(r reply) {
		writing.Lock()
		defer writing.Unlock()
		enc.Encode(r)
	}
	ops, err := open([]byte(arg))
	if err != nil {
		answer(reply{Err: err.Error()})
		return err
	}
	listener, err := install(waker())
	if err != nil {
		answer(reply{Err: err.Error()})
		return err
	}
	answer(reply{Listener: listener})
	cancel := func() {}
	for dec := json.NewDecoder(file); ; {
		var r request
		if dec.Decode(&r) != nil {
			return nil // the test has ended
		}
		switch op := ops[r.Op]; {
		case r.Cancel:
			cancel()
			answer(reply{Cancelled: true})
		case r.Look:
			answer(reply{Held: held()})
		case op == nil:
			answer(reply{Err: "no operation " + r.Op})
		default:
			ctx, end := context.WithCancel(context.Background())
			cancel = end
			go func() {
				defer end()
				var out reply
				if err := op(ctx); err != nil {
					out.Err = err.Error()
				}
				answer(out)
			}()
		}
	}
}

// waker returns the descriptor by which the runtime wakes the thread that waits for files; -1: none.
// While it writes there, it cannot do without that thread's processor.
func waker() int {
	entries, _ := os.ReadDir("/proc/self/fd")
	for _, e := range entries {
		if to, _ := os.Readlink(filepath.Join("/proc/self/fd", e.Name())); to == "anon_inode:[eventfd]" {
			fd, _ := strconv.Atoi(e.Name())
			return fd
		}
	}
	return -1
}

// number is what differs between objects of one kind, and the id of a boot.
var number = regexp.MustCompile(`[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}|[0-9]+`)

func held() *Held {
	h := &Held{Files: make(map[string]int), Goroutines: runtime.NumGoroutine()}
	entries, _ := os.ReadDir("/proc/self/fd") // the folder's own has gone again, below
	for _, e := range entries {
		if to, err := os.Readlink(filepath.Join("/proc/self/fd", e.Name())); err == nil {
			h.Files[number.ReplaceAllString(to, "N")]++
		}
	}
	var stacks bytes.Buffer
	pprof.Lookup("goroutine").WriteTo(&stacks, 1)
	h.Stacks = stacks.String()
	return h
}

// More lists what h holds beyond was.
func (h Held) More(was Held) string {
	var list []string
	for kind, n := range h.Files {
		if n > was.Files[kind] {
			list = append(list, fmt.Sprintf("%d %s, was %d", n, kind, was.Files[kind]))
		}
	}
	if h.Goroutines > was.Goroutines {
		list = append(list, fmt.Sprintf("%d goroutines, was %d:\n%s", h.Goroutines, was.Goroutines, h.Stacks))
	}
	return strings.Join(list, "; ")
}
