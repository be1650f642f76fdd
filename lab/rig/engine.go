package rig

import (
	"bytes"
	"context"
	"debug/elf"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/fairlead-project/fairlead/lab/load"
	"github.com/fairlead-project/fairlead/lab/sandbox"
)

// engineVerb makes this program a Docker Engine of a rig.
const engineVerb = "rig-engine"

// Reexec turns this process into the rig's Docker Engine if args, which are os.Args, ask for that. It
// then returns only on failure, with true and the exit status. Otherwise it returns false. Call it
// first in main and TestMain.
func Reexec(args []string) (status int, ok bool) {
	if len(args) < 3 || args[1] != engineVerb {
		return 0, false
	}
	fmt.Fprintln(os.Stderr, becomeEngine(args[2], args[3:]))
	return 1, true
}

// becomeEngine turns this process into dockerd, in a new mount namespace. The namespace has the sysfs
// of the current network namespace. Its /run and /var/lib are empty, because the machine's own engine
// uses these directories.
func becomeEngine(program string, args []string) error {
	runtime.LockOSThread() // exec keeps the namespaces of the calling thread
	if err := unix.Unshare(unix.CLONE_FS | unix.CLONE_NEWNS); err != nil {
		return fmt.Errorf("unshare mount namespace: %w", err)
	}
	const cgroups = "/sys/fs/cgroup"
	aside, err := os.MkdirTemp("", "fairlead-cgroup-")
	if err != nil {
		return err
	}
	for _, m := range []struct {
		source, target, fs string
		flags              uintptr
	}{
		{"", "/", "", unix.MS_REC | unix.MS_PRIVATE},
		{cgroups, aside, "", unix.MS_BIND | unix.MS_REC},
		{"sysfs", "/sys", "sysfs", 0},
		{aside, cgroups, "", unix.MS_MOVE},
		{"tmpfs", "/run", "tmpfs", 0},
		{"tmpfs", "/var/lib", "tmpfs", 0},
	} {
		if err := unix.Mount(m.source, m.target, m.fs, m.flags, ""); err != nil {
			return fmt.Errorf("mount %s on %s: %w", m.source, m.target, err)
		}
	}
	// aside was a mount point only in this namespace, and nothing is mounted there any more.
	if err := os.Remove(aside); err != nil {
		return err
	}
	for _, dir := range []string{"/run/docker", "/run/lock"} {
		if err := os.Mkdir(dir, 0o755); err != nil {
			return err
		}
	}
	return fmt.Errorf("run %s: %w", program, unix.Exec(program, append([]string{program}, args...), os.Environ()))
}

// engine is a Docker Engine inside a rig.
type engine struct {
	host    string // in the form of DOCKER_HOST
	dir     string
	process *sandbox.Process
	program string // mount option for this program in a container
}

// docker starts an engine in Node, and the containers in it.
func (r *Rig) docker(ctx context.Context) error {
	if err := r.startEngine(ctx); err != nil {
		return err
	}
	for i := range r.Containers {
		if err := r.contain(ctx, i); err != nil {
			return err
		}
	}
	return nil
}

// startEngine starts dockerd in Node and waits until it answers. The directory of its state must not be
// below /run, because the engine has its own /run.
func (r *Rig) startEngine(ctx context.Context) error {
	if err := EngineRuns(); err != nil {
		return fmt.Errorf("start a Docker Engine: %w", err)
	}
	parent, err := r.Sandboxes.Claim(r.id + "-containers")
	if err != nil {
		return err
	}
	// The cgroups of a box keep track of every process that the engine starts.
	box, err := r.Sandboxes.Create(sandbox.Spec{Name: r.id + "-engine", Network: r.Node})
	if err != nil {
		return err
	}
	dir, err := r.TempDir("docker")
	if err != nil {
		return err
	}
	dockerd, err := exec.LookPath("dockerd")
	if err != nil {
		return err
	}
	exe, err := os.Executable()
	if err != nil {
		return err
	}
	log, err := os.Create(filepath.Join(dir, "log"))
	if err != nil {
		return err
	}
	defer log.Close()
	r.DockerHost = "unix://" + filepath.Join(dir, "docker.sock")
	cmd := exec.Command(exe, engineVerb, dockerd,
		"--data-root", filepath.Join(dir, "data"), "--exec-root", filepath.Join(dir, "exec"),
		"--pidfile", filepath.Join(dir, "pid"), "--host", r.DockerHost,
		"--cgroup-parent", parent, "--exec-opt", "native.cgroupdriver=cgroupfs",
		"--bip", "10.112.0.1/16", "--ip6tables=false", "--userland-proxy=false")
	cmd.Stdout, cmd.Stderr = log, log
	p, err := box.Start(cmd)
	if err != nil {
		return err
	}
	r.engine = &engine{host: r.DockerHost, dir: dir, process: p, program: "type=bind,readonly,source=" + exe + ",target=/fairlead"}
	if err := r.engine.answers(ctx, log.Name()); err != nil {
		return err
	}
	// The image is an empty archive: containers have only this program, mounted.
	_, err = r.engine.run(ctx, bytes.NewReader(make([]byte, 1024)), "import", "-", image)
	return err
}

