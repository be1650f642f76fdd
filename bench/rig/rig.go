// Package rig builds the test beds of the netcpu experiment out of sandboxes:
// a victim and a receiver that share CPU 0 by quota, and a sender on CPU 1
// whose packets are all processed on CPU 0, by RPS.
//
// A rig is a host of its own, network namespace included: the machine's
// network is not touched, and an agent that is to protect the rig's containers
// runs inside Node. The rig measures nothing (package bench does) and protects
// nobody.
package rig

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/fairlead-project/fairlead/bench/load"
	"github.com/fairlead-project/fairlead/kernel"
	"github.com/fairlead-project/fairlead/kernel/netdev"
	"github.com/fairlead-project/fairlead/sandbox"
)

// Path is the way that the sender's packets take to the receiver.
type Path string

// The paths. Hop leads from the host into the receiver by one veth. NIC is a
// veth with two queues whose far end is outside: NIC, bridge, veth. Docker is
// the same with containers of a Docker Engine of the rig's own in place of
// sandboxes: NIC, a published port, the default bridge, veth.
const (
	Hop    Path = "hop"
	NIC    Path = "nic"
	Docker Path = "docker"
)

// Config says what rig to build. The zero value is a hop, half and half.
type Config struct {
	Path Path
	// VictimShare and ReceiverShare are the quotas in percent of CPU 0; 0 is
	// 50. cpu.shares stay equal.
	VictimShare, ReceiverShare int
	// Dir is where state is kept; "" is a directory of the rig's own below
	// /run/fairlead, which Sweep knows.
	Dir string
}

// What a rig looks like.
const (
	sharedCPU = 0
	senderCPU = 1
	// The sender is the world outside: what else this machine does on its CPU
	// must not change the load.
	senderNice = "-20"

	outsideAddr  = "10.111.0.1"
	receiverAddr = "10.111.0.2"
	victimAddr   = "10.111.0.3"
	receiverMAC  = "02:f1:00:00:00:02"
	victimMAC    = "02:f1:00:00:00:03"
	outsideMAC   = "02:f1:00:00:00:01"
	nodeAddr     = "10.111.0.254"
	nodeMAC      = "02:f1:00:00:00:fe"
	port         = "9000"

	// NICDevice is the name of the NIC in Node, on the path NIC; its queue
	// SenderQueue is the one that the sender's packets come by. ReceiverPort
	// and VictimPort are the host ends of the containers' veths.
	NICDevice    = "flnic"
	Bridge       = "flbr0"
	ReceiverPort = "flreceiver"
	VictimPort   = "flvictim"
	SenderQueue  = senderCPU
)

// Rig is a built test bed.
type Rig struct {
	Config
	Sandboxes *sandbox.Host // the containers of the rig, as a source
	Node      *sandbox.Box  // the host's network namespace
	Outside   *sandbox.Box  // where the sender is; on a Hop the same as Node
	Receiver  *sandbox.Box
	Victim    *sandbox.Box
	// DockerHost is where the engine of the path Docker answers, in the form
	// of DOCKER_HOST; else "".
	DockerHost string

	id     string
	temp   []string // directories that TempDir made
	engine *engine
	target string // where the sender finds the receiver
}

var serial atomic.Uint32

const stateParent = "/run/fairlead"

// New builds a rig of sandboxes. It needs root, two CPUs, and a program whose
// main (or TestMain) calls sandbox.Reexec and load.Reexec.
func New(cfg Config) (*Rig, error) {
	if cfg.Path == "" {
		cfg.Path = Hop
	}
	if cfg.Path != Hop && cfg.Path != NIC {
		return nil, fmt.Errorf("build rig: no such path of sandboxes: %q", cfg.Path)
	}
	return newRig(context.Background(), cfg)
}

// NewDocker builds a rig with the path Docker. Beside what New needs, it needs
// dockerd, the docker CLI and iptables, a program that is static, and whose
// main (or TestMain) calls Reexec.
func NewDocker(ctx context.Context, cfg Config) (*Rig, error) {
	cfg.Path = Docker
	return newRig(ctx, cfg)
}

