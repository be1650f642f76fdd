package e2e

import (
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"strconv"
	"testing"

	"github.com/safchain/ethtool"

	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/kernel/netdev"
	"github.com/fairlead-project/fairlead/sandbox"
)

// rig is a host made of sandboxes: containers at a bridge, to which packets
// come from a wire through a device that polls.
type rig struct {
	t          *testing.T
	sandboxes  *sandbox.Host
	host, wire *sandbox.Box
	boxes      []*sandbox.Box
	inode      uint64 // of the host's network namespace
}

// newRig makes a rig without containers.
func newRig(t *testing.T) *rig {
	t.Helper()
	testkit.NeedRoot(t)
	dir, err := os.MkdirTemp("/tmp", "fle2e-")
	must(t, err)
	t.Cleanup(func() { os.RemoveAll(dir) })
	sh, err := sandbox.New(sandbox.Config{Dir: dir})
	must(t, err)
	t.Cleanup(func() {
		if err := sh.Close(); err != nil {
			t.Error(err)
		}
	})
	r := &rig{t: t, sandboxes: sh}
	r.host = r.create(sandbox.Spec{Name: "e2e-host", Bare: true})
	r.wire = r.create(sandbox.Spec{Name: "e2e-wire", Bare: true})
	must(t, r.host.Bridge("br0", netip.Prefix{}))
	must(t, sandbox.Wire(
		sandbox.End{Box: r.wire, Name: "wire", Addr: netip.MustParsePrefix("10.66.0.1/16"), Queues: 2},
		sandbox.End{Box: r.host, Name: "nic0", Bridge: "br0", Queues: 2}))
	must(t, r.host.Do(func() error {
		e, err := ethtool.NewEthtool()
		if err != nil {
			return err
		}
		defer e.Close()
		return e.Change("nic0", map[string]bool{"rx-gro": true})
	}))
	r.inode, err = netdev.InodeOf("/proc", r.host.PID)
	must(t, err)
	return r
}

func (r *rig) create(spec sandbox.Spec) *sandbox.Box {
	r.t.Helper()
	b, err := r.sandboxes.Create(spec)
	must(r.t, err)
	return b
}

// add makes a container at the bridge. Its address is 10.66.1.N.
func (r *rig) add(spec sandbox.Spec) *sandbox.Box {
	r.t.Helper()
	b := r.create(spec)
	r.boxes = append(r.boxes, b)
	n := strconv.Itoa(len(r.boxes))
	must(r.t, sandbox.Wire(
		sandbox.End{Box: r.host, Name: "h" + n, Bridge: "br0"},
		sandbox.End{Box: b, Name: "eth0", Addr: netip.MustParsePrefix("10.66.1." + n + "/16")}))
	return b
}

// agent makes an agent for which the rig is the host.
func (r *rig) agent() *agent {
	r.t.Helper()
	return newAgent(r.t, r.host, "--sandbox-dir", r.sandboxes.Dir())
}

// state is all that an agent might change here.
func (r *rig) state() state {
	r.t.Helper()
	s := state{}
	s.readDevices(r.t, "host", r.host.NetNS())
	s.readDevices(r.t, "wire", r.wire.NetNS())
	paths := []string{uplinkGroup(r.inode)}
	for _, b := range r.boxes {
		s.readDevices(r.t, b.Name, b.NetNS())
		paths = append(paths, sandbox.Parent+"/"+b.Name)
	}
	s.readCgroups(r.t, paths...)
	return s
}

// sameAs waits until all is as it was before. It need not wait but for kernel
// threads, which end a little after they are told to; on a busy machine, later.
func (r *rig) sameAs(before state, when string) {
	r.t.Helper()
	err := within(patience, func() error {
		if diff := r.state().diff(before); diff != "" {
			return fmt.Errorf("%s", diff)
		}
		return nil
	})
	if err != nil {
		r.t.Fatalf("%s, this is not as before:\n%v", when, err)
	}
}

// reachable sends packets from the wire to each container until one comes back:
// under a flood, some are lost as those of the flood are.
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

const isolateAll = "match: {name: \"e2e-*\"}\nset: {netcpu: isolate}\n"