// answers waits until the engine answers.
func (e *engine) answers(ctx context.Context, log string) error {
	ctx, cancel := context.WithTimeout(ctx, 60*time.Second)
	defer cancel()
	var refused error
	err := load.Await(ctx, e.process.Done(), func() bool {
		_, refused = e.run(ctx, nil, "version")
		return refused == nil
	})
	if err != nil {
		said, _ := os.ReadFile(log)
		return fmt.Errorf("the Docker Engine does not answer: %w: %w; its log ends:\n%s", err, refused, said[max(0, len(said)-2000):])
	}
	return nil
}

// contain starts the i-th container in the engine.
func (r *Rig) contain(ctx context.Context, i int, flags ...string) error {
	cpu, name := r.Containers[i].cpu(), r.id+"-"+r.Containers[i].Name
	flags = append(flags, "--stop-signal", "KILL", "--cpuset-cpus", cpu.Set, "--cpu-period", micros(cpu.Period), "--cpu-quota", micros(cpu.Quota))
	pid, err := r.engine.container(ctx, name, flags...)
	if err != nil {
		return err
	}
	b, err := r.Sandboxes.Adopt(name, pid)
	if err != nil {
		return err
	}
	r.Boxes = append(r.Boxes, b)
	return nil
}

func micros(d time.Duration) string { return strconv.FormatInt(d.Microseconds(), 10) }

// image is the name of the image of a rig's containers. It is empty.
const image = "fairlead-bench"

// EngineRuns returns what a rig lacks for a Docker Engine with containers: a program, or static
// linking of this one.
func EngineRuns() error {
	for _, program := range []string{"dockerd", "docker", "iptables"} {
		if _, err := exec.LookPath(program); err != nil {
			return err
		}
	}
	exe, err := os.Executable()
	if err != nil {
		return err
	}
	f, err := elf.Open(exe)
	if err != nil {
		return err
	}
	defer f.Close()
	if slices.ContainsFunc(f.Progs, func(p *elf.Prog) bool { return p.Type == elf.PT_INTERP }) {
		return fmt.Errorf("%s is not a static program; build it with CGO_ENABLED=0", exe)
	}
	return nil
}

// run runs the docker CLI and returns its output.
func (e *engine) run(ctx context.Context, stdin io.Reader, args ...string) (string, error) {
	cmd := exec.CommandContext(ctx, "docker", args...)
	cmd.Env = append(os.Environ(), "DOCKER_HOST="+e.host, "DOCKER_CONTEXT=", "DOCKER_CONFIG="+e.dir)
	var out, errs bytes.Buffer
	cmd.Stdin, cmd.Stdout, cmd.Stderr = stdin, &out, &errs
	if err := cmd.Run(); err != nil {
		return "", fmt.Errorf("docker %s: %w: %s", args[0], err, bytes.TrimSpace(errs.Bytes()))
	}
	return strings.TrimSpace(out.String()), nil
}

// container starts a container that waits, and returns its first process.
func (e *engine) container(ctx context.Context, name string, flags ...string) (pid int, err error) {
	args := append([]string{"run", "-d", "--name", name, "--mount", e.program}, flags...)
	if _, err := e.run(ctx, nil, append(args, image, "/fairlead", "sandbox-init", name)...); err != nil {
		return 0, err
	}
	out, err := e.run(ctx, nil, "inspect", "--format", "{{.State.Pid}}", name)
	if err != nil {
		return 0, err
	}
	return strconv.Atoi(out)
}

// Prepare creates a container with labels. start runs docker start; the container then generates
// uncounted traffic with the arguments args of load.Main. The caller calls remove. The rig must have the
// path Docker.
func (r *Rig) Prepare(ctx context.Context, name string, labels []string, args ...string) (start, remove func(context.Context) error, err error) {
	if r.engine == nil {
		return nil, nil, fmt.Errorf("make container %s: the rig has no Docker Engine", name)
	}
	name = r.Prefix() + name
	create := []string{"create", "--name", name, "--mount", r.engine.program, "--stop-signal", "KILL", "--cpuset-cpus", r.Containers[0].cpu().Set}
	for _, l := range labels {
		create = append(create, "--label", l)
	}
	run := func(args ...string) func(context.Context) error {
		return func(ctx context.Context) error {
			_, err := r.engine.run(ctx, nil, args...)
			return err
		}
	}
	create = append(create, image, "/fairlead", load.Verb)
	return run("start", name), run("rm", "-f", name), run(append(create, args...)...)(ctx)
}

// stop ends the engine. Its containers go with the rig's cgroups, and its state with the rig.
func (e *engine) stop() {
	e.process.Signal(unix.SIGTERM)
	select {
	case <-e.process.Done():
	case <-time.After(20 * time.Second):
		e.process.Kill()
		<-e.process.Done()
	}
}