func newRig(ctx context.Context, cfg Config) (*Rig, error) {
	if runtime.NumCPU() < 2 {
		return nil, errors.New("build rig: two CPUs are needed, one for the containers and one for the sender")
	}
	for _, share := range []*int{&cfg.VictimShare, &cfg.ReceiverShare} {
		if *share == 0 {
			*share = 50
		}
	}
	id := fmt.Sprintf("fl%d-%d", os.Getpid(), serial.Add(1))
	if cfg.Dir == "" {
		cfg.Dir = filepath.Join(stateParent, "rig-"+id)
	}
	host, err := sandbox.New(sandbox.Config{Dir: cfg.Dir})
	if err != nil {
		return nil, fmt.Errorf("build rig: %w", err)
	}
	r := &Rig{Config: cfg, Sandboxes: host, id: id}
	if err := r.build(ctx, id); err != nil {
		return nil, errors.Join(fmt.Errorf("build rig: %w", err), r.Close())
	}
	return r, nil
}

// Sweep removes what killed makers have left of their rigs.
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
	return errors.Join(append(errs, sweepTemp())...)
}

// TempDir makes a directory that goes with the rig.
func (r *Rig) TempDir(name string) (string, error) {
	dir := filepath.Join(os.TempDir(), "fairlead-"+r.id+"-"+name)
	if err := os.Mkdir(dir, 0o711); err != nil {
		return "", err
	}
	r.temp = append(r.temp, dir)
	return dir, nil
}

// sweepTemp removes what TempDir made for makers that have ended.
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
			errs = append(errs, os.RemoveAll(dir))
		}
	}
	return errors.Join(errs...)
}

// Close ends all that runs in the rig and removes it.
func (r *Rig) Close() error {
	var err error
	if r.engine != nil {
		for _, b := range []*sandbox.Box{r.Receiver, r.Victim} {
			if b != nil {
				err = errors.Join(err, b.Destroy())
			}
		}
		r.engine.stop()
	}
	err = errors.Join(err, r.Sandboxes.Close())
	for _, dir := range r.temp {
		err = errors.Join(err, os.RemoveAll(dir))
	}
	os.Remove(stateParent) // fails while anything else is there
	return err
}

func (r *Rig) build(ctx context.Context, id string) error {
	specs := []struct {
		box  **sandbox.Box
		spec sandbox.Spec
	}{
		{&r.Node, sandbox.Spec{Name: id + "-host", Bare: true}},
		{&r.Outside, sandbox.Spec{Name: id + "-outside", Bare: true}},
		{&r.Receiver, sandbox.Spec{Name: id + "-receiver", CPU: share(r.ReceiverShare)}},
		{&r.Victim, sandbox.Spec{Name: id + "-victim", CPU: share(r.VictimShare)}},
	}
	if r.Path == Hop {
		specs = slices.Delete(specs, 1, 2)
	}
	if r.Path == Docker {
		specs = specs[:2]
	}
	for _, s := range specs {
		b, err := r.Sandboxes.Create(s.spec)
		if err != nil {
			return err
		}
		*s.box = b
		// Else the kernel's own IPv6 traffic comes between.
		for _, which := range []string{"all", "default"} {
			if err := b.Sysctl("ipv6/conf/"+which+"/disable_ipv6", "1"); err != nil && !errors.Is(err, os.ErrNotExist) {
				return err
			}
		}
	}
	r.target = receiverAddr + ":" + port
	var err error
	switch r.Path {
	case Hop:
		r.Outside = r.Node
		err = r.wireHop()
	case NIC:
		err = errors.Join(r.wireNIC(Bridge), r.wireBridge())
	case Docker:
		r.target = nodeAddr + ":" + port
		if err = r.wireNIC(""); err == nil {
			err = r.docker(ctx, id)
		}
	}
	if err != nil {
		return err
	}
	return r.steer()
}

