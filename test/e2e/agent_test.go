package e2e

import (
	"bytes"
	"context"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/kernel/netdev"
	"github.com/fairlead-project/fairlead/kernel/sched"
)

// netns is a network namespace: a testkit.NS or a sandbox.Box.
type netns interface{ Do(func() error) error }

// metricsAddr is free in every namespace that a test makes.
const metricsAddr = "127.0.0.1:9643"

// agent is a fairlead agent in a separate process, which can be started again after its end.
type agent struct {
	t     *testing.T
	ns    netns
	dir   string
	flags []string
	api   *api.Client
	pid   int
	inode uint64   // of ns
	found []string // cgroups of its uplinks from before: the number of a namespace may be used again
	ended <-chan struct{}
	err   error // how the process ended, once ended is closed
}

// newAgent prepares an agent in ns. flags follow the flags that set its directories.
func newAgent(t *testing.T, ns netns, flags ...string) *agent {
	t.Helper()
	dir, err := os.MkdirTemp("/tmp", "fle2e-") // short, for the sockets in it
	must(t, err)
	t.Cleanup(func() {
		testkit.Check(t, os.RemoveAll(dir))
	})
	must(t, os.Chmod(dir, 0o755))
	a := &agent{t: t, ns: ns, dir: dir}
	must(t, os.Mkdir(a.path("policy.d"), 0o755))
	must(t, os.WriteFile(a.path("config.yaml"), nil, 0o644))
	a.flags = append([]string{
		"agent",
		"--config", a.path("config.yaml"),
		"--socket", a.path("fairlead.sock"),
		"--self-socket", a.path("self.sock"),
		"--state-dir", a.path("state"),
		"--policy-dir", a.path("policy.d"),
		"--metrics-addr", metricsAddr,
		"--docker-host", "unix://" + a.path("no-docker"),
		"--podman-host", "unix://" + a.path("no-podman"),
		"--containerd", a.path("no-containerd"),
		"--sandbox-dir", a.path("no-sandboxes"),
		"--disk-capacities", a.path("lib/capacities.json"),
		"--record-dir", a.path("lib/record"),
	}, flags...)
	a.api = api.Dial(a.path("fairlead.sock"))
	t.Cleanup(a.api.Close)
	t.Cleanup(func() {
		var log []byte
		if t.Failed() {
			log = a.dump()
		}
		a.kill()
		// Nothing that a failed test left in force may stay.
		if out := fairlead(t, "restore", "--config", a.path("config.yaml"), "--socket", a.path("fairlead.sock"), "--state-dir", a.path("state")); out.status != 0 {
			t.Errorf("restore at the end: %v", out)
		}
		if t.Failed() {
			t.Logf("log of the agent:\n%s", log)
		}
	})
	return a
}

func (a *agent) path(name string) string { return filepath.Join(a.dir, name) }

