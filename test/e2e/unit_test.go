package e2e

import (
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/kernel/netdev"
	"github.com/fairlead-project/fairlead/kernel/qdisc"
	"github.com/fairlead-project/fairlead/lab/sandbox"
)

// machine is a separate systemd with the shipped unit and little else: process 1 of its own PID,
// mount, network and cgroup namespaces.
type machine struct {
	t     *testing.T
	init  string // its PID, seen from here
	ns    *netdev.NS
	index int // of u0, an uplink in ns
}

// boot runs in the namespaces. Its arguments are the test's own program, fairlead, and the folder of
// the units. It covers every writable path of the host, and changes the unit as `make
// install PREFIX=/run` does.
const boot = `set -e
mount -t proc proc /proc
mount -t sysfs sysfs /sys
mount -t cgroup2 cgroup2 /sys/fs/cgroup
mount -t bpf bpf /sys/fs/bpf
mount -t tmpfs tmpfs /run
mkdir -p /run/bin /run/units /run/etc/fairlead/policy.d /run/var/lib /run/var/log /run/var/tmp
cp "$1" /run/bin/test
cp "$2" /run/bin/fairlead
for u in fairlead fairlead-restore; do
	sed 's|/usr/bin/|/run/bin/|' "$3/$u.service" >/run/units/$u.service
done
cp /etc/passwd /etc/group /etc/nsswitch.conf /run/etc/
echo 'uplink: u0=100mbit' >/run/etc/fairlead/fairlead.yaml
echo 'match: {name: e2e-unit}
set: {net.weight: 200}' >/run/etc/fairlead/policy.d/weight.yaml
for u in sysinit basic multi-user shutdown umount final sockets timers paths slices; do
	cp "/lib/systemd/system/$u.target" /run/units/
done
mount --bind /run/units /lib/systemd/system
mount --bind /run/etc /etc
mount --bind /run/var /var
mount -t tmpfs tmpfs /tmp
exec env -i container=test PATH=/usr/sbin:/usr/bin:/sbin:/bin /lib/systemd/systemd \
	--system --unit=multi-user.target --log-target=console --show-status=0
`

func bootMachine(t *testing.T) *machine {
	t.Helper()
	testkit.NeedRoot(t)
	for _, p := range []string{"/lib/systemd/systemd", "/usr/bin/nsenter"} {
		if _, err := os.Stat(p); err != nil {
			testkit.Skip(t, "no systemd")
		}
	}
	units, err := filepath.Abs("../../packaging")
	must(t, err)
	return bootBy(t, boot, program, units)
}

// bootBy makes a machine by a script, which gets the path of the test's program and args.
func bootBy(t *testing.T, script string, args ...string) *machine {
	t.Helper()
	self, err := os.Executable()
	must(t, err)
	m := &machine{t: t}
	near, far := testkit.NetNS(t), testkit.NetNS(t)
	testkit.Veth(t, near, "u0", far, "u1")
	m.ns, m.index = device(t, near.Path, "u0")
	group := testkit.Cgroup(t)
	if group.V2 == "" {
		testkit.Skip(t, "no cgroup v2 tree")
	}
	log, err := os.Create(filepath.Join(t.TempDir(), "console"))
	must(t, err)
	// The cgroup first: it becomes the root of the namespace.
	cmd := exec.Command("sh", append([]string{"-ec", `echo $$ >"$1/cgroup.procs"; shift
		exec unshare --mount --propagation private --pid --uts --ipc --cgroup --fork --kill-child sh -c "$@"`,
		"sh", group.V2, script, "sh", self}, args...)...)
	cmd.Stdout, cmd.Stderr = log, log
	ended := startIn(t, near, cmd, new(error))
	t.Cleanup(func() {
		cmd.Process.Kill()
		<-ended
		log.Close()
		if t.Failed() {
			text, _ := os.ReadFile(log.Name())
			t.Logf("console:\n%s", text)
		}
	})
	await(t, "process 1", func() error {
		b, err := os.ReadFile(fmt.Sprintf("/proc/%d/task/%[1]d/children", cmd.Process.Pid))
		m.init = strings.TrimSpace(string(b))
		if comm, _ := os.ReadFile("/proc/" + m.init + "/comm"); m.init == "" || string(comm) != "systemd\n" {
			return fmt.Errorf("child %q of %d is %q, %v", m.init, cmd.Process.Pid, comm, err)
		}
		return nil
	})
	await(t, "systemd", func() error {
		o := m.run("systemctl", "is-system-running")
		if s := strings.TrimSpace(o.out); s != "running" && s != "degraded" {
			return fmt.Errorf("%v", o)
		}
		return nil
	})
	return m
}

// command prepares a command that runs in the machine.
func (m *machine) command(args ...string) *exec.Cmd {
	return exec.Command("nsenter", append([]string{"-t", m.init, "-m", "-p", "-n", "-i", "-u", "-C", "--"}, args...)...)
}

func (m *machine) run(args ...string) output {
	m.t.Helper()
	return run(m.t, m.command(args...), (*exec.Cmd).Start)
}

func (m *machine) systemctl(args ...string) {
	m.t.Helper()
	if o := m.run(append([]string{"systemctl"}, args...)...); o.status != 0 {
		m.t.Fatalf("systemctl %q: %v", args, o)
	}
}

// settings adds settings to the unit.
func (m *machine) settings(text string) {
	m.t.Helper()
	dir := filepath.Join("/proc", m.init, "root/run/systemd/system/fairlead.service.d")
	must(m.t, os.MkdirAll(dir, 0o755))
	must(m.t, os.WriteFile(filepath.Join(dir, "test.conf"), []byte("[Service]\n"+text), 0o644))
	m.systemctl("daemon-reload")
}

