package block

import (
	"context"
	"os"
	"path/filepath"
	"testing"

	"github.com/fairlead-project/fairlead/internal/testkit"
)

// The scratch file has the requested size and no name. An interrupted Scratch leaves nothing.
func TestScratch(t *testing.T) {
	dir := t.TempDir()
	file, err := Scratch(t.Context(), dir, 9)
	must(t, err)
	if info, err := file.Stat(); err != nil || info.Size() != 9<<20 {
		t.Errorf("size %v, %v", info, err)
	}
	file.Close()
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	testkit.Is(t, "interrupted", testkit.Err(Scratch(ctx, dir, 2)), context.Canceled)
	if left, err := os.ReadDir(dir); err != nil || len(left) > 0 {
		t.Errorf("left: %v, %v", left, err)
	}
}

func TestHolding(t *testing.T) {
	testkit.Is(t, "no directory", testkit.Err(Holding("/sys", filepath.Join(t.TempDir(), "none"))), os.ErrNotExist)
	testkit.Is(t, "on no disk", testkit.Err(Holding("/sys", "/proc")), ErrNoDevice)
}
