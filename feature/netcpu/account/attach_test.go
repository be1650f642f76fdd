package account

import (
	"errors"
	"testing"

	"github.com/fairlead-project/fairlead/kernel/cgroup"
)

// openCgroup looks for containers' cgroups below the configured root.
func TestCgroupRoot(t *testing.T) {
	m := &Meter{cfg: Config{Proc: "/proc", Cgroup: t.TempDir()}}
	if f, err := m.openCgroup(1); !errors.Is(err, cgroup.ErrNone) {
		t.Errorf("below a folder without cgroups: %v, %v", f, err)
	}
}
