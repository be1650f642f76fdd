package e2e

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/kernel/qdisc"
	"github.com/fairlead-project/fairlead/test/vm"
)

// bootRoot boots the system in a folder. Its arguments are the test's program, the folder, and a folder
// with packages. Of the system's units only targets are left: others would change this machine.
const bootRoot = `set -e
cp -R "$3" "$2/packages"
cd "$2"
mkdir keep
for u in sysinit basic multi-user shutdown umount final sockets timers paths slices; do
	mv "usr/lib/systemd/system/$u.target" keep/
done
rm -rf usr/lib/systemd/system etc/systemd/system
mv keep usr/lib/systemd/system
mkdir -p etc/systemd/system etc/fairlead/policy.d
echo 'uplink: u0=100mbit' >etc/fairlead/fairlead.yaml
echo 'match: {name: e2e-unit}
set: {net.weight: 200}' >etc/fairlead/policy.d/weight.yaml
mount --bind . .
cd "$2"
mount -t proc proc proc
mount -t sysfs sysfs sys
mount -t cgroup2 cgroup2 sys/fs/cgroup
mount -t bpf bpf sys/fs/bpf
mount -t tmpfs tmpfs dev
for d in null zero full random urandom tty; do
	touch dev/$d
	mount --bind /dev/$d dev/$d
done
ln -s /proc/self/fd dev/fd
mount -t tmpfs tmpfs run
mkdir run/bin
cp "$1" run/bin/test
mount -t tmpfs tmpfs tmp
pivot_root . mnt
umount -l /mnt
exec env -i container=test PATH=/usr/sbin:/usr/bin:/sbin:/bin /lib/systemd/systemd \
	--system --unit=multi-user.target --log-target=console --show-status=0
`

// TestPackage installs the package in a system with its own systemd, and upgrades it while a
// container runs under policy. The policy must stay in force all the time, and be adopted. Removal
// must restore the host.
func TestPackage(t *testing.T) {
	if testkit.Scale(t, 0, 1) == 0 {
		testkit.Skip(t, "a system of its own: only in the tier full")
	}
	testkit.NeedRoot(t)
	packages := t.TempDir()
	build := exec.Command("make", "-C", "../..", "--no-print-directory", "package", "OUT="+packages, "VERSION=0.1.0")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	debs, _ := filepath.Glob(packages + "/*.deb")
	if len(debs) != 1 {
		t.Fatalf("packages of Debian: %q", debs)
	}
	must(t, os.Rename(debs[0], packages+"/new.deb"))
	repack := exec.Command("sh", "-ec", `dpkg-deb -R "$1/new.deb" "$1/next"
		sed -i 's/^Version:.*/Version: 0.1.1/' "$1/next/DEBIAN/control"
		dpkg-deb --root-owner-group -Znone -b "$1/next" "$1/next.deb"`, "sh", packages)
	if out, err := repack.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	must(t, os.RemoveAll(packages+"/next"))
	for _, suite := range []string{"bookworm", "trixie"} { // systemd 252 and 257
		t.Run(suite, func(t *testing.T) {
			root, err := vm.System(suite, t.TempDir())
			if err != nil {
				testkit.Skip(t, "system cannot be had: "+strings.Join(strings.Fields(err.Error()), " "))
			}
			upgrade(t, bootBy(t, bootRoot, root, packages))
		})
	}
}

func upgrade(t *testing.T, m *machine) {
	do := func(words []string, args ...string) {
		t.Helper()
		o := m.run(args...)
		t.Logf("%q: %v", args, o)
		mustSay(t, o, 0, words...)
	}
	before := m.root()
	do(nil, "dpkg", "-i", "/packages/new.deb")
	do([]string{"fairlead:"}, "getent", "group", "fairlead")
	m.is("ActiveState=inactive", "UnitFileState=disabled")
	m.settings("StandardError=append:/run/agent.log\n")
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("log of the agents:\n%s", m.run("cat", "/run/agent.log").out)
		}
	})
	m.systemctl("enable", "--now", "fairlead")
	m.sandbox()
	m.shaped()

	do(nil, "dpkg", "-i", "/packages/next.deb")
	testkit.Same(t, "right after the upgrade the root qdisc", qdisc.Ours(qdisc.KindHTB), m.root())
	m.is("ActiveState=active", "SubState=running", "NRestarts=1")
	m.shaped()
	if o := m.run("systemctl", "show", "-P", "ConditionTimestampMonotonic", "fairlead-restore"); o.out != "0\n" {
		t.Errorf("the upgrade has started fairlead-restore.service: %v", o)
	}
	do([]string{"fairlead 0.1.0"}, "fairlead", "version")
	await(t, "answer", func() error { return says(m.run("fairlead", "ps"), 0, "e2e-unit") })
	await(t, "examination", func() error { return says(m.run("fairlead", "doctor"), 0, "traffic") })

	do(nil, "dpkg", "-r", "fairlead")
	testkit.Same(t, "after the removal the root qdisc", before, m.root())
	m.is("LoadState=not-found")
	do([]string{"weight.yaml"}, "ls", "/etc/fairlead/policy.d")
	do(nil, "dpkg", "--purge", "fairlead")
	do([]string{"weight.yaml"}, "ls", "/etc/fairlead/policy.d")
	if o := m.run("ls", "/var/lib/fairlead"); o.status == 0 {
		t.Error(fmt.Errorf("after the purge there is /var/lib/fairlead: %v", o))
	}
}
