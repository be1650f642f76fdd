package testkit

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
)

// Containerd is a test's own containerd, private as [Docker] is.
type Containerd struct {
	Socket       string
	Image        string // a name to run: a static busybox with all its applets
	CgroupParent string
	NS           *NS // its network namespace

	dir  string
	proc *daemon
}

// StartContainerd starts containerd and waits until it answers. It needs root,
// containerd with its ctr, runc and a static busybox, and skips t without.
func StartContainerd(t testing.TB) *Containerd {
	t.Helper()
	NeedRoot(t)
	needPrograms(t, "containerd", "ctr", "runc", "busybox", "unshare", "nsenter")
	name := fmt.Sprintf("flcontainerd-%d-%d", os.Getpid(), daemons.Add(1))
	c := &Containerd{Image: "docker.io/library/flbusybox:latest", CgroupParent: name, NS: NetNS(t), dir: shortDir(t, name)}
	c.Socket = filepath.Join(c.dir, "containerd.sock")
	config := filepath.Join(c.dir, "config.toml")
	err := os.WriteFile(config, fmt.Appendf(nil, `version = 2
root = %q
state = %q
disabled_plugins = ["io.containerd.grpc.v1.cri"]
[grpc]
address = %q
`, filepath.Join(c.dir, "root"), filepath.Join(c.dir, "state"), c.Socket), 0o600)
	Must(t, err)
	t.Cleanup(func() { removeCgroups(t, name) })
	t.Cleanup(func() { c.stop(t) })
	c.proc = startDaemon(t, nil, c.NS, c.dir, "containerd", "--config", config)
	c.proc.await(t, func() error {
		_, err := c.Run("default", "version")
		return err
	})
	return c
}

// Import loads Image into a namespace of containerd's, which it creates.
func (c *Containerd) Import(t testing.TB, namespace string) {
	t.Helper()
	image, err := Image(c.Image, nil)
	Must(t, err)
	Must(t, Err(c.input(image, namespace, "image", "import", "--snapshotter", "native", "-")))
}

// Run runs ctr in a namespace and returns what it prints.
func (c *Containerd) Run(namespace string, args ...string) (string, error) {
	return c.input(nil, namespace, args...)
}

// Start runs a container that sleeps until it is killed. flags are ctr run's.
func (c *Containerd) Start(t testing.TB, namespace, id string, flags ...string) {
	t.Helper()
	args := append([]string{"run", "--detach", "--snapshotter", "native", "--cgroup", "/" + c.CgroupParent + "/" + id}, flags...)
	Must(t, Err(c.Run(namespace, append(args, c.Image, id, "sleep", "1000")...)))
}

// Remove kills a container and removes it.
func (c *Containerd) Remove(namespace, id string) error {
	if _, err := c.Run(namespace, "task", "rm", "--force", id); err != nil {
		return err
	}
	_, err := c.Run(namespace, "container", "rm", id)
	return err
}

func (c *Containerd) input(stdin []byte, namespace string, args ...string) (string, error) {
	// ctr runs in the daemon's mount namespace, since it makes FIFOs for the shim.
	enter := []string{"--mount", "--target", strconv.Itoa(c.proc.cmd.Process.Pid), "ctr", "--address", c.Socket, "--namespace", namespace}
	cmd := exec.Command("nsenter", append(enter, args...)...)
	return runCommand(cmd, stdin)
}

func (c *Containerd) stop(t testing.TB) {
	if c.proc == nil {
		return
	}
	if spaces, err := c.Run("default", "namespace", "ls", "-q"); err == nil {
		for space := range strings.FieldsSeq(spaces) {
			ids, _ := c.Run(space, "task", "ls", "-q") // without an answer, end kills them
			for id := range strings.FieldsSeq(ids) {
				c.Remove(space, id)
			}
		}
	}
	c.proc.end(t)
}
