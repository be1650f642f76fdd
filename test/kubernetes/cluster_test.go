package kubernetes

import (
	"path/filepath"
	"strings"
	"testing"
)

// A machine without the packages gets the command that installs them.
func TestStartSaysWhatIsMissing(t *testing.T) {
	t.Setenv("PATH", "")
	if _, err := Start(t.Context(), filepath.Join(t.TempDir(), "fltest"), 1); err == nil || !strings.Contains(err.Error(), "test/setup kubernetes") {
		t.Errorf("start without etcd: %v", err)
	}
}
