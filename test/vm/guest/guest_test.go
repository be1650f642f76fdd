// Package guest checks, inside the guests of package vm, that they are what
// the other tests take them for. On an ordinary host it has nothing to say.
package guest

import (
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/fairlead-project/fairlead/internal/testkit"
)

func TestMain(m *testing.M) { testkit.Main(m) }

// version skips t outside of a guest, and says which kernel this is.
func version(t *testing.T) (v [2]int) {
	t.Helper()
	if host, _ := os.Hostname(); host != "guest" {
		testkit.Skip(t, "runs in the guests of test/vm only")
	}
	release, err := os.ReadFile("/proc/sys/kernel/osrelease")
	testkit.Must(t, err)
	if _, err := fmt.Sscanf(string(release), "%d.%d", &v[0], &v[1]); err != nil {
		t.Fatalf("kernel release %q: %v", release, err)
	}
	return v
}

// tooOld reports whether fairlead refuses this version.
func tooOld(v [2]int) bool { return v[0] < 6 || v[0] == 6 && v[1] < 1 }

func TestGuest(t *testing.T) {
	testkit.Smoke(t)
	version(t)
	mounts, err := os.ReadFile("/proc/self/mounts")
	testkit.Must(t, err)
	if strings.Contains(string(mounts), " cgroup ") || !strings.Contains(string(mounts), " /sys/fs/cgroup cgroup2 ") {
		t.Errorf("not cgroup v2 only:\n%s", mounts)
	}
	controllers, err := os.ReadFile("/sys/fs/cgroup/cgroup.subtree_control")
	testkit.Must(t, err)
	for _, c := range []string{"cpu", "cpuset", "io", "memory"} {
		if !strings.Contains(string(controllers), c) {
			t.Errorf("controller %s is not handed down: %s", c, controllers)
		}
	}
	testkit.Check(t, testkit.Err(os.Stat("/sys/kernel/btf/vmlinux")))
	a, b := testkit.NetNS(t), testkit.NetNS(t)
	testkit.Veth(t, a, "fla", b, "flb")
	if cg := testkit.Cgroup(t); cg.CPU != cg.V2 || cg.V2 == "" {
		t.Errorf("scratch cgroup %+v, want one directory", cg)
	}
}
