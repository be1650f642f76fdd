// Package rig builds the test beds of the experiments from sandboxes. The containers share CPU 0, by
// quota if they have one; the first is the victim of the netcpu experiment. The outside sends from
// CPU 1, and RPS makes CPU 0 process all of its packets.
//
// A rig is a separate host with its own network namespace, so it does not touch the machine's network.
// An agent that protects the rig's containers runs inside Node. The rig itself neither measures
// (package bench does) nor protects.
package rig

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/fairlead-project/fairlead/kernel"
	"github.com/fairlead-project/fairlead/lab/sandbox"
)

// Path is the path of the sender's packets to the receiver.
type Path string

// The paths. Hop leads from the host into the receiver by one veth. NIC leads by a NIC, a bridge and a
// veth; the NIC is a veth with two queues and its far end outside. Docker is like NIC, with containers
// of a Docker Engine in the rig instead of sandboxes, behind its default bridge; only they send. VXLAN
// is NIC with a tunnel from outside to the bridge. Macvlan gives each container a device on the NIC.
// With Host containers use the NIC itself, with Local they have no network. Routed, Bridged and Swarm
// are paths between the two hosts of an overlay network, which NewOverlay builds.
const (
	Hop     Path = "hop"
	NIC     Path = "nic"
	VXLAN   Path = "vxlan"
	Macvlan Path = "macvlan"
	Host    Path = "host"
	Local   Path = "local"
	Docker  Path = "docker"
	Routed  Path = "routed"
	Bridged Path = "bridged"
	Swarm   Path = "swarm"
)

// Config describes a rig. The zero value is the path Hop with two containers of half a CPU each.
type Config struct {
	Path Path
	// Containers are pinned to CPU 0, or to their own CPU. The first is the victim, the others are
	// its neighbours. The paths Hop and Docker have room for one neighbour. Empty is Pair(50, 50).
	Containers []Container
	// Unsteered leaves packets on the CPU that sent them, so no CPU sends another an IPI.
	Unsteered bool
}

// Container is one container of a rig. It has the default cpu.shares.
type Container struct {
	Name  string  // unique in the rig; its sandbox is called ID-Name
	Quota float64 // percent of its CPU; 0: none
	// CPU is SharedCPU, or SenderCPU for a client of the others. On the path Local containers run on
	// any CPU, and have a common parent cgroup like an engine's containers.
	CPU int
}

// Pair returns a victim and a receiver.
func Pair(victim, receiver float64) []Container {
	return []Container{{Name: "victim", Quota: victim}, {Name: "receiver", Quota: receiver}}
}

// Equal returns a victim and n-1 neighbours with equal parts of CPU 0 (Iron, section 2: quota =
// period/n).
func Equal(n int) []Container {
	all := []Container{{Name: "victim", Quota: 100 / float64(n)}}
	for i := 1; i < n; i++ {
		all = append(all, Container{Name: fmt.Sprintf("n%d", i), Quota: 100 / float64(n)})
	}
	return all
}

// SharedCPU is the CPU of the containers.
const SharedCPU = 0

// The properties of a rig.
const (
	SenderCPU = 1
	// The sender stands for the outside, so other work on its CPU must not change the load.
	senderNice = "-20"

	outsideAddr = "10.111.0.1"
	outsideMAC  = "02:f1:00:00:00:01"
	// Outer addresses of the tunnel on the path VXLAN.
	tunnelAddr     = "10.113.0.1"
	tunnelNodeAddr = "10.113.0.254"
	nodeAddr       = "10.111.0.254"
	nodeMAC        = "02:f1:00:00:00:fe"
	port           = "9000"

	// NICDevice is the name of the NIC in Node, on the path NIC. The sender's packets arrive by its
	// queue SenderCPU. The name of a container's host end is PortPrefix and the container's name.
	NICDevice    = "flnic"
	Bridge       = "flbr0"
	TunnelDevice = "flvx0" // on the path VXLAN, in Node and in Outside
	PortPrefix   = "fl"
)

