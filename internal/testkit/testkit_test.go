package testkit

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"
)

func TestMain(m *testing.M) { Main(m) }

// reporter is a test that notes whether it has failed.
type reporter struct {
	testing.TB
	failed bool
}

func (r *reporter) Errorf(string, ...any) { r.failed = true }

// Each check fails for what it is to find, and for nothing else.
func TestChecks(t *testing.T) {
	absent := fmt.Errorf("open x: %w", os.ErrNotExist)
	for name, check := range map[string]func(t testing.TB, good bool){
		"Same":        func(t testing.TB, good bool) { Same(t, "", true, good) },
		"Gives":       func(t testing.TB, good bool) { Gives(t, "", true)(good, nil) },
		"Gives error": func(t testing.TB, good bool) { Gives(t, "", 1)(1, map[bool]error{false: absent}[good]) },
		"None":        func(t testing.TB, good bool) { None(t, "", map[bool][]int{false: {0}}[good]) },
		"Is":          func(t testing.TB, good bool) { Is(t, "", absent, map[bool]error{true: os.ErrNotExist}[good]) },
		"Is nil":      func(t testing.TB, good bool) { Is(t, "", map[bool]error{false: absent}[good], nil) },
		"Fails":       func(t testing.TB, good bool) { Fails(t, "", map[bool]error{true: absent}[good]) },
		"Fails words": func(t testing.TB, good bool) { Fails(t, "", absent, "open", map[bool]string{false: "close"}[good]) },
		"Says":        func(t testing.TB, good bool) { Says(t, "", absent, map[bool]string{true: "open x"}[good]) },
		"Says none":   func(t testing.TB, good bool) { Says(t, "", map[bool]error{false: absent}[good], "") },
	} {
		for _, good := range []bool{true, false} {
			r := &reporter{TB: t}
			if check(r, good); r.failed == good {
				t.Errorf("%s, good %v: failed %v", name, good, r.failed)
			}
		}
	}
}

func TestCgroupMounts(t *testing.T) {
	tests := []struct {
		name, mountinfo string
		want            CG
	}{
		{"v2", "30 24 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n", CG{V2: "/sys/fs/cgroup"}},
		{"hybrid", `29 24 0:25 / /sys/fs/cgroup rw - tmpfs tmpfs rw,mode=755
30 29 0:26 / /sys/fs/cgroup/cpuset rw - cgroup cgroup rw,cpuset
31 29 0:27 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct
32 29 0:28 / /sys/fs/cgroup/unified rw shared:9 - cgroup2 cgroup2 rw
33 29 0:28 / /mnt/again rw - cgroup2 cgroup2 rw
34 29 0:29 / /sys/fs/cgroup/blkio rw - cgroup cgroup rw,blkio
`, CG{V2: "/sys/fs/cgroup/unified", CPU: "/sys/fs/cgroup/cpu,cpuacct", IO: "/sys/fs/cgroup/blkio"}},
		{"cut off", "30 24 0:26 / /sys\n30 24 - cgroup2\n - \n\n", CG{}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			Same(t, "mounts", tt.want, cgroupMounts([]byte(tt.mountinfo)))
		})
	}
}

// TestDebris leaves each kind of thing behind and checks that it is found.
func TestDebris(t *testing.T) {
	NeedRoot(t)
	before := debris()
	t.Run("made", func(t *testing.T) {
		ns := NetNS(t)
		bound := ns.Bind(t)
		cg := Cgroup(t)

		link := &netlink.Ifb{LinkAttrs: netlink.LinkAttrs{Name: "flleak"}}
		Must(t, netlink.LinkAdd(link))
		t.Cleanup(func() { netlink.LinkDel(link) })
		qdisc := &netlink.Clsact{QdiscAttrs: netlink.QdiscAttrs{LinkIndex: link.Index, Handle: 0xffff0000, Parent: netlink.HANDLE_CLSACT}}
		Must(t, netlink.QdiscAdd(qdisc))

		// A shell that ends leaves its sleep to init.
		orphan, err := exec.Command("sh", "-c", "sleep 100 >/dev/null 2>&1 & echo $!").Output()
		Must(t, err)
		pid := strings.TrimSpace(string(orphan))
		t.Cleanup(func() { exec.Command("kill", "-9", pid).Run() })

		want := []string{
			"network namespace " + bound,
			"cgroup " + cg.CPU,
			"link or qdisc flleak",
			"link or qdisc flleak clsact ffff0000",
			"process " + pid + " (", // its name is "exe" where sleep is a part of the shell
		}
		got := settle(before, debris, 0)
		for _, w := range want {
			if !slices.ContainsFunc(got, func(g string) bool { return strings.HasPrefix(g, w) }) {
				t.Errorf("not found: %s", w)
			}
		}
		if t.Failed() {
			t.Logf("found: %q", got)
		}
	})
	if left := settle(before, debris, patience); len(left) > 0 {
		t.Errorf("left: %q", left)
	}
}

// TestMainWhileFuzzing runs this test once more, in a process that leaves the name of a network
// namespace. That fails tests (TestDebris), and fuzzing not: what it sees is another package's.
func TestMainWhileFuzzing(t *testing.T) {
	NeedRoot(t)
	const variable = "FAIRLEAD_TEST_LEAVES"
	if name := os.Getenv(variable); name != "" {
		Must(t, os.WriteFile(name, nil, 0o600))
		return
	}
	Must(t, os.MkdirAll("/run/netns", 0o755))
	left := fmt.Sprintf("/run/netns/flleft-%d", os.Getpid())
	cmd := exec.Command("/proc/self/exe", "-test.run=^TestMainWhileFuzzing$", "-test.fuzz=^$", "-test.fuzzcachedir="+t.TempDir())
	cmd.Env = append(os.Environ(), variable+"="+left)
	out, err := cmd.CombinedOutput()
	Must(t, os.Remove(left))
	Is(t, string(out), err, nil)
}

func TestDebrisLoopAndPin(t *testing.T) {
	root := t.TempDir()
	for _, dir := range []string{"a/flx", "a/other", "fairlead/deep/fly", "b"} {
		Must(t, os.MkdirAll(filepath.Join(root, dir), 0o755))
	}
	want := []string{filepath.Join(root, "a/flx"), filepath.Join(root, "fairlead")}
	Same(t, "marked below", want, markedDirs(root))
	Same(t, "marked", []string{filepath.Join(root, "fairlead")}, marked(root))
}
