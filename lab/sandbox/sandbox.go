// Package sandbox is a tiny container host. A sandbox is a network namespace, a cgroup in every
// hierarchy that matters, and processes in them. The demo, the experiments and the tests need no
// other runtime.
//
// It is not a runtime for untrusted code: a sandbox has the host's root file system, users and
// processes, and confines nothing. Package bench and tests create sandboxes. The agent sees them
// through [discover.Sandboxes], from the state files that the [Host] keeps.
//
// A sandbox ends with the process that created it, even if that is killed. Only its cgroups and state
// file stay: [Sweep] removes those.
package sandbox

import (
	"cmp"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/fairlead-project/fairlead/discover"
	"github.com/fairlead-project/fairlead/kernel"
	"github.com/fairlead-project/fairlead/kernel/cgroup"
	"github.com/fairlead-project/fairlead/kernel/enter"
)

// Prefix begins the name of a sandbox's cgroup. The cgroups are at the root of each hierarchy unless
// [Spec] names a parent. A parent with children that compute on different CPUs has work on several
// CPUs, which can starve everything else on a CPU for minutes on Linux 6.18 before 6.18.45
// (docs/limits.md).
const Prefix = "flsandbox-"

// Spec describes a sandbox.
type Spec struct {
	// Name is unique on the machine. It has at most 63 characters: lower-case letters, digits, "-", "_"
	// and ".".
	Name   string
	Image  string // in the container's record
	Labels map[string]string
	CPU    CPU
	// Parent is the name of a parent cgroup with the default weight, as engines have one. It goes with
	// the last sandbox in it. "": none.
	Parent string
	// Network is the sandbox with which to share a network namespace, as in a pod; nil creates a new
	// namespace.
	Network *Box
	// Bare creates only a namespace, without cgroups, for the hosts and peers of a rig. It is not a
	// container.
	Bare bool
}

// CPU holds the CPU limits of a sandbox. The zero value sets none.
type CPU struct {
	Quota  time.Duration // CPU time for each Period; less than 0 lifts the limit
	Period time.Duration // 0 with a Quota: 100 ms
	Shares uint64        // in the unit of cpu.shares: 1024 is the kernel's default
	Set    string        // list of CPUs, "0" or "0-3,5"
}

// ErrExists is returned by Create for a name that is in use.
var ErrExists = errors.New("sandbox exists")

// Host creates sandboxes. It is safe for concurrent use.
type Host struct {
	roots kernel.Roots
	dir   string
	trees []enter.Tree // hierarchies with a cgroup for each sandbox, v2 first
	maker discover.Process

	mu    sync.Mutex
	boxes map[string]*Box
}

// New creates a Host with its state files in dir; "": discover.DefaultSandboxes. It needs root, and a
// program that calls [Reexec] in main or TestMain.
func New(dir string) (*Host, error) {
	roots := kernel.Default()
	dir = cmp.Or(dir, discover.DefaultSandboxes)
	if os.Getenv(insideEnv) != "" {
		// A main without Reexec would start itself without end.
		return nil, errors.New("make sandbox host: this process is in a sandbox itself (does its main call sandbox.Reexec?)")
	}
	layout, err := cgroup.Detect(roots.Proc, roots.Cgroup)
	if err != nil {
		return nil, fmt.Errorf("make sandbox host: %w", err)
	}
	if layout.V2 == "" {
		return nil, errors.New("make sandbox host: no cgroup v2 tree is mounted")
	}
	maker, err := discover.FindProcess(roots.Proc, os.Getpid())
	if err != nil {
		return nil, fmt.Errorf("make sandbox host: %w", err)
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return nil, fmt.Errorf("make sandbox host: %w", err)
	}
	return &Host{
		roots: roots,
		dir:   dir,
		trees: enter.Trees(layout, roots.Cgroup),
		maker: maker,
		boxes: map[string]*Box{},
	}, nil
}

// Dir returns the directory of the state files, for [discover.Sandboxes].
func (h *Host) Dir() string { return h.dir }

// Close destroys all sandboxes of the Host.
func (h *Host) Close() error {
	h.mu.Lock()
	all := make([]*Box, 0, len(h.boxes))
	for _, b := range h.boxes {
		all = append(all, b)
	}
	h.mu.Unlock()
	errs := make([]error, len(all))
	var wg sync.WaitGroup
	for i, b := range all {
		wg.Go(func() { errs[i] = b.Destroy() })
	}
	wg.Wait()
	// Ignore the error: other hosts may keep their state here.
	os.Remove(h.dir)
	return errors.Join(errs...)
}

// Box is one sandbox. It lives until Destroy or the end of this process.
type Box struct {
	Name string
	PID  int // process that keeps the namespace

	host  *Host
	state state
	dirs  []enter.Group // its cgroups; none if Bare
	ns    *os.File      // its network namespace
	net   *Box          // sandbox with which it shares the namespace, or nil
	init  *Process
	mu    sync.Mutex
	procs []*Process
	gone  bool
}

