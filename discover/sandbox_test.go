package discover

import (
	"encoding/json"
	"os"
	"path/filepath"
	"testing"
	"time"
)

// A directory is read again after it has changed, and only then.
func TestStatesAreReadOnce(t *testing.T) {
	dir := t.TempDir()
	ss := &states{dir: dir}
	list := func() []Sandbox {
		t.Helper()
		all, err := ss.read()
		must(t, err)
		return all
	}
	write := func(s Sandbox) {
		t.Helper()
		data, err := json.Marshal(s)
		must(t, err)
		tmp := filepath.Join(dir, "."+s.Name+".tmp")
		must(t, os.WriteFile(tmp, data, 0o600))
		must(t, os.Rename(tmp, filepath.Join(dir, s.Name+".json")))
	}
	write(Sandbox{Name: "box-1"})
	write(Sandbox{Name: "box-2"})
	for range 2 { // another change may have the same time
		if got := list(); len(got) != 2 {
			t.Fatalf("%d states, want 2", len(got))
		}
	}
	if ss.reads != 2 {
		t.Errorf("read %d times while the directory was new", ss.reads)
	}
	long := time.Now().Add(-time.Hour)
	must(t, os.Chtimes(dir, long, long))
	list()
	list()
	if ss.reads != 3 {
		t.Errorf("read %d times, want once more of a directory that stays as it is", ss.reads)
	}
}
