package traffic

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"strings"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/container/slot"
	"github.com/fairlead-project/fairlead/kernel/netdev"
	"github.com/fairlead-project/fairlead/policy"
)

// tenant is one network tenant that is shaped, however many containers it is.
type tenant struct {
	key     slot.Tenant
	slot    slot.Slot
	name    string // of one of its containers
	net     policy.Net
	members map[container.ID]container.Container
	program *ebpf.Program           // nil until a veth needs it
	ends    map[deviceKey]link.Link // the host's ends of its veths
}

// deviceKey is a device, by its namespace's inode and its index in there.
type deviceKey struct {
	netns uint64
	index int
}

func newTenant(key slot.Tenant, s slot.Slot) *tenant {
	return &tenant{key: key, slot: s, members: make(map[container.ID]container.Container), ends: make(map[deviceKey]link.Link)}
}

// other gives a container of the tenant beside id, if what holds for the tenant
// is not net.
func (t *tenant) other(id container.ID, net policy.Net) (container.ID, bool) {
	for m := range t.members {
		if m != id && !equal(t.net, net) {
			return m, true
		}
	}
	return 0, false
}

func equal(a, b policy.Net) bool {
	same := a.Priority == nil && b.Priority == nil || a.Priority != nil && b.Priority != nil && *a.Priority == *b.Priority
	a.Priority, b.Priority = nil, nil
	return same && a == b
}

func (t *tenant) close() error {
	var errs []error
	for key, l := range t.ends {
		errs = append(errs, l.Close())
		delete(t.ends, key)
	}
	if t.program != nil {
		errs = append(errs, t.program.Close())
		t.program = nil
	}
	return errors.Join(errs...)
}

// unseen says whether a device brings packets to the host's devices without
// being received by one of them, so that nobody but the container sees them
// before the uplink.
func unseen(kind string) bool { return kind == "macvlan" || kind == "ipvlan" }

// trust notes whether packets of c come by such a device.
func (f *Traffic) trust(c container.Container) error {
	delete(f.macvlans, c.ID)
	for _, dev := range c.Interfaces {
		if unseen(dev.Kind) {
			f.macvlans[c.ID] = true
		}
	}
	return f.programs.setStrict(len(f.macvlans) > 0)
}

// identify has the packets of a tenant numbered, wherever they enter the host.
// It may be called again at any time and then only repairs.
func (f *Traffic) identify(ctx context.Context, t *tenant) error {
	want := make(map[deviceKey]container.HostEnd)
	var errs []error
	for id, c := range t.members {
		if err := f.programs.cgroup(id, f.level(c.Cgroup.V2), t.slot); err != nil {
			errs = append(errs, err)
		}
		for _, dev := range c.Interfaces {
			switch {
			case dev.Kind == "veth" && dev.Host.NetNS == 0:
				errs = append(errs, fmt.Errorf("%s: the host's end of this veth is not to be found", dev.Name))
			case dev.Kind == "veth":
				want[deviceKey{dev.Host.NetNS, dev.Host.Index}] = dev.Host
			}
		}
	}
	for key, l := range t.ends {
		if _, wanted := want[key]; !wanted {
			errs = append(errs, l.Close())
			delete(t.ends, key)
		}
	}
	for key, end := range want {
		if t.ends[key] != nil {
			continue
		}
		if ctx.Err() != nil {
			break // the caller tells
		}
		l, err := f.number(t, key, end)
		if err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", end.Name, err))
			continue
		}
		t.ends[key] = l
	}
	return errors.Join(errs...)
}

// number attaches a tenant's program to the host's end of a veth.
func (f *Traffic) number(t *tenant, key deviceKey, end container.HostEnd) (link.Link, error) {
	ns, err := f.open(end.NSPath, key.netns)
	if err != nil {
		return nil, err
	}
	defer ns.Close()
	if t.program == nil {
		if t.program, err = f.programs.identity(t.slot); err != nil {
			return nil, err
		}
	}
	return attach(ns, key.index, t.program, ebpf.AttachTCXIngress)
}

// open opens a network namespace by its inode, by way of path if that still
// leads to it.
func (f *Traffic) open(path string, inode uint64) (*netdev.NS, error) {
	if path != "" {
		if ns, err := netdev.Open(path); err == nil {
			if ns.Inode() == inode {
				return ns, nil
			}
			ns.Close()
		}
	}
	path, err := f.find.Find(inode)
	if err != nil {
		return nil, err
	}
	return netdev.Open(path)
}

// level gives how deep a cgroup lies in the v2 tree; 0 if it does not.
func (f *Traffic) level(dir string) int {
	rel, err := filepath.Rel(f.v2, dir)
	if f.v2 == "" || err != nil || rel == "." || strings.HasPrefix(rel, "..") {
		return 0
	}
	return strings.Count(rel, "/") + 1
}