// is waits until properties of the unit have these values.
func (m *machine) is(want ...string) {
	m.t.Helper()
	await(m.t, "unit", func() error {
		o := m.run("systemctl", "show", "fairlead.service")
		for _, w := range want {
			if !slices.Contains(strings.Split(o.out, "\n"), w) {
				key, _, _ := strings.Cut(w, "=")
				for line := range strings.Lines(o.out) {
					if strings.HasPrefix(line, key+"=") {
						return fmt.Errorf("%swant %s", line, w)
					}
				}
				return fmt.Errorf("no %s in %v", key, o)
			}
		}
		return nil
	})
}

func (m *machine) root() string {
	m.t.Helper()
	v, err := qdisc.Root(m.ns, m.index).Read()
	must(m.t, err)
	return v
}

// shaped waits until the agent has changed the uplink.
func (m *machine) shaped() {
	m.t.Helper()
	await(m.t, "change of the uplink", func() error {
		if r := m.root(); r != qdisc.Ours(qdisc.KindHTB) {
			return fmt.Errorf("its root qdisc is %s", r)
		}
		return nil
	})
}

// restored waits until the uplink is as before.
func (m *machine) restored(after, before string) {
	m.t.Helper()
	await(m.t, "the uplink as it was after "+after, func() error {
		if r := m.root(); r != before {
			return fmt.Errorf("its root qdisc is %s", r)
		}
		return nil
	})
}

// sandbox makes a container in the machine.
func (m *machine) sandbox() {
	m.t.Helper()
	cmd := m.command("/run/bin/test", sandboxVerb)
	out, err := cmd.StdoutPipe()
	must(m.t, err)
	in, err := cmd.StdinPipe()
	must(m.t, err)
	must(m.t, cmd.Start())
	m.t.Cleanup(func() { in.Close(); cmd.Wait() })
	if b, err := io.ReadAll(io.LimitReader(out, 3)); string(b) != "ok\n" {
		m.t.Fatalf("sandbox: %q, %v", b, err)
	}
}

// sandboxVerb makes the test binary keep a sandbox until its input ends.
const sandboxVerb = "e2e-sandbox"

func keepSandbox() int {
	h, err := sandbox.New("")
	if err == nil {
		defer h.Close()
		_, err = h.Create(sandbox.Spec{Name: "e2e-unit"})
	}
	if err != nil {
		fmt.Println(err)
		return 1
	}
	fmt.Println("ok")
	io.Copy(io.Discard, os.Stdin)
	return 0
}

// TestUnit runs the unit under a real systemd: start and readiness, reload, a kill, a hang, restart
// and stop. After a kill or a hang the host is restored if systemd gives up. A restart does not
// restore it first.
func TestUnit(t *testing.T) {
	m := bootMachine(t)
	before := m.root()
	m.settings("Restart=no\nWatchdogSec=6\n") // so that systemd gives up at once
	m.systemctl("start", "fairlead")
	m.is("ActiveState=active", "SubState=running", "Result=success")
	group := m.run("sh", "-c", "cat /proc/$(systemctl show -P MainPID fairlead)/autogroup").out
	testkit.Same(t, "it goes before others: "+group, true, strings.HasSuffix(strings.TrimSpace(group), "nice -20"))
	m.sandbox()
	m.shaped()
	alive := func() string { return m.run("systemctl", "show", "-P", "WatchdogTimestampMonotonic", "fairlead").out }
	for range 3 { // signs of life, of which each makes the watchdog wait anew
		was := alive()
		await(t, "the next sign of life", func() error {
			if now := alive(); now == was {
				return fmt.Errorf("the last was at %s", now)
			}
			return nil
		})
	}
	m.is("ActiveState=active", "Result=success")
	m.systemctl("reload", "fairlead")
	policy := filepath.Join("/proc", m.init, "root/etc/fairlead/policy.d/wrong.yaml")
	must(t, os.WriteFile(policy, []byte("nonsense"), 0o644))
	if o := m.run("systemctl", "reload", "fairlead"); o.status == 0 {
		t.Error("reload of a policy that is not usable succeeded")
	}
	must(t, os.Remove(policy))
	m.is("ActiveState=active")
	m.shaped()

	m.systemctl("kill", "-s", "KILL", "--kill-who=main", "fairlead")
	m.is("ActiveState=failed", "Result=signal")
	m.restored("the kill", before)

	m.systemctl("start", "fairlead")
	m.shaped()
	m.systemctl("kill", "-s", "STOP", "--kill-who=main", "fairlead")
	m.is("ActiveState=failed", "Result=watchdog")
	m.restored("the hang", before)

	m.settings("")
	m.systemctl("start", "fairlead")
	m.shaped()
	m.systemctl("kill", "-s", "KILL", "--kill-who=main", "fairlead")
	m.is("ActiveState=active", "SubState=running", "NRestarts=1")
	m.shaped()
	m.systemctl("stop", "fairlead")
	m.is("ActiveState=inactive", "Result=success", "ExecMainStatus=0")
	testkit.Same(t, "after the stop the root qdisc", before, m.root())

	m.settings("RestartSec=1h\n")
	m.systemctl("start", "fairlead")
	m.shaped()
	m.systemctl("kill", "-s", "KILL", "--kill-who=main", "fairlead")
	m.is("ActiveState=activating", "SubState=auto-restart")
	testkit.Same(t, "before the restart the root qdisc", qdisc.Ours(qdisc.KindHTB), m.root())
	m.systemctl("stop", "fairlead")
	mustSay(t, m.run("/run/bin/fairlead", "restore"), 0, "again, was")
	m.restored("the end", before)
}
