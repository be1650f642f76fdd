package kubernetes

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// A machine without the packages gets the command that installs them, and keeps nothing.
func TestStartSaysWhatIsMissing(t *testing.T) {
	t.Setenv("PATH", "")
	dir := filepath.Join(t.TempDir(), "fltest")
	if _, err := Start(t.Context(), dir, "/none", 1); err == nil || !strings.Contains(err.Error(), "test/setup kubernetes") {
		t.Errorf("start without etcd: %v", err)
	}
	if _, err := os.Stat(dir); err == nil {
		t.Errorf("%s is left", dir)
	}
}