// address and mac return the addresses of the rig's i-th container.
func address(i int) string { return fmt.Sprintf("10.111.0.%d", 2+i) }
func mac(i int) string     { return fmt.Sprintf("02:f1:00:00:00:%02x", 2+i) }

// maxContainers is the number of container addresses below the host's address.
const maxContainers = 200

// Rig is a built test bed.
type Rig struct {
	Config
	Sandboxes *sandbox.Host  // host of the rig's containers
	Node      *sandbox.Box   // the host's network namespace
	Outside   *sandbox.Box   // the sender's box; Node on the path Hop; nil on Local and in an overlay
	Boxes     []*sandbox.Box // containers, in the order of Config
	// DockerHost is the address of the rig's Docker Engine, in the form of DOCKER_HOST; "" without an
	// engine.
	DockerHost string

	id     string
	cpu    int      // of processes in Node
	temp   []string // directories that TempDir made
	engine *engine
	load   []*Generator // started by Start or Serve

	dropping bool // see Drop
}

// Victim returns the first container.
func (r *Rig) Victim() *sandbox.Box { return r.Boxes[0] }

// Neighbours returns the containers after the first.
func (r *Rig) Neighbours() []*sandbox.Box { return r.Boxes[1:] }

// Prefix returns the prefix of the names of the rig's containers. No other container has it.
func (r *Rig) Prefix() string { return r.id + "-" }

var serial atomic.Uint32

const stateParent = "/run/fairlead"

// New builds a rig. It needs root, two CPUs, and a program with a main (or TestMain) that calls
// sandbox.Reexec and load.Reexec. With the path Docker it also needs dockerd, the docker CLI,
// iptables, and a static program that calls Reexec.
func New(ctx context.Context, cfg Config) (*Rig, error) {
	if cfg.Path == "" {
		cfg.Path = Hop
	}
	if !slices.Contains([]Path{Hop, NIC, VXLAN, Macvlan, Host, Local, Docker}, cfg.Path) {
		return nil, fmt.Errorf("build rig: no such path: %q", cfg.Path)
	}
	return newRig(ctx, cfg, SharedCPU)
}

func newRig(ctx context.Context, cfg Config, cpu int) (*Rig, error) {
	if runtime.NumCPU() < 2 {
		return nil, errors.New("build rig: two CPUs are needed, one for the containers and one for the sender")
	}
	if len(cfg.Containers) == 0 {
		cfg.Containers = Pair(50, 50)
	}
	if n := len(cfg.Containers); n > maxContainers || n != 2 && (cfg.Path == Hop || cfg.Path == Docker) {
		return nil, fmt.Errorf("build rig: %d containers do not fit the path %s", n, cfg.Path)
	}
	id := fmt.Sprintf("fl%d-%d", os.Getpid(), serial.Add(1))
	host, err := sandbox.New(filepath.Join(stateParent, "rig-"+id))
	if err != nil {
		return nil, fmt.Errorf("build rig: %w", err)
	}
	r := &Rig{Config: cfg, Sandboxes: host, id: id, cpu: cpu}
	if err := r.build(ctx, id); err != nil {
		return nil, errors.Join(fmt.Errorf("build rig: %w", err), r.Close())
	}
	return r, nil
}

// Sweep removes the remains of rigs of killed processes.
func Sweep() error {
	dirs, err := filepath.Glob(filepath.Join(stateParent, "rig-fl*"))
	if err != nil {
		return err
	}
	var errs []error
	for _, dir := range dirs {
		_, err := sandbox.Sweep(kernel.Roots{}, dir)
		errs = append(errs, err)
	}
	return errors.Join(append(errs, sweepTemp(), sweepFtrace())...)
}

// TempDir creates a directory that is removed with the rig.
func (r *Rig) TempDir(name string) (string, error) {
	dir := filepath.Join(os.TempDir(), "fairlead-"+r.id+"-"+name)
	if err := os.Mkdir(dir, 0o711); err != nil {
		return "", err
	}
	r.temp = append(r.temp, dir)
	return dir, nil
}