// share is a quota in percent of the shared CPU.
func share(percent int) sandbox.CPU {
	return sandbox.CPU{
		Quota:  time.Duration(percent) * time.Millisecond,
		Period: 100 * time.Millisecond,
		Set:    strconv.Itoa(sharedCPU),
	}
}

func prefix(addr string) netip.Prefix { return netip.PrefixFrom(netip.MustParseAddr(addr), 24) }

func (r *Rig) wireHop() error {
	return errors.Join(
		sandbox.Wire(
			sandbox.End{Box: r.Node, Name: ReceiverPort, Addr: prefix(outsideAddr), MAC: outsideMAC},
			sandbox.End{Box: r.Receiver, Name: "eth0", Addr: prefix(receiverAddr), MAC: receiverMAC}),
		r.Node.Neighbour(ReceiverPort, netip.MustParseAddr(receiverAddr), receiverMAC),
		r.Receiver.Neighbour("eth0", netip.MustParseAddr(outsideAddr), outsideMAC),
	)
}

// wireNIC makes the NIC, a port of a bridge or with an address of its own.
func (r *Rig) wireNIC(bridge string) error {
	nic := sandbox.End{Box: r.Node, Name: NICDevice, MAC: nodeMAC, Queues: 2, Bridge: bridge}
	if bridge == "" {
		nic.Addr = prefix(nodeAddr)
	} else if err := r.Node.Bridge(bridge, netip.Prefix{}); err != nil {
		return err
	}
	outside := sandbox.End{Box: r.Outside, Name: "eth0", Addr: prefix(outsideAddr), MAC: outsideMAC, Queues: 2}
	if err := sandbox.Wire(nic, outside); err != nil {
		return err
	}
	return errors.Join(
		r.likeNIC(),
		r.Outside.Neighbour("eth0", netip.MustParseAddr(nodeAddr), nodeMAC),
	)
}

// wireBridge joins the containers to the bridge.
func (r *Rig) wireBridge() error {
	return errors.Join(
		sandbox.Wire(sandbox.End{Box: r.Node, Name: ReceiverPort, Bridge: Bridge},
			sandbox.End{Box: r.Receiver, Name: "eth0", Addr: prefix(receiverAddr), MAC: receiverMAC}),
		sandbox.Wire(sandbox.End{Box: r.Node, Name: VictimPort, Bridge: Bridge},
			sandbox.End{Box: r.Victim, Name: "eth0", Addr: prefix(victimAddr), MAC: victimMAC}),
		r.Node.Forward(ReceiverPort, receiverMAC),
		r.Node.Forward(VictimPort, victimMAC),
		r.Outside.Neighbour("eth0", netip.MustParseAddr(receiverAddr), receiverMAC),
		r.Receiver.Neighbour("eth0", netip.MustParseAddr(outsideAddr), outsideMAC),
	)
}

// likeNIC gives the NIC's veth what a real NIC has by itself: it polls (a veth
// does only with GRO), and no super-packets come by the wire.
func (r *Rig) likeNIC() error {
	for _, k := range []struct {
		box     *sandbox.Box
		dev     string
		offload netdev.Offload
		on      bool
	}{{r.Outside, "eth0", netdev.TSO, false}, {r.Node, NICDevice, netdev.GRO, true}} {
		if err := setOffload(k.box, k.dev, k.offload, k.on); err != nil {
			return err
		}
	}
	return nil
}

func setOffload(b *sandbox.Box, dev string, group netdev.Offload, on bool) error {
	ns, err := netdev.Open(b.NetNS())
	if err != nil {
		return err
	}
	defer ns.Close()
	links, err := ns.Links()
	if err != nil {
		return err
	}
	value := netdev.Off
	if on {
		value = group.On()
	}
	for _, l := range links {
		if l.Name == dev {
			return ns.Offload(l.Index, group).Write(value)
		}
	}
	return fmt.Errorf("set %s of %s: no such device", group, dev)
}

