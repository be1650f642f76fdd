package e2e

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// confinedVerb makes the test binary try, in the agent's place, what the unit allows and what it
// does not. It changes nothing: it only opens files for writing, and makes calls with arguments
// that the kernel refuses.
const confinedVerb = "e2e-confined"

func confined() int {
	write := func(path string) func() error {
		return func() error {
			if found, _ := filepath.Glob(path); len(found) > 0 {
				path = found[0]
			}
			f, err := os.OpenFile(path, os.O_WRONLY, 0)
			if err == nil {
				f.Close()
			}
			return err
		}
	}
	create := func(dir string) func() error {
		return func() error {
			f, err := os.CreateTemp(dir, "fl-test")
			if err == nil {
				err = errors.Join(f.Close(), os.Remove(f.Name()))
			}
			return err
		}
	}
	closed := func(fd int, err error) error {
		if err != nil {
			return err
		}
		return unix.Close(fd)
	}
	const none = 1 << 22 // no process has this number
	for _, try := range []struct {
		what string
		call func() error
	}{
		{"write cgroups", write("/sys/fs/cgroup/cgroup.procs")},
		{"write net sysctls", write("/proc/sys/net/ipv4/ip_forward_update_priority")},
		{"write interrupts", write("/proc/irq/*/smp_affinity_list")},
		{"open cgroups past links", func() error { // by openat2(2), as it does
			return closed(unix.Openat2(unix.AT_FDCWD, "/sys/fs/cgroup/cgroup.procs", &unix.OpenHow{Flags: unix.O_WRONLY | unix.O_CLOEXEC, Resolve: unix.RESOLVE_NO_SYMLINKS}))
		}},
		{"write state", create("/run/fairlead")},
		{"write lasting state", create("/var/lib/fairlead")},
		{"open sysfs", func() error { return closed(unix.Fsopen("sysfs", unix.FSOPEN_CLOEXEC)) }},
		{"write core_pattern", write("/proc/sys/kernel/core_pattern")},
		{"write devices' attributes", write("/sys/class/net/u0/mtu")},
		{"write policy", create("/etc/fairlead")},
		{"write programs", create("/usr/bin")},
		{"write shared memory", create("/dev/shm")},
		{"write runtime state of others", create("/run")},
		{"mount", func() error { return unix.Mount("x", "/fl-none", "", unix.MS_REMOUNT|unix.MS_BIND, "") }},
		{"change root", func() error { return unix.Chroot("/fl-none") }},
		{"trace", func() error { return unix.PtraceAttach(none) }},
		{"write memory of others", func() error {
			_, err := unix.ProcessVMWritev(none, nil, nil, 0)
			return err
		}},
		{"run a program", exec.Command("/usr/bin/true").Run},
	} {
		fmt.Printf("%s: %v\n", try.what, try.call())
	}
	return 0
}

// TestUnitConfines checks that the unit lets the agent do what it needs, and prevents what a
// mistake must not do.
func TestUnitConfines(t *testing.T) {
	m := bootMachine(t)
	unit, err := os.ReadFile("../../packaging/fairlead.service")
	must(t, err)
	var lines []string
	for line := range strings.Lines(string(unit)) {
		key, _, _ := strings.Cut(strings.TrimSpace(line), "=")
		switch key {
		case "ExecStart":
			line = "ExecStart=/run/bin/test " + confinedVerb + "\nStandardOutput=file:/run/fairlead/tried\n"
		case "Type":
			line = "Type=oneshot\n"
		case "ExecPaths":
			line = "ExecPaths=/run/bin/test -/lib -/lib64 -/usr/lib -/usr/lib64\n" // the libraries are the test's
		case "NotifyAccess", "ExecReload", "Restart", "RestartSec", "WatchdogSec", "OnFailure":
			continue
		}
		lines = append(lines, line)
	}
	must(t, os.WriteFile(filepath.Join("/proc", m.init, "root/run/systemd/system/fairlead-try.service"), []byte(strings.Join(lines, "")), 0o644))
	m.systemctl("daemon-reload")
	m.systemctl("start", "fairlead-try")
	text, err := os.ReadFile(filepath.Join("/proc", m.init, "root/run/fairlead/tried"))
	must(t, err)
	may := 0
	for line := range strings.Lines(string(text)) {
		what, got, _ := strings.Cut(strings.TrimSpace(line), ": ")
		switch what {
		case "write cgroups", "write net sysctls", "write interrupts", "open cgroups past links", "write state", "write lasting state", "open sysfs":
			if may++; got != "<nil>" {
				t.Errorf("the agent cannot %s: %s", what, got)
			}
		default:
			if !strings.Contains(got, "read-only file system") && !strings.Contains(got, "operation not permitted") && !strings.Contains(got, "permission denied") {
				t.Errorf("the agent can %s: %s", what, got)
			}
		}
	}
	if all := strings.Count(string(text), "\n"); may != 7 || all != 18 {
		t.Errorf("%d of %d things that it must be able to do:\n%s", may, all, text)
	}
}
