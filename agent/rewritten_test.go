package agent

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/feature"
	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/kernel/cgroup"
	"github.com/fairlead-project/fairlead/kernel/journal"
	"github.com/fairlead-project/fairlead/policy"
)

// rewriteRig is a cgroup of container 1 with files on a disk, which inotify treats alike.
func rewriteRig(t *testing.T, c clock) (w *rewritten, j *journal.Journal, dir string, told chan string) {
	t.Helper()
	root := t.TempDir()
	dir = filepath.Join(root, "c1")
	testkit.Must(t, os.Mkdir(dir, 0o755))
	j = testkit.Opened(journal.Open(t.TempDir(), ""))(t)
	told = make(chan string, 100)
	w = newRewritten(j, func() journal.Opener {
		return func(ref journal.Ref) (journal.Knob, error) { return cgroup.Open(root, ref) }
	}, c.pace(), quiet(), func(feature string, id container.ID) { told <- fmt.Sprint(feature, id) })
	return w, j, dir, told
}

// What an engine writes to a container's cgroup has policy applied again, and what we write there has
// not.
func TestRewritten(t *testing.T) {
	c := newClock()
	w, j, dir, told := rewriteRig(t, c)
	quota, other := filepath.Join(dir, "cpu.cfs_quota_us"), filepath.Join(dir, "cpu.cfs_period_us")
	write := func(path, value string) { testkit.Must(t, os.WriteFile(path, []byte(value+"\n"), 0o644)) }
	turn := func() {
		testkit.Must(t, j.Turn(cgroup.File(quota), "20000", journal.Owner{Feature: "blockio", Container: 1}))
	}
	write(quota, "100000")
	write(other, "100000")
	wanted := target(1, "isolate")
	wanted.Container.Cgroup.CPU, wanted.Origins = dir, make([]policy.Origin, 1)
	opened := w.begin()
	w.follow(targets(wanted))
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan bool)
	go func() { w.run(ctx, opened); close(ended) }()
	defer func() { cancel(); <-ended }()
	expect := func(want string) {
		t.Helper()
		select {
		case got := <-told:
			if got != want {
				t.Fatalf("applied again: %s, want %s", got, want)
			}
		case <-time.After(20 * time.Second):
			t.Fatalf("nothing is applied again, want %s", want)
		}
	}
	turn()
	write(filepath.Join(dir, "cgroup.procs"), "1")
	write(quota, "50000")
	expect("blockio1") // nothing came of the two writes before
	turn()
	c.Advance(time.Minute)
	write(other, "50000")
	expect("1")
}

// Two programs that fight over a file cost little, and the status says so until one gives up.
func TestRewrittenIsContested(t *testing.T) {
	c := newClock()
	w, j, dir, told := rewriteRig(t, c)
	file := filepath.Join(dir, "cpu.weight")
	w.rows, w.of = map[container.ID]*rewrite{1: {}}, map[string]container.ID{dir: 1}
	idle, netcpu := filepath.Join(dir, "cpu.idle"), journal.Owner{Feature: "netcpu", Container: 1}
	knob, _ := cgroup.WeightKnob(dir, true)
	testkit.Must(t, os.WriteFile(idle, []byte("0\n"), 0o644))
	testkit.Must(t, os.WriteFile(file, []byte("100\n"), 0o644))
	testkit.Must(t, j.Turn(knob, cgroup.Idled, netcpu))
	if w.answer(map[string]bool{idle: true}); len(told) > 0 {
		t.Errorf("what we wrote to another file of a knob is answered: %s", <-told)
	}
	answers := 0
	for range 600 { // of a minute
		testkit.Must(t, os.WriteFile(file, []byte("100\n"), 0o644))
		testkit.Must(t, j.Turn(knob, "200", netcpu))
		testkit.Must(t, os.WriteFile(file, []byte("100\n"), 0o644))
		w.answer(map[string]bool{file: true})
		for ; len(told) > 0; answers++ {
			<-told
		}
		c.Advance(100 * time.Millisecond)
	}
	if answers < 30 || answers > 60 {
		t.Errorf("%d answers in a minute", answers)
	}
	testkit.Is(t, "the status does not say so", w.contest("netcpu", 1, nil), feature.ErrPartly)
	testkit.Is(t, "of another feature", w.contest("blockio", 1, nil), nil)
	c.Advance(2 * time.Minute)
	testkit.Is(t, "a minute after the last write", w.contest("netcpu", 1, nil), nil)
}
