// Package testkit is what fairlead's tests share: skips that are accounted
// for, scratch namespaces and cgroups that vanish with their test, and a check
// that a package's tests left nothing behind on the host.
//
// It is imported by tests only. It builds no expectations about fairlead
// itself, so that every package can use it without an import cycle.
package testkit

import (
	"fmt"
	"os"
	"testing"
	"time"
)

// patience is how long what ends by itself may take to: a busy machine may keep
// the workers of the kernel, which take down namespaces and cgroups, waiting.
const patience = 30 * time.Second

// Skip ends t as skipped for a reason that the test run accounts for: it logs
// the line "accounted skip: NAME: REASON", which .ci/run compares with
// test/expected-skips.txt. Tests call it in place of t.Skip, because a skip
// that nobody expects is a failure.
func Skip(t testing.TB, reason string) {
	t.Helper()
	t.Skip(skipLine(t.Name(), reason))
}

// skipLine is the form in which a skip appears in the log of a run.
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
