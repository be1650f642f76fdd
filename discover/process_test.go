package discover

import (
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"testing"
	"time"

	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/kernel/cgroup"
)

func TestOpenProcess(t *testing.T) {
	boot, err := bootTime(time.Now)
	must(t, err)
	cmd := exec.Command("sleep", "1000")
	before := time.Now()
	must(t, cmd.Start())
	ended := make(chan struct{})
	p, err := openProcess("/proc", cmd.Process.Pid, boot, func() { close(ended) })
	must(t, err)
	defer p.close()
	// proc counts in hundredths of a second, rounded down.
	if p.started.Before(before.Add(-30*time.Millisecond)) || p.started.After(time.Now()) {
		t.Errorf("started at %v, want about %v", p.started, before)
	}
	if p.ended() {
		t.Error("ended while it runs")
	}
	cmd.Process.Kill()
	<-ended // even though it was not waited for
	if !p.ended() {
		t.Error("runs after its end")
	}
	// A zombie has nothing left to look at.
	testkit.Is(t, "zombie", testkit.Err(openProcess("/proc", cmd.Process.Pid, boot, func() {})), fs.ErrNotExist)
	cmd.Wait()
	testkit.Is(t, "no process", testkit.Err(openProcess("/proc", cmd.Process.Pid, boot, func() {})), fs.ErrNotExist)
	self, err := openProcess("/proc", os.Getpid(), boot, func() { t.Error("this process has ended") })
	must(t, err)
	self.close()
}

// A host with more containers than one cgroup's processes are searched in has them side by side in
// one directory.
func TestSubdirsOfAFullHost(t *testing.T) {
	dir := t.TempDir()
	for i := range 3 * maxDirs {
		must(t, os.Mkdir(filepath.Join(dir, strconv.Itoa(i)), 0o755))
	}
	tree := &tree{top: dir, nodes: make(map[string]*node), due: make(map[string]*node)}
	tree.walk()
	testkit.Same(t, "cgroups that walk found", 3*maxDirs+1, len(tree.nodes))
	if got, err := cgroup.Children(dir, maxDirs); len(got) != maxDirs || err != nil {
		t.Errorf("%d cgroups (%v), want the bound %d", len(got), err, maxDirs)
	}
}