// Create creates a sandbox with only the process that keeps it alive. The error matches ErrExists if
// the name is in use. A failed Create leaves nothing behind.
func (h *Host) Create(spec Spec) (_ *Box, err error) {
	for _, name := range []string{spec.Name, cmp.Or(spec.Parent, spec.Name)} {
		if !discover.SandboxName.MatchString(name) {
			return nil, fmt.Errorf("create sandbox %q: name must match %s", name, discover.SandboxName)
		}
	}
	b := &Box{Name: spec.Name, host: h, net: spec.Network}
	b.state = state{
		discover.Sandbox{Name: spec.Name, Image: spec.Image, Labels: spec.Labels, Bare: spec.Bare, Maker: h.maker},
		filepath.Join(h.dir, spec.Name+".json"),
	}
	if !spec.Bare {
		path := Prefix + spec.Name
		if spec.Parent != "" {
			path = Prefix + spec.Parent + "/" + path
		}
		b.dirs = h.below(path)
		for _, g := range b.dirs {
			b.state.Cgroups = append(b.state.Cgroups, g.Dir)
		}
	}
	if err := h.enrol(b); err != nil {
		return nil, fmt.Errorf("create sandbox %s: %w", spec.Name, err)
	}
	defer func() {
		if err != nil {
			err = errors.Join(fmt.Errorf("create sandbox %s: %w", spec.Name, err), b.Destroy())
		}
	}()
	if !spec.Bare {
		if made, err := createGroups(b.dirs, spec.CPU); err != nil {
			b.state.Cgroups = b.state.Cgroups[:made] // another Host's sandbox may own the others
			return nil, err
		}
	}
	if err := b.startInit(); err != nil {
		return nil, err
	}
	b.state.Init, err = discover.FindProcess(h.roots.Proc, b.PID)
	if err != nil {
		return nil, err
	}
	return b, b.state.write()
}

// enrol writes the state of a box before its creation, so that Sweep finds remains of a killed process.
func (h *Host) enrol(b *Box) error {
	if err := b.state.create(); err != nil {
		return err
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	h.boxes[b.Name] = b
	return nil
}

// Limit changes the CPU limits of the sandbox. Zero fields change nothing.
func (b *Box) Limit(cpu CPU) error {
	for _, g := range b.dirs {
		if err := limit(g, cpu); err != nil {
			return fmt.Errorf("limit sandbox %s: %w", b.Name, err)
		}
	}
	return nil
}

// Destroy kills all processes in the sandbox and removes it. It moves kernel threads that are left in
// the sandbox's cgroups into the root cgroup, and returns an error that names them. A second call does
// nothing.
func (b *Box) Destroy() error {
	b.mu.Lock()
	if b.gone {
		b.mu.Unlock()
		return nil
	}
	b.gone = true
	procs := b.procs
	b.mu.Unlock()

	for _, p := range procs {
		p.Kill()
	}
	for _, p := range procs {
		<-p.Done()
	}
	if b.ns != nil {
		b.ns.Close()
	}
	if b.state.file == "" {
		return nil // adopted: its engine owns the rest
	}
	err := removeGroups(b.state.Cgroups)
	if err == nil {
		// After an error the file stays, so that Sweep finds the sandbox.
		err = os.Remove(b.state.file)
	}
	b.host.mu.Lock()
	delete(b.host.boxes, b.Name)
	b.host.mu.Unlock()
	if err != nil {
		return fmt.Errorf("destroy sandbox %s: %w", b.Name, err)
	}
	return nil
}

// Adopt returns a Box for an engine's container, to start processes in it as if by exec, and to reach
// its devices. pid is its first process. The engine still owns the container: Destroy ends only
// processes that were started through the Box.
func (h *Host) Adopt(name string, pid int) (*Box, error) {
	b := &Box{Name: name, PID: pid, host: h}
	place, err := enter.In(h.roots.Proc, h.trees, pid)
	if err != nil {
		return nil, fmt.Errorf("adopt container %s: %w", name, err)
	}
	b.dirs, b.ns = place.Groups, place.NetNS
	for _, g := range b.dirs {
		b.state.Cgroups = append(b.state.Cgroups, g.Dir)
	}
	return b, nil
}

// Claim reserves the name of a cgroup in every hierarchy of this host, for the containers of an engine.
// It returns the path from the roots of the hierarchies. The engine creates the cgroups. Close and
// Sweep kill their processes and remove them.
func (h *Host) Claim(name string) (path string, err error) {
	if !discover.SandboxName.MatchString(name) {
		return "", fmt.Errorf("claim cgroup %q: name must match %s", name, discover.SandboxName)
	}
	path = Prefix + name
	b := &Box{Name: name, host: h}
	b.state = state{discover.Sandbox{Name: name, Bare: true, Maker: h.maker}, filepath.Join(h.dir, name+".json")}
	mounts := []string{h.trees[0].Mount}
	others, err := filepath.Glob(filepath.Join(h.roots.Cgroup, "*", "tasks")) // only v1 has this file
	if err != nil {
		return "", fmt.Errorf("claim cgroup %s: %w", name, err)
	}
	for _, file := range others {
		// Two names of one mount do no harm: under the second there is nothing left.
		mounts = append(mounts, filepath.Dir(file))
	}
	for _, m := range mounts {
		b.state.Cgroups = append(b.state.Cgroups, filepath.Join(m, path))
	}
	if err := h.enrol(b); err != nil {
		return "", fmt.Errorf("claim cgroup %s: %w", name, err)
	}
	return "/" + path, nil
}

// NetNS returns a path to the sandbox's network namespace, for any process while the sandbox lives.
func (b *Box) NetNS() string {
	return filepath.Join(b.host.roots.Proc, fmt.Sprint(b.PID), "ns", "net")
}

// Cgroups returns the sandbox's cgroup directories in the hierarchies of this host, v2 first. It returns
// none if the sandbox is Bare.
func (b *Box) Cgroups() []string { return b.state.Cgroups }