// steer brings all receive work to the shared CPU: without that, a veth's
// packets are received on the CPU of the sender, and nobody is disturbed.
func (r *Rig) steer() error {
	shared := func(int) string { return fmt.Sprintf("%x", 1<<sharedCPU) }
	if err := r.Receiver.SetQueues("eth0", "rx", "rps_cpus", shared); err != nil {
		return err
	}
	if r.Path == Hop {
		return nil
	}
	return errors.Join(
		r.Node.SetQueues(NICDevice, "rx", "rps_cpus", shared),
		// A veth's receive queue is the sender's transmit queue. Each CPU gets
		// one, so the sender's packets all come by queue SenderQueue.
		r.Outside.SetQueues("eth0", "tx", "xps_cpus", func(q int) string { return fmt.Sprintf("%x", 1<<q) }),
	)
}

// Generator is a load generator that runs in the rig.
type Generator struct {
	*load.Board
	*sandbox.Process
}

// Stop ends the generator.
func (g *Generator) Stop() error {
	g.Kill()
	<-g.Done()
	return g.Close()
}

// Start runs a load generator (args as load.Main takes them) in one of the
// rig's sandboxes, and waits until it is at work. In Outside it runs on the
// sender's CPU. It ends with the rig, or by Stop.
func (r *Rig) Start(ctx context.Context, box *sandbox.Box, args ...string) (*Generator, error) {
	cmd, board, err := load.Command(args...)
	if err != nil {
		return nil, err
	}
	cpu := sharedCPU
	if box == r.Outside {
		cpu = senderCPU
	}
	p, err := box.Start(cmd, cpu)
	if err != nil {
		return nil, errors.Join(err, board.Close())
	}
	g := &Generator{Board: board, Process: p}
	if err := board.Await(ctx, p.Done()); err != nil {
		return nil, errors.Join(fmt.Errorf("%v: %w", args, err), g.Stop())
	}
	return g, nil
}

// Traffic is a kind of load from the sender to the receiver.
type Traffic string

// The kinds of traffic. UDP is 1400-byte datagrams at whatever rate the sender's
// board is set to, from a socket with the kernel's default buffer: on one
// machine, the sender then waits while some 90 of them are in this host's
// queues. Overrun is the same from one that waits for nothing. TCP is bulk over
// one connection; UDPRR and TCPRR are requests and responses of 64 bytes over 16
// connections.
const (
	UDP     Traffic = "udp"
	Overrun Traffic = "udp-overrun"
	TCP     Traffic = "tcp"
	UDPRR   Traffic = "udp-rr"
	TCPRR   Traffic = "tcp-rr"
)

// Send starts a kind of traffic, paused: sender.SetRate lets it go.
func (r *Rig) Send(ctx context.Context, kind Traffic) (sender, receiver *Generator, err error) {
	var send, recv []string
	switch kind {
	case UDP, Overrun:
		send = []string{"udp-send", "--size", "1400"}
		if kind == Overrun {
			send = append(send, "--buffer", "8388608")
		}
		// It gets no turn for some milliseconds while the victim runs; what
		// comes meanwhile must not be lost for want of a buffer.
		recv = []string{"udp-recv", "--buffer", "8388608"}
	case TCP:
		send = []string{"tcp-send"}
		recv = []string{"tcp-recv"}
	case UDPRR, TCPRR:
		proto := string(kind[:3])
		send = []string{"rr-client", "--proto", proto, "--conns", "16", "--size", "64"}
		recv = []string{"rr-server", "--proto", proto}
	default:
		return nil, nil, fmt.Errorf("no such traffic: %q", kind)
	}
	receiver, err = r.Start(ctx, r.Receiver, append(recv, "--listen", ":"+port)...)
	if err != nil {
		return nil, nil, err
	}
	sender, err = r.Start(ctx, r.Outside, append(send, "--to", r.target, "--rate", "0", "--nice", senderNice)...)
	if err != nil {
		return nil, nil, errors.Join(err, receiver.Stop())
	}
	return sender, receiver, nil
}
