package probe

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/fairlead-project/fairlead/kernel/sched"
)

// host examines the machine as a whole.
func host(_ context.Context, cfg Config) answers {
	version := release()
	a := answers{
		"kernel":         oldest(version),
		"capabilities":   capabilities(effective()),
		"group-fairness": groupFairness(version),
		"systemd":        full("systemd started this host: it rewrites the cgroup values of its units when it reloads"),
		"psi":            pressure(cfg),
	}
	if uid := unix.Geteuid(); uid == 0 {
		a["root"] = full("")
	} else {
		a["root"] = unavailable(fmt.Sprintf("the effective user id is %d", uid), asRoot)
	}
	if _, err := os.Stat(filepath.Join(cfg.Run, "systemd/system")); err != nil {
		a["systemd"] = unavailable("this host was not started by systemd", "none is needed: start the agent by hand or by another service manager")
	}
	// No thread has this name; only the visibility of threads matters.
	if _, err := sched.Threads(cfg.Roots.Proc, "\n"); errors.Is(err, sched.ErrHidden) {
		a["pid-namespace"] = unavailable("the kernel's own threads are not visible: this is not the host's pid namespace, or not its proc", "run in the host's pid namespace (hostPID: true, --pid=host)")
	} else if err != nil {
		a["pid-namespace"] = unavailable(reason(err), "")
	} else {
		a["pid-namespace"] = full("")
	}
	return a
}

// ErrKernel is returned, wrapped, for a kernel before the first that fairlead supports.
var ErrKernel = errors.New("fairlead needs Linux " + oldestKernel + " or later")

// oldestKernel is the first kernel that fairlead supports, and is tested on.
const oldestKernel = "6.1"

// Supported returns an error on a kernel before 6.1: there, what is probed may work, but not as
// tested. Errors: ErrKernel.
func Supported() error { return supported(release()) }

// supported accepts a release that it cannot read.
func supported(release string) error {
	var major, minor int
	if n, _ := fmt.Sscanf(release, "%d.%d", &major, &minor); n == 2 && (major < 6 || major == 6 && minor < 1) {
		version, _, _ := strings.Cut(release, ",")
		return fmt.Errorf("%w, and this is %s", ErrKernel, version)
	}
	return nil
}

func oldest(release string) answer {
	if err := supported(release); err != nil {
		return unavailable(reason(err), "boot a kernel of "+oldestKernel+" or later")
	}
	return full(fmt.Sprintf("%s, %d CPUs", release, runtime.NumCPU()))
}

func release() string {
	var u unix.Utsname
	if err := unix.Uname(&u); err != nil {
		return ""
	}
	return fmt.Sprintf("%s, %s", unix.ByteSliceToString(u.Release[:]), unix.ByteSliceToString(u.Machine[:]))
}

// groupFairness depends on the version, because the scheduler bug shows only after seconds of load
// and so cannot be probed. reweight_entity of kernel/sched/fair.c placed the running group again
// each time, and so kept it ahead of all others; 6.18.45 reverts that (commit 101f3498b4bd). It is
// not certain which other versions are affected, and a distribution may have the revert in an older
// one.
func groupFairness(version string) answer {
	var patch int
	if n, _ := fmt.Sscanf(version, "6.18.%d", &patch); n == 0 || patch >= 45 {
		return full("")
	}
	return degraded("a control group with work on several CPUs, in which something wakes up all the time, can starve all else on a CPU for minutes", "Linux 6.18.45 or later; against groups made of sessions, kernel.sched_autogroup_enabled=0")
}

// need is a capability that fairlead uses, and its purpose. Any one of the bits suffices.
type need struct {
	name string
	bits []uint
	what string
}

func needed() []need {
	return []need{
		{"CAP_NET_ADMIN", []uint{unix.CAP_NET_ADMIN}, "devices and qdiscs"},
		{"CAP_SYS_ADMIN", []uint{unix.CAP_SYS_ADMIN}, "entering the containers' network namespaces"},
		{"CAP_BPF", []uint{unix.CAP_BPF, unix.CAP_SYS_ADMIN}, "loading BPF programs"},
		{"CAP_PERFMON", []uint{unix.CAP_PERFMON, unix.CAP_SYS_ADMIN}, "BPF programs at tracepoints"},
		{"CAP_SYS_NICE", []uint{unix.CAP_SYS_NICE}, "the CPUs of kernel threads"},
		{"CAP_SYS_PTRACE", []uint{unix.CAP_SYS_PTRACE}, "the namespaces of other users' processes"},
		{"CAP_DAC_OVERRIDE", []uint{unix.CAP_DAC_OVERRIDE}, "cgroups that were given to other users"},
	}
}

// effective returns the capabilities of this process, a bit for each.
func effective() (mask uint64, err error) {
	var words [2]unix.CapUserData
	err = unix.Capget(&unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}, &words[0])
	return uint64(words[1].Effective)<<32 | uint64(words[0].Effective), err
}

func capabilities(mask uint64, err error) answer {
	if err != nil {
		return refused(err, "")
	}
	var missing []string
	for _, n := range needed() {
		if !slices.ContainsFunc(n.bits, func(b uint) bool { return mask&(1<<b) != 0 }) {
			missing = append(missing, n.name+" ("+n.what+")")
		}
	}
	a := full("")
	switch len(missing) {
	case 0:
	case len(needed()):
		a = unavailable("this process has none of those that it needs", asRoot)
	default:
		a = degraded("missing: "+strings.Join(missing, ", "), "grant them to the agent")
	}
	return a.with(fmt.Sprintf("effective %016x", mask))
}

func pressure(cfg Config) answer {
	const mend = "boot with psi=1 on a kernel with CONFIG_PSI"
	_, err := os.ReadFile(filepath.Join(cfg.Roots.Proc, "pressure/cpu"))
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return unavailable("this kernel has no pressure stall information", mend)
	case errors.Is(err, unix.EOPNOTSUPP):
		return unavailable("pressure stall information is switched off", mend)
	case err != nil:
		return refused(err, mend)
	}
	return full("")
}
