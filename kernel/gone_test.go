package kernel

import (
	"errors"
	"fmt"
	"io/fs"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/kernel/journal"
)

func TestGone(t *testing.T) {
	open := &fs.PathError{Op: "open", Path: "/sys/fs/cgroup/x/tasks", Err: unix.ENOENT}
	for _, c := range []struct {
		err  error
		want bool
	}{
		{nil, false},
		{open, true},
		{fmt.Errorf("move thread: %w", open), true},
		{errors.Join(fmt.Errorf("attach: %w", journal.ErrGone), fmt.Errorf("query: %w", unix.ENODEV)), true},
		{errors.Join(open, unix.EPERM), false}, // one of them says something else
		{fmt.Errorf("attach: %w, %w", open, unix.EBUSY), false},
		{unix.ESRCH, true},
		{unix.EINVAL, false},
		{errors.New("no such device"), false},
	} {
		testkit.Same(t, fmt.Sprint(c.err), c.want, Gone(c.err))
	}
}
