package discover

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"testing"
)

// In a burst each new sandbox has only its own file read.
func TestStatesAreReadOnce(t *testing.T) {
	dir := t.TempDir()
	const burst = 50
	ss := &states{dir: dir}
	list := func() []Sandbox {
		t.Helper()
		all, err := ss.read()
		if err != nil {
			t.Fatal(err)
		}
		return all
	}
	write := func(s Sandbox) {
		t.Helper()
		data, err := json.Marshal(s)
		if err != nil {
			t.Fatal(err)
		}
		tmp := filepath.Join(dir, "."+s.Name+".tmp")
		if err := os.WriteFile(tmp, data, 0o600); err != nil {
			t.Fatal(err)
		}
		if err := os.Rename(tmp, filepath.Join(dir, s.Name+".json")); err != nil {
			t.Fatal(err)
		}
	}
	for i := range burst {
		write(Sandbox{Name: fmt.Sprint("box-", i)})
		if got := list(); len(got) != i+1 {
			t.Fatalf("%d states, want %d", len(got), i+1)
		}
	}
	if ss.reads != burst {
		t.Errorf("read %d files of %d states", ss.reads, burst)
	}
	write(Sandbox{Name: "box-7", Init: Process{PID: 4711, Start: 1}})
	runs := 0
	for _, s := range list() {
		if s.Init.PID == 4711 {
			runs++
		}
	}
	if runs != 1 || ss.reads != burst+1 {
		t.Errorf("%d of them run, after %d reads", runs, ss.reads)
	}
}
