package blockio

import (
	"errors"
	"os"
	"path/filepath"
	"testing"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/kernel/block"
	"github.com/fairlead-project/fairlead/kernel/cgroup"
	"github.com/fairlead-project/fairlead/lab/sandbox/loop"
	"github.com/fairlead-project/fairlead/policy"
)

// A cap holds at the disk to which its name leads, also after that has changed, and after the disk
// was away.
func TestNameMoves(t *testing.T) {
	h := newHost(t)
	var told []container.ID
	h.Notify(func(id container.ID) { told = append(told, id) })
	both := []*loop.Disk{h.disk(1000), h.disk(1000)}
	dir, err := os.MkdirTemp("/dev", "fl-test-")
	must(t, err)
	t.Cleanup(func() { must(t, os.RemoveAll(dir)) })
	node := filepath.Join(dir, "data")
	lead := func(to string) {
		t.Helper()
		os.Remove(node)
		if to != "" {
			must(t, os.Symlink(to, node))
		}
	}
	c, cg := h.container("batch")
	capped := func(of *loop.Disk) (text string) {
		d, err := block.Open("/sys", of.Path)
		must(t, err)
		for _, line := range cgroup.Throttle(cg.IO, cg.IO == cg.V2, d.Number(), cgroup.Limits{}) {
			value, err := line.Read()
			must(t, err)
			text += value
		}
		return text
	}
	targets := []policy.Target{target(t, c, "io.max: "+node+" wiops=70")}
	for _, step := range []struct {
		what string
		at   int // -1: nowhere
	}{{"at first", 0}, {"another disk", 1}, {"gone", -1}, {"back", 1}} {
		lead("")
		if step.at >= 0 {
			lead(both[step.at].Path)
		}
		told = nil
		_, err := h.Decide(targets, true)
		must(t, err)
		if moved := len(told) == 1; moved != (step.what != "at first") {
			t.Errorf("%s: another Apply is asked for: %v", step.what, told)
		}
		if err := h.Apply(t.Context(), targets[0]); (step.at < 0) != errors.Is(err, block.ErrNoDevice) {
			t.Errorf("%s: %v", step.what, err)
		}
		told = nil
		_, err = h.Decide(targets, true)
		must(t, err)
		if len(told) != 0 {
			t.Errorf("%s: and again", step.what)
		}
		for i, d := range both {
			if got := capped(d); step.at >= 0 && (got != "") != (i == step.at) {
				t.Errorf("%s: disk %d is capped %q", step.what, i, got)
			}
		}
	}
	must(t, h.Remove(t.Context(), c.ID))
}
