package probe

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/fairlead-project/fairlead/kernel/cgroup"
)

// cgroups examines cgroups, and then the network: the two meet where a device's thread is moved
// into a cgroup.
func cgroups(ctx context.Context, cfg Config) answers {
	l, err := cgroup.Detect(cfg.Roots.Proc, cfg.Roots.Cgroup)
	a := layout(l, err, cfg)

	group, err := scratchGroup(l)
	if err != nil {
		a["cfs-bandwidth"] = refused(err, "mount the cpu controller; on cgroup v2, write +cpu to cgroup.subtree_control at the root")
	} else {
		defer removeGroup(group)
		a["cfs-bandwidth"] = bandwidth(group)
	}
	maps.Copy(a, network(ctx, cfg, l, group, err))
	return a
}

// layout examines the mounted hierarchies; err is that of Detect.
func layout(l cgroup.Layout, err error, cfg Config) answers {
	mount := "mount the cgroup hierarchies at " + cfg.Roots.Cgroup
	a := make(answers)
	if err != nil {
		a.all(refused(err, mount), "cgroup-v2", "cgroup-layout", "cgroup-cpu", "cgroup-cpuset", "cgroup-io")
		return a
	}
	a["cgroup-layout"] = full(l.Mode)
	if l.V2 == "" {
		mend := "boot with systemd.unified_cgroup_hierarchy=1, or mount -t cgroup2 cgroup2 " + filepath.Join(cfg.Roots.Cgroup, "unified")
		a["cgroup-v2"] = unavailable("no cgroup v2 tree is mounted, and it is what identifies containers", mend)
		a["cgroup-layout"] = unavailable("this host has cgroup v1 only", mend).with(l.Mode)
	} else {
		a["cgroup-v2"] = full(l.V2)
	}
	for name, dir := range map[string]string{"cpu": l.CPU, "cpuset": l.CPUSet, "io": l.IO} {
		version := "v1"
		if dir == l.V2 {
			version = "v2"
		}
		a["cgroup-"+name] = full(version + " at " + dir)
		if dir == "" {
			a["cgroup-"+name] = unavailable("no hierarchy with this controller is mounted", "mount it, or take cgroup_disable= off the kernel's command line")
		}
	}
	return a
}

// groupPrefix starts the name of a scratch cgroup; the process id follows.
const groupPrefix = "fairlead-probe-"

// sweep removes the scratch cgroups of killed probes. A cgroup in use cannot be removed, so a wrong
// guess does no harm.
func sweep(dir string) {
	names, err := os.ReadDir(dir)
	if err != nil {
		return // then no cgroup can be made there either
	}
	for _, n := range names {
		rest, is := strings.CutPrefix(n.Name(), groupPrefix)
		pid, _, _ := strings.Cut(rest, "-")
		if id, err := strconv.Atoi(pid); is && err == nil && id != os.Getpid() && errors.Is(unix.Kill(id, 0), unix.ESRCH) {
			os.Remove(filepath.Join(dir, n.Name()))
		}
	}
}

// scratchGroup makes an empty cgroup in the hierarchy of the cpu controller.
func scratchGroup(l cgroup.Layout) (string, error) {
	if l.CPU == "" {
		return "", errors.New("no cpu controller is mounted")
	}
	sweep(l.CPU)
	dir := filepath.Join(l.CPU, fmt.Sprintf("%s%d-%d", groupPrefix, os.Getpid(), time.Now().UnixNano()))
	if err := os.Mkdir(dir, 0o755); err != nil {
		return "", err
	}
	return dir, nil
}

// removeGroup removes the cgroup. It waits a moment for threads that are still leaving it.
func removeGroup(dir string) {
	for range 100 {
		if err := os.Remove(dir); err == nil || errors.Is(err, fs.ErrNotExist) {
			return
		}
		time.Sleep(10 * time.Millisecond)
	}
}

// bandwidth sets a quota for the scratch cgroup.
func bandwidth(dir string) answer {
	name, value := "cpu.cfs_quota_us", "50000"
	if _, err := os.Stat(filepath.Join(dir, "cpu.shares")); err != nil {
		name, value = "cpu.max", "50000 100000"
	}
	k := cgroup.File(filepath.Join(dir, name))
	if err := k.Write(value); errors.Is(err, fs.ErrNotExist) {
		if _, err := os.Stat(filepath.Join(dir, "cpu.weight")); err != nil && name == "cpu.max" {
			return unavailable("the cpu controller is not enabled below the root of the tree", "write +cpu to cgroup.subtree_control at the root; systemd does for its units")
		}
		return unavailable("this kernel has no CFS bandwidth control: there is no "+name, "use a kernel with CONFIG_CFS_BANDWIDTH")
	} else if err != nil {
		return refused(err, "")
	}
	if cpus, limited, err := cgroup.CPUQuota(dir); err != nil {
		return unavailable(reason(err), "")
	} else if !limited || cpus != 0.5 {
		return unavailable("a quota of half a CPU reads back as another", "")
	}
	return full(name)
}