// sweepTemp removes the directories that TempDir made in processes that have ended.
func sweepTemp() error {
	dirs, err := filepath.Glob(filepath.Join(os.TempDir(), "fairlead-fl*-*"))
	if err != nil {
		return err
	}
	var errs []error
	for _, dir := range dirs {
		var pid, n int
		if _, err := fmt.Sscanf(filepath.Base(dir), "fairlead-fl%d-%d-", &pid, &n); err != nil {
			continue // not ours
		}
		if unix.Kill(pid, 0) == unix.ESRCH {
			unmount(dir)
			errs = append(errs, os.RemoveAll(dir))
		}
	}
	return errors.Join(errs...)
}

// Close ends all processes in the rig and removes it.
func (r *Rig) Close() error {
	err := r.Stop()
	if r.engine != nil {
		for _, b := range r.Boxes {
			err = errors.Join(err, b.Destroy())
		}
		r.engine.stop()
	}
	for _, dir := range r.temp {
		unmount(dir)
	}
	err = errors.Join(err, r.Sandboxes.Close())
	for _, dir := range r.temp {
		err = errors.Join(err, os.RemoveAll(dir))
	}
	os.Remove(stateParent) // fails unless it is empty
	return err
}

func (r *Rig) build(ctx context.Context, id string) error {
	var err error
	if r.Node, err = r.create(sandbox.Spec{Name: id + "-host", Bare: true}); err != nil {
		return err
	}
	r.Outside = r.Node
	switch r.Path {
	case Hop:
	case Local, Routed, Bridged, Swarm:
		r.Outside = nil
	default:
		if r.Outside, err = r.create(sandbox.Spec{Name: id + "-outside", Bare: true}); err != nil {
			return err
		}
	}
	for _, c := range r.Containers {
		if r.Path == Docker || r.Path == Swarm {
			break // the engine creates the containers
		}
		spec := sandbox.Spec{Name: id + "-" + c.Name, CPU: c.cpu()}
		switch r.Path {
		case Host:
			spec.Network = r.Node
		case Local:
			spec.CPU.Set, spec.Parent = "", id
		}
		b, err := r.create(spec)
		if err != nil {
			return err
		}
		r.Boxes = append(r.Boxes, b)
	}
	switch r.Path {
	case Hop:
		err = r.wireHop()
	case NIC:
		err = errors.Join(r.wireNIC(Bridge), r.wireBridge())
	case VXLAN:
		if err = r.wireNIC(""); err == nil {
			err = errors.Join(r.tunnel(), r.wireBridge())
		}
	case Macvlan:
		if err = r.wireNIC(""); err == nil {
			err = r.wireMacvlans()
		}
	case Host:
		err = r.wireNIC("")
	case Docker:
		if err = r.wireNIC(""); err == nil {
			err = r.docker(ctx)
		}
	case Local, Routed, Bridged, Swarm:
		return nil // NewOverlay joins the hosts of an overlay
	}
	if err != nil {
		return err
	}
	return r.steer()
}

// create creates a sandbox without IPv6, because the kernel's own IPv6 packets would interfere.
func (r *Rig) create(spec sandbox.Spec) (*sandbox.Box, error) {
	b, err := r.Sandboxes.Create(spec)
	if err != nil {
		return nil, err
	}
	for _, which := range []string{"all", "default"} {
		if err := b.Sysctl("ipv6/conf/"+which+"/disable_ipv6", "1"); err != nil && !errors.Is(err, os.ErrNotExist) {
			return nil, err
		}
	}
	return b, nil
}

// cpu returns a container's part of the shared CPU.
func (c Container) cpu() sandbox.CPU {
	return sandbox.CPU{
		Quota:  time.Duration(c.Quota * float64(period) / 100),
		Period: period,
		Set:    strconv.Itoa(c.CPU),
	}
}

const period = 100 * time.Millisecond

// Lift removes the quota of the i-th container, or restores it.
func (r *Rig) Lift(i int, lifted bool) error {
	cpu := sandbox.CPU{Quota: r.Containers[i].cpu().Quota, Period: period}
	if lifted {
		cpu.Quota = -1
	}
	return r.Boxes[i].Limit(cpu)
}
