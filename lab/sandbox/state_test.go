package sandbox

import (
	"fmt"
	"path/filepath"
	"testing"
)

// In a burst each new sandbox has only its own file read.
func TestStatesAreReadOnce(t *testing.T) {
	dir := t.TempDir()
	const burst = 50
	ss := &states{dir: dir}
	list := func() []state {
		t.Helper()
		all, err := ss.read()
		if err != nil {
			t.Fatal(err)
		}
		return all
	}
	made := make([]*state, burst)
	for i := range made {
		name := fmt.Sprint("box-", i)
		made[i] = &state{Name: name, file: filepath.Join(dir, name+".json")}
		if err := made[i].create(); err != nil {
			t.Fatal(err)
		}
		if got := list(); len(got) != i+1 {
			t.Fatalf("%d states, want %d", len(got), i+1)
		}
	}
	if ss.reads != burst {
		t.Errorf("read %d files of %d states", ss.reads, burst)
	}
	made[7].Init = process{PID: 4711, Start: 1}
	if err := made[7].write(); err != nil {
		t.Fatal(err)
	}
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
