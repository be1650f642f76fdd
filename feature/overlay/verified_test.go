package overlay

import (
	"testing"

	"github.com/fairlead-project/fairlead/internal/testkit"
)

func TestVerified(t *testing.T) {
	testkit.Verified(t, loadOverlay)
}
