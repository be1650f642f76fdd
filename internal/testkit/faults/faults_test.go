package faults_test

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/internal/testkit/faults"
	"golang.org/x/sys/unix"
)

func TestMain(m *testing.M) {
	if status, ok := faults.Reexec(open)(os.Args); ok {
		os.Exit(status)
	}
	testkit.Main(m)
}

func open(arg []byte) (map[string]faults.Op, error) {
	dir := string(arg[1 : len(arg)-1])
	return map[string]faults.Op{
		"three": func(ctx context.Context) error {
			for _, name := range []string{"a", "b", "c"} {
				if ctx.Err() != nil {
					return ctx.Err()
				}
				if err := os.Mkdir(filepath.Join(dir, name), 0o700); err != nil {
					return err
				}
			}
			return nil
		},
		"wait": func(ctx context.Context) error {
			done := make(chan error, 1)
			go func() { done <- os.Mkdir(filepath.Join(dir, "d"), 0o700) }()
			select {
			case err := <-done:
				return err
			case <-ctx.Done():
				return ctx.Err()
			}
		},
		"panic": func(context.Context) error { panic("of the subject") },
		"leak": func(context.Context) error {
			if _, err := os.Open(dir); err != nil {
				return err
			}
			go func() { select {} }()
			return nil
		},
		"busy": func(context.Context) error {
			for end := time.Now().Add(300 * time.Millisecond); time.Now().Before(end); {
				if _, err := os.ReadFile("/proc/self/stat"); err != nil {
					return err
				}
				_ = make([]byte, 1<<20)
			}
			return errors.New("ended")
		},
	}, nil
}

func TestFaults(t *testing.T) {
	testkit.NeedRoot(t)
	dir := t.TempDir()
	s := faults.Start(t, dir)
	made := func() (n int) {
		list, err := os.ReadDir(dir)
		testkit.Must(t, err)
		for _, e := range list {
			testkit.Must(t, os.Remove(filepath.Join(dir, e.Name())))
		}
		return len(list)
	}
	out := s.Do("three", faults.Fault{})
	if out.Err != "" || len(out.Calls) != 3 || out.Met != nil || made() != 3 {
		t.Fatalf("without a fault: %+v", out)
	}
	if want := "mkdirat " + filepath.Join(dir, "b"); out.Calls[1].Name != want {
		t.Errorf("the second call is %q, want %q", out.Calls[1].Name, want)
	}
	for n := 1; n <= 3; n++ {
		at := out.Calls[n-1].At
		for i, e := range out.Calls[n-1].Errors {
			got := s.Do("three", faults.Fault{At: at, Error: i})
			want, all := "mkdir "+filepath.Join(dir, string("abc"[n-1]))+": "+e.Error(), n-1
			if e == unix.EINTR { // the library calls again
				want, all = "", 3
			}
			if got.Err != want || got.Errno != e || made() != all {
				t.Errorf("call %d, error %d: %+v", n, i, got)
			}
		}
		if got := s.Do("three", faults.Fault{At: at, Cancel: true}); (got.Err == "context canceled") != (n < 3) || made() != n {
			t.Errorf("the context ends at call %d: %+v", n, got)
		}
	}
	if got := s.Do("three", faults.Fault{At: faults.Point{Kind: out.Calls[2].At.Kind, Nth: 2}}); got.Met != nil || got.Err != "" {
		t.Errorf("a call that is not made: %+v", got)
	}
	made()
	wait := s.Do("wait", faults.Fault{})
	if wait.Err != "" || made() != 1 {
		t.Errorf("a call that does not hang: %+v", wait)
	}
	if got := s.Do("wait", faults.Fault{At: wait.Calls[0].At, Hang: true}); got.Err != "context canceled" || got.Met == nil {
		t.Errorf("a call that hangs: %+v", got)
	}
	testkit.Await(t, "it goes on afterwards", func() bool { return made() > 0 })
	if got := s.Do("three", faults.Fault{At: out.Calls[1].At, Kill: true}); got.Died == "" || made() != 1 {
		t.Errorf("killed at call 2: %+v", got)
	}
}

func TestHeldAndPanic(t *testing.T) {
	testkit.NeedRoot(t)
	s := faults.Start(t, t.TempDir())
	s.Do("busy", faults.Fault{})
	was := s.Look()
	out := s.Do("busy", faults.Fault{})
	t.Logf("%d calls in 300 ms", len(out.Calls))
	// The operation's own goroutine answers, and then ends.
	testkit.AwaitNone(t, func() string { return s.Look().More(was) })
	s.Do("leak", faults.Fault{})
	if s.Look().More(was) == "" {
		t.Error("a descriptor and a goroutine are not seen")
	}
	if out := s.Do("panic", faults.Fault{}); out.Died == "" {
		t.Errorf("%+v", out)
	} else {
		t.Log(out.Died[:200])
	}
}
