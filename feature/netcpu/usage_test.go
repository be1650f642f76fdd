package netcpu

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/internal/testkit"
)

var must = testkit.Must

// The files of a container's cgroups are open only while it runs.
func TestUsagesClose(t *testing.T) {
	root := t.TempDir()
	var running []container.Container
	for i := range 3 {
		dir := filepath.Join(root, fmt.Sprint(i))
		testkit.Write(t, filepath.Join(dir, "cpu.stat"), "usage_usec 7\n")
		running = append(running, container.Container{ID: container.ID(i), Started: time.Now(), Cgroup: container.Cgroup{V2: dir}})
	}
	open := func() (n int) {
		links, err := filepath.Glob("/proc/self/fd/*")
		must(t, err)
		for _, l := range links {
			if to, err := os.Readlink(l); err == nil && filepath.Dir(filepath.Dir(to)) == root {
				n++
			}
		}
		return n
	}
	var u usages
	for n := 3; n >= 0; n-- {
		u.only(running[:n], time.Time{})
		for _, c := range running[:n] {
			if got := u.since(c, ""); got.tasks != 7*time.Microsecond {
				t.Errorf("%d containers run: usage %+v", n, got)
			}
		}
		if open() != n {
			t.Errorf("%d files are open of %d containers", open(), n)
		}
	}
}
