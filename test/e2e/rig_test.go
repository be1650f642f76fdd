package e2e

import (
	"fmt"
	"os/exec"
	"strconv"
	"testing"

	"github.com/fairlead-project/fairlead/internal/testkit/topology"
	"github.com/fairlead-project/fairlead/kernel/netdev"
	"github.com/fairlead-project/fairlead/lab/sandbox"
)

// rig is a host made of sandboxes: containers at a bridge, which receives packets from a wire
// through a device that polls.
type rig struct {
	*topology.Host
	t          *testing.T
	host, wire *sandbox.Box
	boxes      []*sandbox.Box
	inode      uint64 // of the host's network namespace
}

// newRig makes a rig without containers.
func newRig(t *testing.T) *rig {
	t.Helper()
	h := topology.New(t)
	r := &rig{Host: h, t: t}
	r.host, r.wire = h.Uplink("e2e-", "10.66.0.1/16", sandbox.End{Bridge: "br0", Queues: 2})
	must(t, h.Open(r.host).Offload(h.Index(r.host, "nic0"), netdev.GRO).Write(netdev.GRO.On()))
	var err error
	r.inode, err = netdev.InodeOf("/proc", r.host.PID)
	must(t, err)
	return r
}

// Create makes a sandbox with exactly this name, which tests look for.
func (r *rig) Create(spec sandbox.Spec) *sandbox.Box {
	r.t.Helper()
	b, err := r.Sandboxes.Create(spec)
	must(r.t, err)
	return b
}

// add makes a container at the bridge. Its address is 10.66.1.N.
func (r *rig) add(spec sandbox.Spec) *sandbox.Box {
	r.t.Helper()
	b := r.Create(spec)
	r.boxes = append(r.boxes, b)
	n := strconv.Itoa(len(r.boxes))
	r.Join(b, "10.66.1."+n+"/16", r.host, "h"+n)
	return b
}

// agent prepares an agent whose host is the rig.
func (r *rig) agent() *agent {
	r.t.Helper()
	return newAgent(r.t, r.host, "--sandbox-dir", r.Sandboxes.Dir())
}

// state returns everything that an agent might change here.
func (r *rig) state() state {
	r.t.Helper()
	s := state{}
	s.readDevices(r.t, "host", r.host.NetNS())
	s.readDevices(r.t, "wire", r.wire.NetNS())
	paths := []string{uplinkGroup(r.inode)}
	for _, b := range r.boxes {
		s.readDevices(r.t, b.Name, b.NetNS())
		paths = append(paths, sandbox.Prefix+b.Name)
	}
	s.readCgroups(r.t, paths...)
	return s
}

// sameAs waits until the state is as before. Only kernel threads need the wait: they end a little
// after the request, and later on a busy machine.
func (r *rig) sameAs(before state, when string) {
	r.t.Helper()
	err := within(patience, func() error { return r.state().diff(before) })
	if err != nil {
		r.t.Fatalf("%s, this is not as before:\n%v", when, err)
	}
}

// reachable sends packets from the wire to each container until one comes back: the flood causes
// losses here, too.
func (r *rig) reachable(when string) {
	r.t.Helper()
	for n, b := range r.boxes {
		await(r.t, fmt.Sprintf("%s, a packet to reach %s and return", when, b.Name), func() error {
			p, err := r.wire.Start(exec.Command("busybox", "ping", "-c", "1", "-W", "1", fmt.Sprintf("10.66.1.%d", n+1)))
			must(r.t, err)
			ends(r.t, p.PID, p.Done())
			return p.Wait()
		})
	}
}

const isolateAll = "match: {name: \"e2e-*\"}\nset: {netcpu: isolate, netcpu.steal: 0%}\n"
