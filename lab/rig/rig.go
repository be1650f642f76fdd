// Package rig builds the test beds of the experiments out of sandboxes: containers that share CPU
// 0, by quota where they have one (the first is the victim of the netcpu experiment), and an
// outside on CPU 1 with packets that are all processed on CPU 0, by RPS.
//
// A rig is a host of its own, network namespace included: it does not touch the machine's network,
// and an agent that is to protect the rig's containers runs inside Node. The rig measures nothing
// (package bench does) and protects nothing.
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

// The paths. Hop leads from the host into the receiver by one veth. NIC is a veth with two queues
// and its far end outside: NIC, bridge, veth. Docker is the same with containers of the rig's own
// Docker Engine in place of sandboxes, behind its default bridge: only they send. VXLAN is
// NIC with a tunnel from outside to the bridge. Macvlan gives each container a device on the NIC;
// on Host they use the NIC itself. Local gives them no network. Routed, Bridged and Swarm belong to
// the two hosts of an overlay network, which NewOverlay builds.
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

// Config describes the rig to build. The zero value is a hop, half and half.
type Config struct {
	Path Path
	// Containers are pinned to CPU 0, or to their own CPU. The first is the victim, the others are
	// its neighbours; the paths Hop and Docker have room for one neighbour. None is Pair(50, 50).
	Containers []Container
	// Unsteered leaves the packets to the CPU that sent them: no CPU sends another an IPI.
	Unsteered bool
}

// Container is one container of a rig. It has the default cpu.shares.
type Container struct {
	Name  string  // unique in the rig; its sandbox is called ID-Name
	Quota float64 // percent of its CPU; 0 sets none
	// CPU is where it runs: SharedCPU, or SenderCPU for a client of the others. On the path Local
	// it is any, and all are below one group, as an engine's are.
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
	// The sender is the outside: other work on its CPU must not change the load.
	senderNice = "-20"

	outsideAddr = "10.111.0.1"
	outsideMAC  = "02:f1:00:00:00:01"
	// The addresses below the tunnel of the path VXLAN.
	tunnelAddr     = "10.113.0.1"
	tunnelNodeAddr = "10.113.0.254"
	nodeAddr       = "10.111.0.254"
	nodeMAC        = "02:f1:00:00:00:fe"
	port           = "9000"

	// NICDevice is the name of the NIC in Node, on the path NIC; the sender's packets arrive by its
	// queue SenderCPU. The host ends of the containers' veths are called PortPrefix and the
	// container's name.
	NICDevice    = "flnic"
	Bridge       = "flbr0"
	TunnelDevice = "flvx0" // on the path VXLAN, in Node and in Outside
	PortPrefix   = "fl"
)

// address and mac return the addresses of the rig's i-th container.
func address(i int) string { return fmt.Sprintf("10.111.0.%d", 2+i) }
func mac(i int) string     { return fmt.Sprintf("02:f1:00:00:00:%02x", 2+i) }

// maxContainers is how many containers have an address below the host's.
const maxContainers = 200

// Rig is a built test bed.
type Rig struct {
	Config
	Sandboxes *sandbox.Host  // the containers of the rig, as a source
	Node      *sandbox.Box   // the host's network namespace
	Outside   *sandbox.Box   // the sender's box; on a Hop the same as Node; nil on Local and an overlay
	Boxes     []*sandbox.Box // the containers, in the order of Config
	// DockerHost is the address of the engine of the path Docker, in the form of DOCKER_HOST; else
	// "".
	DockerHost string

	id     string
	cpu    int      // of processes in Node
	temp   []string // directories that TempDir made
	engine *engine
	load   []*Generator // started, and not ended by Stop

	dropping bool // see Drop
}

// Victim is the first container.
func (r *Rig) Victim() *sandbox.Box { return r.Boxes[0] }

// Neighbours are the containers after the first.
func (r *Rig) Neighbours() []*sandbox.Box { return r.Boxes[1:] }

// Prefix is the prefix of the names of the rig's containers, and of no other names.
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

// Sweep removes what killed processes have left of their rigs.
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
	os.Remove(stateParent) // fails while anything else is there
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
			break // its engine makes them
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
		return nil // NewOverlay joins two of the latter
	}
	if err != nil {
		return err
	}
	return r.steer()
}

// create creates a sandbox without IPv6, because the kernel's own IPv6 traffic would interfere.
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
