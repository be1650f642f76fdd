package testkit

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// Podman is a test's own Podman, with its API service running: state, socket, mount and network
// namespace are private as in [Docker].
type Podman struct {
	Host         string // the API's socket, in the form of DOCKER_HOST
	Image        string // a name to run: a static busybox with all its applets
	CgroupParent string
	NS           *NS // its network namespace, where its bridges are

	dir  string
	proc *daemon
}

// StartPodman starts the service and waits until it answers. It needs root,
// podman, the docker CLI and a static busybox, and skips t without.
func StartPodman(t testing.TB) *Podman {
	t.Helper()
	NeedRoot(t)
	needPrograms(t, "podman", "runc", "docker", "busybox", "unshare")
	name := fmt.Sprintf("flpodman-%d-%d", os.Getpid(), daemons.Add(1))
	p := &Podman{Image: "localhost/flbusybox:latest", CgroupParent: name, NS: NetNS(t), dir: shortDir(t, name)}
	socket := filepath.Join(p.dir, "podman.sock")
	p.Host = "unix://" + socket
	// Without CAP_SYS_RESOURCE the default limits are refused.
	config := filepath.Join(p.dir, "containers.conf")
	if err := os.WriteFile(config, []byte("[containers]\ndefault_ulimits = [\"nofile=1024:1024\", \"nproc=1024:1024\"]\n"), 0o600); err != nil {
		t.Fatal(err)
	}
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
	if _, err := p.input(busyboxTar(t), "import", "-", p.Image); err != nil {
		t.Fatal(err)
	}
	return p
}

// Run runs the docker CLI against the service and returns its output, without the newline at the
// end.
func (p *Podman) Run(args ...string) (string, error) { return p.input(nil, args...) }

// Must is Run, which must succeed.
func (p *Podman) Must(t testing.TB, args ...string) string {
	t.Helper()
	out, err := p.Run(args...)
	if err != nil {
		t.Fatal(err)
	}
	return out
}

func (p *Podman) input(stdin []byte, args ...string) (string, error) {
	cmd := exec.Command("docker", args...)
	cmd.Env = append(os.Environ(), "DOCKER_HOST="+p.Host, "DOCKER_CONFIG="+p.dir, "DOCKER_CONTEXT=")
	return runCommand(cmd, stdin)
}

func (p *Podman) stop(t testing.TB) {
	if p.proc == nil {
		return
	}
	if p.proc.running() {
		p.proc.tell(t, p.Run)
		if ids, err := p.Run("ps", "-aq"); err == nil && ids != "" {
			p.Run(append([]string{"rm", "-f"}, strings.Fields(ids)...)...)
		}
	}
	p.proc.end(t)
}
