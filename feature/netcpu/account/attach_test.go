package account

import (
	"errors"
	"os"
	"testing"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/kernel/bpf"
	"github.com/fairlead-project/fairlead/kernel/cgroup"
	"github.com/fairlead-project/fairlead/tenant/identity"
)

// openCgroup looks for containers' cgroups below the configured root.
func TestCgroupRoot(t *testing.T) {
	m := &Meter{cfg: Config{Proc: "/proc", Cgroup: t.TempDir()}}
	if f, err := m.openCgroup(1); !errors.Is(err, cgroup.ErrNone) {
		t.Errorf("below a folder without cgroups: %v, %v", f, err)
	}
}

// A program that could not be attached, as its cgroup has gone, is not detached.
func TestGoneCgroup(t *testing.T) {
	testkit.NeedRoot(t)
	m := exactMeter(t)
	cg := testkit.Cgroup(t)
	id, err := cgroup.ID(cg.V2)
	must(t, err)
	acc := &account{member: identity.Member{ID: container.ID(id)}}
	acc.cgroup, err = m.openCgroup(acc.member.ID)
	must(t, err)
	acc.reached, err = m.object.Copy(accountProgFlReached, bpf.Vars{})
	must(t, err)
	must(t, os.Remove(cg.V2))
	if err := m.watchSockets(acc, true); err == nil {
		t.Error("a program is attached to a cgroup that has gone")
	}
	must(t, m.watchSockets(acc, false))
}
