package cgroup

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/fairlead-project/fairlead/internal/testkit"
)

func TestIDs(t *testing.T) {
	dir := t.TempDir()
	want := []uint64{}
	for _, sub := range []string{"", "a", "a/b", "c"} {
		path := filepath.Join(dir, sub)
		must(t, os.MkdirAll(path, 0o755))
		must(t, os.WriteFile(filepath.Join(path, "cgroup.procs"), nil, 0o644))
		id, err := ID(path)
		must(t, err)
		want = append(want, id)
	}
	must(t, os.Symlink("/", filepath.Join(dir, "out")))
	testkit.Gives(t, "ids", want)(IDs(dir, 100))
	if got, err := IDs(dir, 2); !errors.Is(err, ErrMany) || !slices.Equal(got, want[:2]) {
		t.Errorf("two of them: %v, %v", got, err)
	}
	testkit.Is(t, "no cgroup", testkit.Err(IDs(filepath.Join(dir, "gone"), 100)), fs.ErrNotExist)
}
