package testkit

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// Docker is a test's private Docker Engine. It has its own network namespace, mount namespace,
// state and socket, and its containers have separate cgroups. It does not touch the host's
// firewall, bridges and engine.
type Docker struct {
	dockerCLI
	Socket string // path of the API's socket
	Image  string // a name to run: a static busybox with all its applets
	NS     *NS    // the engine's network namespace, where its bridges are

	// CgroupParent is the directory, below the root of every hierarchy, that holds the cgroups of
	// the containers.
	CgroupParent string

	flags []string
}

// dockerCLI is an engine that the docker CLI can talk to.
type dockerCLI struct {
	Host string // of its API, in the form of DOCKER_HOST
	dir  string
	proc *daemon
}

var daemons atomic.Int64

// StartDocker starts an engine and waits until it answers. flags are added to dockerd's. It needs
// root, dockerd, the docker CLI and a static busybox, and skips t without. When t ends the engine
// is removed with everything that it made.
func StartDocker(t testing.TB, flags ...string) *Docker {
	t.Helper()
	NeedRoot(t)
	return StartDockerIn(t, NetNS(t), flags...)
}

// StartDockerIn is StartDocker in a network namespace that the test made.
func StartDockerIn(t testing.TB, ns *NS, flags ...string) *Docker {
	t.Helper()
	needPrograms(t, "dockerd", "docker", "busybox", "unshare", "iptables")
	name := fmt.Sprintf("fldocker-%d-%d", os.Getpid(), daemons.Add(1))
	d := &Docker{
		Image:        "flbusybox",
		NS:           ns,
		CgroupParent: name,
		dockerCLI:    dockerCLI{dir: shortDir(t, name)},
	}
	d.Socket = filepath.Join(d.dir, "docker.sock")
	d.Host = "unix://" + d.Socket
	d.flags = append([]string{
		"--data-root", filepath.Join(d.dir, "data"),
		"--exec-root", filepath.Join(d.dir, "exec"),
		"--pidfile", filepath.Join(d.dir, "docker.pid"),
		"--host", d.Host,
		"--cgroup-parent", "/" + name,
		"--bip", "10.213.0.1/16",
		"--ip6tables=false",
	}, flags...)
	t.Cleanup(func() { removeCgroups(t, name) })
	t.Cleanup(func() { d.stop(t) })
	d.Start(t)
	d.Import(t, d.Image)
	return d
}

// Import makes an image of the name: busybox with the given labels.
func (d *Docker) Import(t testing.TB, image string, labels ...string) {
	t.Helper()
	args := []string{"import"}
	for _, l := range labels {
		args = append(args, "--change", "LABEL "+l)
	}
	root, err := busyboxTar(nil)
	Must(t, err)
	if _, err := d.input(root, append(args, "-", image)...); err != nil {
		t.Fatal(err)
	}
}

// Start starts the engine again, after Kill.
func (d *Docker) Start(t testing.TB) {
	t.Helper()
	// Kill leaves these files. dockerd takes a PID in them for a running process. The PID may
	// indeed belong to a running process, or to an ended one that is not reaped yet.
	os.Remove(filepath.Join(d.dir, "docker.pid"))
	os.Remove(filepath.Join(d.dir, "exec", "containerd", "containerd.pid"))
	d.proc = startDaemon(t, d.proc, d.NS, d.dir, "dockerd", d.flags...)
	d.proc.await(t, func() error {
		_, err := d.Run("version", "--format", "{{.Server.Version}}")
		return err
	})
}

// Without removes one of dockerd's flags, from the next Start on.
func (d *Docker) Without(flag string) {
	d.flags = slices.DeleteFunc(d.flags, func(f string) bool { return f == flag })
}

// PID is the process ID of dockerd, for programs that have to run in its namespaces.
func (d *Docker) PID() int { return d.proc.cmd.Process.Pid }

// Kill kills dockerd alone: its containers and their shims live on.
func (d *Docker) Kill() { d.proc.kill() }

