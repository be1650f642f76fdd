package testkit

import (
	"fmt"
	"os"
	"testing"
)

// TierVar names the environment variable that holds the tier of a run; see
// [Tier]. test/vm passes it on to its guests.
const TierVar = "FAIRLEAD_TIER"

// Tier is how much a run of the tests covers. Each tier contains the one before it.
type Tier int

// The tiers, by the value of TierVar.
const (
	Quick Tier = iota // "" or "quick": make test
	CI                // "ci": .ci/run
	Full              // "full": make test-full
)

// ParseTier reads the value of TierVar.
func ParseTier(s string) (Tier, error) {
	switch s {
	case "", "quick":
		return Quick, nil
	case "ci":
		return CI, nil
	case "full":
		return Full, nil
	}
	return Quick, fmt.Errorf("tier %q: want quick, ci or full", s)
}

func (t Tier) String() string { return [...]string{"quick", "ci", "full"}[t] }

// tierOf returns the tier of this run.
func tierOf(t testing.TB) Tier {
	t.Helper()
	tier, err := ParseTier(os.Getenv(TierVar))
	Must(t, err)
	return tier
}

// Scale returns the number of a test's repetitions: few, or full in the tier Full. A test of fifty
// containers that finds the same faults with five calls Scale(t, 5, 50).
func Scale(t testing.TB, few, full int) int {
	t.Helper()
	if tierOf(t) == Full {
		return full
	}
	return few
}

// Later leaves a test to the tiers CI and Full: one of churn, of a fault at each call, of what a kernel
// or a lease does in its own time, or a second story of a feature.
func Later(t testing.TB) {
	t.Helper()
	if tierOf(t) == Quick {
		Skip(t, "not in the tier quick")
	}
}

// Smoke marks a test that the guests of test/vm run on every other kernel, in every tier. It is for
// the one story of a feature that shows that it works there.
//
// The call is the first statement of a top-level test: test/vm reads it from the source and runs
// nothing to find it.
func Smoke(t testing.TB) { t.Helper() }

// OnKernels marks a test with a kernel-dependent result that is no Smoke test: the guests run it on
// the oldest and the newest kernel in the tier CI, and on every kernel in the tier Full. A test
// without a mark runs on the machine's own kernel only.
func OnKernels(t testing.TB) { t.Helper() }

// InFull marks a test with a kernel-dependent result where other marked tests depend on the same
// parts of the kernel: the guests run it in the tier Full only, on every kernel.
func InFull(t testing.TB) { t.Helper() }

// Cases returns the cases that a test runs. In the tier Quick these are only the first n, since each
// needs a rig, and in a guest in the tier CI, too. Elsewhere they are all cases.
func Cases[T any](t testing.TB, n int, cases ...T) []T {
	t.Helper()
	if tier := tierOf(t); tier == Quick || tier == CI && testing.Short() {
		return cases[:n]
	}
	return cases
}
