package vm

import (
	"errors"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"

	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/test/kubernetes"
)

// TestNode boots a typical node of Kubernetes: Debian with systemd, cgroup v2 only, containerd, and
// a kubelet that makes systemd create the cgroups. It runs there the test of the same name in
// test/vm/guest. VM_KERNELS names the kernel; the default is that Debian's own, 6.1.
func TestNode(t *testing.T) {
	if testkit.Scale(t, 0, 1) == 0 {
		testkit.Skip(t, "only in the tier full")
	}
	if os.Getenv("FAIRLEAD_VM") == "" {
		testkit.Skip(t, "FAIRLEAD_VM is not set; make test and make vm set it")
	}
	program, err := kubernetes.Build(t.Context())
	if errors.Is(err, kubernetes.ErrNoModules) {
		testkit.Skip(t, "no network to build a kubelet")
	}
	must(t, err)
	root, err := System("bookworm", t.TempDir(), "dbus", "busybox-static", "containerd", "runc", "containernetworking-plugins")
	if err != nil {
		testkit.Skip(t, "system cannot be had: "+strings.Join(strings.Fields(err.Error()), " "))
	}
	top, err := filepath.Abs("../..")
	must(t, err)
	must(t, execute("cp", "-a", "testdata/node/.", root))
	must(t, execute("cp", program, filepath.Join(root, "usr/local/bin/kubelet")))
	must(t, execute("cp", filepath.Join(top, "packaging/fairlead.service"), filepath.Join(top, "packaging/fairlead-restore.service"), filepath.Join(root, "etc/systemd/system")))
	image, err := testkit.Image("docker.io/library/flbusybox:latest", nil)
	must(t, errors.Join(err, os.WriteFile(filepath.Join(root, "image.tar"), image, 0o644)))

	name := "6.1"
	if chosen := strings.Fields(os.Getenv("VM_KERNELS")); len(chosen) > 0 {
		name = chosen[0]
	}
	i := slices.IndexFunc(Kernels(), func(k Kernel) bool { return k.Name == name && k.Arch == runtime.GOARCH })
	if i < 0 {
		t.Fatalf("VM_KERNELS=%s: no such kernel for %s", name, runtime.GOARCH)
	}
	build := filepath.Join(top, "build/vm")
	g := newGuest(Kernels()[i], filepath.Join(build, "node"), limits[testkit.Full])
	test := Test{Package: guest, Names: []string{"TestNode"}, Binary: filepath.Join(build, g.Kernel.Arch, "tests/node"), Dir: filepath.Join(top, guest)}
	g.Root = Root{Arch: g.Kernel.Arch, Program: filepath.Join(build, g.Kernel.Arch, "fairlead"), Tier: testkit.Full, System: root, Tests: []Test{test}}
	if !goBuild(t, g.Kernel.Arch, "build", g.Root.Program, []string{fairlead + "/cmd/fairlead"}) || !goBuild(t, g.Kernel.Arch, "test", test.Binary, []string{fairlead + "/" + guest}, "-c") {
		return
	}
	cache, err := cacheDir("kernels")
	must(t, err)
	g.fetch(cache)
	bootAll(t.Context(), []*Guest{g}, 1)
	if errors.Is(g.err, ErrNoKernel) {
		testkit.Skip(t, strings.Join(strings.Fields(g.err.Error()), " "))
	}
	must(t, g.err)
	onKernel(t, g)
}

var must = testkit.Must
