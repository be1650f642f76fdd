package testkit

import (
	"testing"
	"time"
)

// journal is a *journal.Journal. The tests of that package use testkit, so it cannot be imported
// here.
type journal interface {
	SetPatience(time.Duration)
	Close() error
}

// Journal opens a journal (open is journal.Open) in a new folder and closes it when t ends. It
// waits longer for the kernel than an agent does: a polling thread can take seconds to end while
// guests and burners occupy all CPUs.
func Journal[J journal](t testing.TB, open func(dir, second string) (J, error)) J {
	t.Helper()
	return JournalIn(t, t.TempDir(), open)
}

// JournalIn is Journal in a given folder.
func JournalIn[J journal](t testing.TB, dir string, open func(dir, second string) (J, error)) J {
	t.Helper()
	j, err := open(dir, "")
	Must(t, err)
	t.Cleanup(func() { Must(t, j.Close()) })
	j.SetPatience(10 * patience)
	return j
}