// launch starts the process. wrap is a command that runs it.
func (a *agent) launch(wrap ...string) {
	a.t.Helper()
	log, err := os.OpenFile(a.path("log"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	must(a.t, err)
	defer log.Close()
	argv := append(append(wrap, program), a.flags...)
	cmd := exec.Command(argv[0], argv[1:]...)
	cmd.Stdout, cmd.Stderr = log, log
	if a.inode == 0 {
		must(a.t, a.ns.Do(func() (err error) {
			a.inode, err = netdev.InodeOf("/proc", unix.Gettid())
			return err
		}))
		a.found = uplinkGroups(a.inode)
	}
	a.ended = startIn(a.t, a.ns, cmd, &a.err)
	a.pid = cmd.Process.Pid
}

// start launches the agent, and waits until it knows the running containers.
func (a *agent) start(wrap ...string) {
	a.t.Helper()
	a.launch(wrap...)
	await(a.t, "agent", func() error {
		select {
		case <-a.ended:
			log, _ := os.ReadFile(a.path("log"))
			a.t.Fatalf("agent ended: %v\n%s", a.err, log)
		default:
		}
		st, err := a.api.Status(a.t.Context())
		if err == nil && !st.Complete {
			err = fmt.Errorf("not complete: %+v", st.Sources)
		}
		return err
	})
}

// runs reports whether the agent was started and has not ended since. While it returns true, no
// other process has the agent's pid.
func (a *agent) runs() bool {
	if a.ended == nil {
		return false
	}
	select {
	case <-a.ended:
		return false
	default:
		return true
	}
}

// kill ends the agent at once, if it runs.
func (a *agent) kill() {
	a.t.Helper()
	if a.runs() {
		unix.Kill(a.pid, unix.SIGKILL)
		ends(a.t, a.pid, a.ended)
	}
}

// dump returns the end of the log. If the agent still runs, dump adds its goroutines' stacks, most
// recently run first, and thereby ends the agent.
func (a *agent) dump() []byte {
	log, _ := os.ReadFile(a.path("log"))
	end := len(log)
	if a.runs() {
		unix.Kill(a.pid, unix.SIGQUIT)
		select {
		case <-a.ended:
		case <-time.After(patience):
		}
		log, _ = os.ReadFile(a.path("log"))
	}
	return log[max(0, end-8000):min(len(log), end+40000)]
}

// stop ends the agent with SIGTERM, as systemd does.
func (a *agent) stop() {
	a.t.Helper()
	must(a.t, unix.Kill(a.pid, unix.SIGTERM))
	a.finishes()
	for _, name := range []string{"fairlead.sock", "self.sock"} {
		testkit.Is(a.t, fmt.Sprintf("after a clean stop %s", name), testkit.Err(os.Stat(a.path(name))), fs.ErrNotExist)
	}
	mustSay(a.t, a.run("restore", "--state-dir", a.path("state")), 0, "nothing to undo")
}

// finishes waits for the end of an agent that was told to stop.
func (a *agent) finishes() {
	a.t.Helper()
	if ends(a.t, a.pid, a.ended); a.err != nil {
		log, _ := os.ReadFile(a.path("log"))
		a.t.Errorf("agent stopped with %v\n%s", a.err, log[max(0, len(log)-4000):])
	}
}

// run runs a command as a client of the agent.
func (a *agent) run(args ...string) output {
	a.t.Helper()
	return run(a.t, exec.Command(program, append(args, "--socket", a.path("fairlead.sock"), "--config", a.path("config.yaml"))...), startAtOnce)
}

// policy writes a policy file, or removes it if text is "".
func (a *agent) policy(name, text string) {
	a.t.Helper()
	path := filepath.Join(a.path("policy.d"), name)
	if text == "" {
		must(a.t, os.Remove(path))
		return
	}
	must(a.t, os.WriteFile(path, []byte(text), 0o644))
}

func (a *agent) status() api.Status {
	a.t.Helper()
	st, err := a.api.Status(a.t.Context())
	must(a.t, err)
	return st
}

// find returns a running container by its name.
func (a *agent) find(name string) (api.Container, error) {
	list, err := a.api.Containers(a.t.Context())
	if err != nil {
		return api.Container{}, err
	}
	i := slices.IndexFunc(list, func(c api.Container) bool { return c.Name == name })
	if i < 0 {
		return api.Container{}, fmt.Errorf("no container %q", name)
	}
	return list[i], nil
}

func featureOf(c api.Container, feature string) api.FeatureStatus {
	i := slices.IndexFunc(c.Features, func(f api.FeatureStatus) bool { return f.Feature == feature })
	if i < 0 {
		return api.FeatureStatus{}
	}
	return c.Features[i]
}

// stands waits until a feature reports a state of a container, with all of the words.
func (a *agent) stands(name, feature, state string, words ...string) (c api.Container) {
	a.t.Helper()
	await(a.t, fmt.Sprintf("%s of %s to be %s", feature, name, state), func() (err error) {
		if c, err = a.find(name); err != nil {
			return err
		}
		s := featureOf(c, feature)
		if s.State != state || slices.ContainsFunc(words, func(w string) bool { return !strings.Contains(s.Error, w) }) {
			return fmt.Errorf("want %q: it is %+v", words, s)
		}
		return nil
	})
	return c
}

// overlayEnd returns the report on the single end of a container on overlay networks.
func (a *agent) overlayEnd(name string) (api.OverlayEnd, error) {
	o, err := a.api.Overlay(a.t.Context(), name, 0)
	if err != nil {
		return api.OverlayEnd{}, err
	}
	if len(o.Containers) != 1 || len(o.Containers[0].Ends) != 1 {
		return api.OverlayEnd{}, fmt.Errorf("%s is %+v", name, o)
	}
	return o.Containers[0].Ends[0], nil
}

// isolation is what the agent reports, and the kernel shows, of an isolated container.
type isolation struct {
	api.Container
	threads []sched.Thread
	changes int
}

// isolated waits until every device of a container is polled by threads in the container's own cpu
// cgroup.
func (a *agent) isolated(name string, devices int) (i isolation) {
	a.t.Helper()
	await(a.t, name+" to be isolated", func() (err error) {
		i, err = a.isolation(a.t.Context(), name, devices)
		return err
	})
	return i
}

func (a *agent) isolation(ctx context.Context, name string, devices int) (i isolation, err error) {
	x, err := a.api.Explain(ctx, name)
	if err != nil {
		return i, err
	}
	i.Container = x.Container
	if s := featureOf(i.Container, "netcpu"); s.State != api.StateDone {
		return i, fmt.Errorf("netcpu is %+v", s)
	}
	// A runtime creates a device, and gives it an address later.
	bare := slices.ContainsFunc(i.Interfaces, func(dev api.Interface) bool { return len(dev.Addrs) == 0 || dev.Host == nil })
	if len(i.Interfaces) != devices || bare {
		return i, fmt.Errorf("devices %+v, want %d with addresses and host ends", i.Interfaces, devices)
	}
	byCgroup := 0
	for _, c := range x.Changes {
		if c.Kind != "nice" { // it follows the packets
			i.changes++
		}
		if c.Kind != "kthread" {
			continue
		}
		if c.State != api.ChangeInForce {
			return i, fmt.Errorf("change %+v is not in force", c)
		}
		th, err := parseThread(c.Object)
		if err != nil {
			return i, err
		}
		if !slices.Contains(i.threads, th) {
			i.threads = append(i.threads, th)
		}
		if c.Wrote == i.Cgroup.CPU {
			byCgroup++
		}
	}
	if byCgroup != devices || len(i.threads) != devices {
		return i, fmt.Errorf("%d threads of %d in its cgroup, want one for each of %d devices: %+v", byCgroup, len(i.threads), devices, x.Changes)
	}
	for _, th := range i.threads {
		if err := livesIn(th, i.Cgroup.CPU); err != nil {
			return i, err
		}
	}
	return i, nil
}

// parseThread parses TID:START:HIERARCHY, the journal's name for a thread.
func parseThread(object string) (th sched.Thread, err error) {
	_, err = fmt.Sscanf(object, "%d:%d:", &th.TID, &th.Start)
	return th, err
}

// livesIn checks in the kernel's own files that a NAPI thread is in a directory of the cpu
// controller.
func livesIn(th sched.Thread, dir string) error {
	comm, err := os.ReadFile(fmt.Sprintf("/proc/%d/comm", th.TID))
	if err != nil {
		return err
	}
	if !bytes.HasPrefix(comm, []byte("napi/eth")) {
		return fmt.Errorf("thread %d is %s", th.TID, comm)
	}
	tasks, err := os.ReadFile(filepath.Join(dir, "cgroup.procs"))
	if err != nil {
		return err
	}
	if !slices.Contains(strings.Fields(string(tasks)), strconv.Itoa(th.TID)) {
		return fmt.Errorf("thread %d is not in %s", th.TID, dir)
	}
	return nil
}

// footprint is the agent process's share of the kernel's objects.
type footprint struct{ BPF, NetNS, DeadProcesses int }

// footprint returns the agent's footprint once it has finished with every container.
func (a *agent) footprint() (f footprint) {
	a.t.Helper()
	await(a.t, "the agent to be done with all containers", func() error {
		list, err := a.api.Containers(a.t.Context())
		for _, c := range list {
			if len(c.Features) == 0 || slices.ContainsFunc(c.Features, func(s api.FeatureStatus) bool { return s.State == api.StatePending }) {
				return fmt.Errorf("%s is at %+v", c.Name, c.Features)
			}
		}
		return err
	})
	f = a.holds()
	// The footprint still grows right after the start.
	await(a.t, "the agent to hold the same for a while", func() error {
		time.Sleep(300 * time.Millisecond)
		was := f
		if f = a.holds(); f != was {
			return fmt.Errorf("it holds %+v, just now %+v", f, was)
		}
		return nil
	})
	return f
}

// holds returns the footprint at this moment.
func (a *agent) holds() (f footprint) {
	a.t.Helper()
	fds, err := filepath.Glob(fmt.Sprintf("/proc/%d/fd/*", a.pid))
	must(a.t, err)
	for _, fd := range fds {
		to, err := os.Readlink(fd)
		if err != nil {
			continue // closed meanwhile
		}
		info, _ := os.ReadFile(strings.Replace(fd, "/fd/", "/fdinfo/", 1))
		switch {
		case strings.HasPrefix(to, "anon_inode:bpf"):
			f.BPF++
		case strings.HasPrefix(to, "net:["):
			f.NetNS++
		case bytes.Contains(info, []byte("\nPid:\t-1\n")):
			f.DeadProcesses++
		}
	}
	return f
}

// forgets waits until nothing of an ended container is left: the agent no longer lists it, its
// journal has no entry for it, and the container's threads have ended.
func (a *agent) forgets(i isolation) {
	a.t.Helper()
	a.letsGo(i)
	await(a.t, "the threads of "+i.Name+" to end", func() error {
		for _, th := range i.threads {
			if now, err := sched.Find("/proc", th.TID); err == nil && now == th {
				return fmt.Errorf("thread %d lives", th.TID)
			}
		}
		return nil
	})
}

// letsGo is forgets for a container with a network namespace that outlives it. The threads outlive
// it, too, but must have left its cgroup.
func (a *agent) letsGo(i isolation) {
	a.t.Helper()
	await(a.t, i.Name+" to be forgotten", func() error {
		if c, err := a.find(i.Name); err == nil && c.ID == i.ID {
			return fmt.Errorf("it is listed: %+v", c)
		} else if err != nil && !strings.HasPrefix(err.Error(), "no container") {
			return err
		}
		for _, th := range i.threads {
			if livesIn(th, i.Cgroup.CPU) == nil {
				return fmt.Errorf("thread %d is in %s", th.TID, i.Cgroup.CPU)
			}
		}
		x, err := a.api.Explain(a.t.Context(), i.ID.String())
		if err != nil {
			return err
		}
		if len(x.Changes) > 0 {
			return fmt.Errorf("the journal has %+v", x.Changes)
		}
		return nil
	})
}

// rests waits until the agent has nothing in force.
func (a *agent) rests() {
	a.t.Helper()
	await(a.t, "nothing to be in force", func() error {
		st, err := a.api.Status(a.t.Context())
		if err == nil && st.Changes != 0 {
			err = fmt.Errorf("%d changes are in the journal", st.Changes)
		}
		if dirs := uplinkGroups(a.inode); err == nil && len(dirs) > len(a.found) {
			err = fmt.Errorf("cgroups %v are there, were %v", dirs, a.found)
		}
		return err
	})
}

// idles waits until the agent rests, and holds no more than at its start. Programs wait for their
// next user for some seconds.
func (a *agent) idles(atStart footprint) {
	a.t.Helper()
	a.rests()
	await(a.t, "nothing more to be held", func() error {
		if now := a.holds(); now.BPF > atStart.BPF || now.NetNS > atStart.NetNS || now.DeadProcesses > atStart.DeadProcesses {
			return fmt.Errorf("the agent holds %+v, at its start %+v", now, atStart)
		}
		return nil
	})
}
