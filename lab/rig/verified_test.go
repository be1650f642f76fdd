package rig

import (
	"testing"

	"github.com/fairlead-project/fairlead/internal/testkit"
)

func TestVerifiedQueue(t *testing.T) {
	testkit.Verified(t, loadQueue)
}

func TestVerifiedStopwatch(t *testing.T) {
	testkit.Verified(t, loadStopwatch)
}

func TestVerifiedRecipe(t *testing.T) {
	testkit.Verified(t, loadRecipe)
}
