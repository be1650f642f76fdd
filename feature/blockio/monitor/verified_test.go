package monitor

import (
	"testing"

	"github.com/fairlead-project/fairlead/internal/testkit"
)

func TestVerified(t *testing.T) {
	testkit.OnKernels(t)
	testkit.Verified(t, loadMonitor)
}
