package kernel

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/fairlead-project/fairlead/kernel/cgroup"
	"github.com/fairlead-project/fairlead/kernel/journal"
	"github.com/fairlead-project/fairlead/kernel/sched"
)

// Tidy removes the cgroups that containers left behind because a kernel thread of ours was in them
// when they ended: a runtime gives up on a cgroup that is not empty. This happens only to
// containers that end while no agent runs. out is the result of the restore by the next agent, or
// by `fairlead restore`. A cgroup in use stays.
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
		if !abandoned(layout, o.Entry) {
			continue
		}
		// The kernel refuses to remove a cgroup that is not empty.
		err := unix.Rmdir(o.Entry.Wrote)
		if err != nil && err != unix.EBUSY && !errors.Is(err, fs.ErrNotExist) {
			errs = append(errs, fmt.Errorf("remove cgroup %s: %w", o.Entry.Wrote, err))
		}
	}
	return errors.Join(errs...)
}

// abandoned reports whether the cgroup that a thread was put into lies on the path of a container
// that has ended.
func abandoned(l cgroup.Layout, e journal.Entry) bool {
	if filepath.Clean(e.Wrote) != e.Wrote {
		return false
	}
	for _, top := range []string{l.V2, l.CPU, l.CPUSet} {
		rest, below := strings.CutPrefix(e.Wrote, top+"/")
		if top == "" || !below {
			continue
		}
		if top == l.V2 {
			// A new cgroup may have taken the name since. The entry of a thread that
			// serves the whole host does not record the container.
			id, err := cgroup.ID(e.Wrote)
			return err == nil && (id == e.Owner.Container || e.Owner.Container == 0)
		}
		// v1: the container lives as long as its v2 cgroup.
		_, err := os.Lstat(filepath.Join(l.V2, rest))
		return errors.Is(err, fs.ErrNotExist)
	}
	return false
}