// Run runs the docker CLI against the engine and returns its output, without the newline at the
// end.
func (d *dockerCLI) Run(args ...string) (string, error) { return d.input(nil, args...) }

// Must is Run, which must succeed.
func (d *dockerCLI) Must(t testing.TB, args ...string) string {
	t.Helper()
	out, err := d.Run(args...)
	Must(t, err)
	return out
}

func (d *dockerCLI) input(stdin []byte, args ...string) (string, error) {
	cmd := exec.Command("docker", args...)
	cmd.Env = append(os.Environ(), "DOCKER_HOST="+d.Host, "DOCKER_CONFIG="+d.dir, "DOCKER_CONTEXT=")
	return runCommand(cmd, stdin)
}

// stop removes the containers, and ends the engine and the processes that it leaves.
func (d *dockerCLI) stop(t testing.TB) {
	if d.proc == nil {
		return
	}
	if d.proc.running() {
		d.proc.tell(t, d.Run)
		if ids, err := d.Run("ps", "-aq"); err == nil && ids != "" {
			d.Run(append([]string{"rm", "-f"}, strings.Fields(ids)...)...)
		}
	}
	d.proc.end(t)
}

// daemon is a container engine in a separate mount namespace.
type daemon struct {
	cmd  *exec.Cmd
	name string
	log  string
	done chan struct{}
	mnt  *os.File // its mount namespace, which outlives it if it is killed
}

