// Package testkit is shared by fairlead's tests: skips that are accounted for, scratch namespaces
// and cgroups that vanish with their test, and a check that a package's tests left nothing behind
// on the host.
//
// Only tests import it. It makes no assumptions about fairlead itself, so that every package can
// use it without an import cycle.
package testkit

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

// patience is how long things that end without our help may take. A busy machine may delay the
// kernel's workers, which take down namespaces and cgroups.
const patience = 30 * time.Second

// Skip ends t as skipped for a reason that the test run accounts for: it logs the line "accounted
// skip: NAME: REASON", which .ci/run compares with test/expected-skips.txt. Tests call it in place
// of t.Skip, because an unexpected skip is a failure.
func Skip(t testing.TB, reason string) {
	t.Helper()
	t.Skip(skipLine(t.Name(), reason))
}

// skipLine returns a skip's line in the log of a run.
func skipLine(name, reason string) string {
	return fmt.Sprintf("accounted skip: %s: %s", name, reason)
}

// NeedRoot skips t unless the process runs as root.
func NeedRoot(t testing.TB) {
	t.Helper()
	if os.Geteuid() != 0 {
		Skip(t, "needs root")
	}
}

// AwaitNone waits until missing returns "". If that takes longer than it may on any machine, the
// test fails with what is missing.
func AwaitNone(t testing.TB, missing func() string) {
	t.Helper()
	for end := time.Now().Add(3 * patience); ; time.Sleep(5 * time.Millisecond) {
		what := missing()
		if what == "" {
			return
		}
		if time.Now().After(end) {
			t.Fatal(what)
		}
	}
}

// Check fails the test unless err is nil, but lets it continue.
func Check(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Error(err)
	}
}

// Same fails the test if a value differs, but lets it continue. what names the value.
func Same[T any](t testing.TB, what string, want, got T, opts ...cmp.Option) {
	t.Helper()
	if diff := cmp.Diff(want, got, opts...); diff != "" {
		t.Errorf("%s (-want +got):\n%s", what, diff)
	}
}

// Gives is Same for a call that may fail: testkit.Gives(t, what, want)(call()).
func Gives[T any](t testing.TB, what string, want T) func(got T, err error) {
	t.Helper()
	return func(got T, err error) {
		t.Helper()
		if diff := cmp.Diff(want, got); diff != "" || err != nil {
			t.Errorf("%s: error %v (-want +got):\n%s", what, err, diff)
		}
	}
}

// None fails the test if a list is not empty, but lets it continue.
func None[E any](t testing.TB, what string, list []E) {
	t.Helper()
	if len(list) > 0 {
		t.Errorf("%s: %+v, want none", what, list)
	}
}

// Is fails the test unless errors.Is(err, want), but lets it continue. A want of nil means no error.
func Is(t testing.TB, what string, err, want error) {
	t.Helper()
	if !errors.Is(err, want) {
		t.Errorf("%s: %v, want %v", what, err, want)
	}
}

// Fails fails the test unless there is an error with all of these words, but lets it continue.
func Fails(t testing.TB, what string, err error, words ...string) {
	t.Helper()
	if err == nil || slices.ContainsFunc(words, func(w string) bool { return !strings.Contains(err.Error(), w) }) {
		t.Errorf("%s: %v, want an error with %q", what, err, words)
	}
}

// Says fails the test unless an error contains a text, or there is none where the text is empty.
func Says(t testing.TB, what string, err error, text string) {
	t.Helper()
	if text == "" {
		Is(t, what, err, nil)
	} else {
		Fails(t, what, err, text)
	}
}

// Opened takes what a call has opened, and returns a function that fails t if the call did, and closes
// it when t ends: Opened(os.Open(name))(t).
func Opened[T io.Closer](opened T, err error) func(testing.TB) T {
	return func(t testing.TB) T {
		t.Helper()
		Must(t, err)
		t.Cleanup(func() { opened.Close() })
		return opened
	}
}

// Err returns the error of a call that has another result, too.
func Err[T any](_ T, err error) error { return err }

// Await waits until a condition holds, and ends the test if it does not come about.
func Await(t testing.TB, what string, holds func() bool) {
	t.Helper()
	for end := time.Now().Add(90 * time.Second); !holds(); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("waited in vain until %s", what)
		}
	}
}

// Background calls a loop until the function that it returns is called, which returns the loop's
// error, or else until the test ends.
func Background(t testing.TB, loop func(context.Context) error) (stop func() error) {
	ctx, cancel := context.WithCancel(context.WithoutCancel(t.Context()))
	t.Cleanup(cancel)
	done := make(chan error, 1)
	go func() { done <- loop(ctx) }()
	return func() error {
		cancel()
		return <-done
	}
}

// Tree makes a directory of files, by their paths below it. A text that begins with "->" is a
// link to another of them.
func Tree(t testing.TB, files map[string]string) string {
	t.Helper()
	root := t.TempDir()
	for name, text := range files {
		path := filepath.Join(root, name)
		if to, link := strings.CutPrefix(text, "->"); link {
			Must(t, os.MkdirAll(filepath.Dir(path), 0o755))
			Must(t, os.Symlink(filepath.Join(root, to), path))
		} else {
			Write(t, path, text)
		}
	}
	return root
}

// Write writes a file, in directories that it makes.
func Write(t testing.TB, path, text string) {
	t.Helper()
	Must(t, os.MkdirAll(filepath.Dir(path), 0o755))
	Must(t, os.WriteFile(path, []byte(text), 0o644))
}

// Seeds adds texts to what a fuzz test begins with.
func Seeds(f *testing.F, texts ...string) {
	for _, text := range texts {
		f.Add(text)
	}
}

// Must ends the test unless err is nil.
func Must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
