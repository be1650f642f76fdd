package testkit

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"
)

// Podman is a test's own Podman, with its API service running: state, socket, mount and network
// namespace are private as in [Docker].
type Podman struct {
	dockerCLI
	Image        string // a name to run: a static busybox with all its applets
	CgroupParent string
	NS           *NS // its network namespace, where its bridges are
}

// StartPodman starts the service and waits until it answers. It needs root,
// podman, the docker CLI and a static busybox, and skips t without.
func StartPodman(t testing.TB) *Podman {
	t.Helper()
	NeedRoot(t)
	needPrograms(t, "podman", "runc", "docker", "busybox", "unshare")
	name := fmt.Sprintf("flpodman-%d-%d", os.Getpid(), daemons.Add(1))
	p := &Podman{Image: "localhost/flbusybox:latest", CgroupParent: name, NS: NetNS(t), dockerCLI: dockerCLI{dir: shortDir(t, name)}}
	socket := filepath.Join(p.dir, "podman.sock")
	p.Host = "unix://" + socket
	// Without CAP_SYS_RESOURCE the default limits are refused.
	config := filepath.Join(p.dir, "containers.conf")
	Must(t, os.WriteFile(config, []byte("[containers]\ndefault_ulimits = [\"nofile=1024:1024\", \"nproc=1024:1024\"]\n"), 0o600))
	t.Cleanup(func() { removeCgroups(t, name) })
	t.Cleanup(func() { p.stop(t) })
	p.proc = startDaemon(t, nil, p.NS, p.dir, "env", "CONTAINERS_CONF="+config, "podman",
		"--root", filepath.Join(p.dir, "root"),
		"--runroot", filepath.Join(p.dir, "runroot"),
		"--tmpdir", filepath.Join(p.dir, "tmp"),
		"--cgroup-manager", "cgroupfs",
		"--events-backend", "file",
		"--runtime", "runc",
		"--network-backend", "netavark",
		"system", "service", "--time", "0", p.Host)
	p.proc.await(t, func() error {
		_, err := p.Run("version", "--format", "{{.Server.Version}}")
		return err
	})
	root, err := busyboxTar(nil)
	Must(t, err)
	if _, err := p.input(root, "import", "-", p.Image); err != nil {
		t.Fatal(err)
	}
	return p
}