// startDaemon runs a program in ns with its own /run and /var/lib and a sysfs that belongs to ns,
// or in the mount namespace of an earlier daemon that was killed.
func startDaemon(t testing.TB, earlier *daemon, ns *NS, dir, program string, args ...string) *daemon {
	t.Helper()
	const script = `set -e
mkdir -p "$0/cg"
mount --rbind /sys/fs/cgroup "$0/cg"
mount -t sysfs sysfs /sys
mount --move "$0/cg" /sys/fs/cgroup
mount -t tmpfs tmpfs /run
mount -t tmpfs tmpfs /dev/shm
mount -t tmpfs tmpfs /var/lib
mkdir -p /run/docker /run/lock
exec "$@"
`
	d := &daemon{name: program, log: filepath.Join(dir, program+".log"), done: make(chan struct{})}
	log, err := os.OpenFile(d.log, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	Must(t, err)
	defer log.Close()
	enter := []string{"unshare", "--mount", "--propagation", "private", "sh", "-c", script, dir}
	if earlier != nil {
		d.mnt = earlier.mnt
		enter = []string{"nsenter", fmt.Sprintf("--mount=/proc/%d/fd/%d", os.Getpid(), d.mnt.Fd())}
	}
	argv := append(append(enter, program), args...)
	d.cmd = exec.Command(argv[0], argv[1:]...)
	d.cmd.Stdout, d.cmd.Stderr = log, log
	// Engines read these variables, and would find what they must not find here.
	d.cmd.Env = append(os.Environ(), "TMPDIR="+dir, "NOTIFY_SOCKET=", "HTTP_PROXY=", "HTTPS_PROXY=", "http_proxy=", "https_proxy=")
	if err := ns.Do(d.cmd.Start); err != nil {
		t.Fatalf("start %s: %v", program, err)
	}
	go func() {
		d.cmd.Wait() // its status does not matter; the log has the reason
		close(d.done)
	}()
	return d
}

func (d *daemon) running() bool {
	select {
	case <-d.done:
		return false
	default:
		return true
	}
}

// await waits until try succeeds.
func (d *daemon) await(t testing.TB, try func() error) {
	t.Helper()
	deadline := time.Now().Add(2 * patience)
	for {
		err := try()
		if err == nil {
			break
		}
		if !d.running() || time.Now().After(deadline) {
			log, _ := os.ReadFile(d.log)
			t.Fatalf("%s does not answer: %v; its log:\n%s", d.name, err, tail(log, 4000))
		}
		time.Sleep(20 * time.Millisecond)
	}
	if d.mnt != nil {
		return
	}
	mnt, err := os.Open(filepath.Join("/proc", strconv.Itoa(d.cmd.Process.Pid), "ns", "mnt"))
	Must(t, err)
	d.mnt = mnt
}

func tail(b []byte, n int) []byte { return b[max(0, len(b)-n):] }

func (d *daemon) kill() {
	d.cmd.Process.Kill() // an error means that it has ended already
	<-d.done
}

// end asks the daemon to end, and kills every process left in its mount namespace: shims, and the
// helpers of a killed daemon.
func (d *daemon) end(t testing.TB) {
	if d.running() {
		d.cmd.Process.Signal(unix.SIGTERM)
		select {
		case <-d.done:
		case <-time.After(2 * patience):
			t.Errorf("%s does not end", d.name)
			d.kill()
		}
	}
	if d.mnt == nil {
		return
	}
	defer d.mnt.Close()
	var st unix.Stat_t
	if err := unix.Fstat(int(d.mnt.Fd()), &st); err != nil {
		t.Error(err)
		return
	}
	home := fmt.Sprintf("mnt:[%d]", st.Ino)
	deadline := time.Now().Add(patience)
	for {
		left := 0
		links, _ := filepath.Glob("/proc/[0-9]*/ns/mnt")
		for _, link := range links {
			if at, err := os.Readlink(link); err == nil && at == home {
				pid, _ := strconv.Atoi(strings.Split(link, "/")[2])
				unix.Kill(pid, unix.SIGKILL) // ESRCH: it has just ended
				left++
			}
		}
		if left == 0 {
			return
		}
		if time.Now().After(deadline) {
			t.Errorf("%d processes of %s do not end", left, d.name)
			return
		}
		time.Sleep(20 * time.Millisecond)
	}
}

// tell logs the state of the containers and the daemon's log if the test has failed. run is
// Docker's CLI.
func (d *daemon) tell(t testing.TB, run func(...string) (string, error)) {
	if !t.Failed() {
		return
	}
	list, err := run("ps", "-a", "--no-trunc")
	log, _ := os.ReadFile(d.log)
	t.Logf("containers at the end: %v\n%s\nlog of %s:\n%s", err, list, d.name, tail(log, 4000))
}

// shortDir creates a directory with a path that leaves room for the name of a socket, and removes
// it when t ends.
func shortDir(t testing.TB, name string) string {
	t.Helper()
	dir := filepath.Join("/tmp", name)
	Must(t, os.Mkdir(dir, 0o711))
	t.Cleanup(func() { Must(t, os.RemoveAll(dir)) })
	return dir
}

// removeCgroups removes the cgroup of this name, and the cgroups below it, from every hierarchy.
func removeCgroups(t testing.TB, name string) {
	dirs, _ := filepath.Glob(filepath.Join("/sys/fs/cgroup", "*", name))
	for _, dir := range append(dirs, filepath.Join("/sys/fs/cgroup", name)) {
		if err := removeCgroup(dir); err != nil && !errors.Is(err, fs.ErrNotExist) {
			t.Error(err)
		}
	}
}

func needPrograms(t testing.TB, names ...string) {
	t.Helper()
	for _, name := range names {
		if _, err := exec.LookPath(name); err != nil {
			Skip(t, "no "+name)
		}
	}
}

// runCommand returns the output of a command. An error includes the command's stderr.
func runCommand(cmd *exec.Cmd, stdin []byte) (string, error) {
	var out, errs bytes.Buffer
	cmd.Stdin, cmd.Stdout, cmd.Stderr = bytes.NewReader(stdin), &out, &errs
	if err := cmd.Run(); err != nil {
		return "", fmt.Errorf("%s: %w: %s", strings.Join(cmd.Args, " "), err, bytes.TrimSpace(tail(errs.Bytes(), 2000)))
	}
	return strings.TrimSuffix(out.String(), "\n"), nil
}
