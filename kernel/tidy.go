package kernel

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/fairlead-project/fairlead/kernel/cgroup"
	"github.com/fairlead-project/fairlead/kernel/journal"
	"github.com/fairlead-project/fairlead/kernel/sched"
)

// Tidy removes the cgroups that containers left behind because a kernel thread of ours was in them
// when they ended: a runtime gives up on a cgroup that is not empty, runc within a fifth of a
// second. This happens to containers that end while no agent runs, or while it is busy. out lists
// the threads that have been moved since. A cgroup in use stays.
func Tidy(r Roots, out []journal.Outcome) error {
	var layout cgroup.Layout
	var errs []error
	for _, o := range out {
		if o.Entry.Ref.Kind != sched.KindKthread || o.Err != nil {
			continue
		}
		if layout.Mode == "" {
			var err error
			if layout, err = cgroup.Detect(r.Proc, r.Cgroup); err != nil {
				return err
			}
		}
		for _, dir := range abandoned(layout, o.Entry) {
			// The kernel refuses to remove a cgroup that is not empty.
			err := unix.Rmdir(dir)
			if err != nil && err != unix.EBUSY && !errors.Is(err, fs.ErrNotExist) {
				errs = append(errs, fmt.Errorf("remove cgroup %s: %w", dir, err))
			}
		}
	}
	return errors.Join(errs...)
}

// ofRuntime matches the name of a cgroup that a runtime makes for a container, and removes with it.
// Others may be kept, empty, for the next process.
var ofRuntime = regexp.MustCompile(`[0-9a-f]{64}`)

// abandoned returns the cgroups that a thread of ours may have kept from being removed: the one that
// it was put into, and on v2, where that is a child that we made, the container's. There are none if
// the container is known to live.
func abandoned(l cgroup.Layout, e journal.Entry) []string {
	if filepath.Clean(e.Wrote) != e.Wrote {
		return nil
	}
	for _, top := range []string{l.V2, l.CPU, l.CPUSet} {
		rest, below := strings.CutPrefix(e.Wrote, top+"/")
		if top == "" || !below {
			continue
		}
		if top != l.V2 { // v1: the container lives as long as its v2 cgroup
			if _, err := os.Lstat(filepath.Join(l.V2, rest)); !errors.Is(err, fs.ErrNotExist) {
				return nil
			}
			return []string{e.Wrote}
		}
		dir := filepath.Dir(e.Wrote)
		runtimes := ofRuntime.MatchString(filepath.Base(dir))
		switch id, err := cgroup.ID(dir); {
		case runtimes && (e.Owner.Container == 0 || err == nil && id == e.Owner.Container):
			return []string{e.Wrote, dir}
		case e.Owner.Container == 0: // a thread that serves the whole host: its entry has no container
			return []string{e.Wrote}
		}
		return nil // a new cgroup may have taken the name since
	}
	return nil
}
