package testkit

import (
	"testing"
	"time"
)

// journal is a *journal.Journal, whose package has tests with testkit and so cannot
// be imported here.
type journal interface {
	SetPatience(time.Duration)
	Close() error
}

// Journal opens a journal (open is journal.Open) in a folder of its own and closes it
// when t ends. In a guest it waits longer for the kernel: an emulated CPU of a busy
// machine stands still for seconds.
func Journal[J journal](t testing.TB, open func(dir string) (J, error)) J {
	t.Helper()
	return JournalIn(t, t.TempDir(), open)
}

// JournalIn is Journal in a given folder.
func JournalIn[J journal](t testing.TB, dir string, open func(dir string) (J, error)) J {
	t.Helper()
	j, err := open(dir)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := j.Close(); err != nil {
			t.Error(err)
		}
	})
	if testing.Short() {
		j.SetPatience(10 * patience)
	}
	return j
}
