// Package identity maps packets, devices, sockets and tasks to network tenants: it gives
// each tenant of the host a slot, and maintains the maps by which BPF programs look the
// slot up (bpf/identity.h). Features register containers. A feature keeps its own
// attributes of a tenant in a BPF array indexed by slot, and those of a single container
// in a Cgroups.
//
// It attaches nothing (package hook does) and reads no packet. Labels, images and
// addresses do not decide identity: the data comes from package container, which reads
// it from the kernel. The agent makes one Identity.
package identity

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"reflect"
	"slices"
	"sync"
	"time"

	"github.com/cilium/ebpf"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/kernel/bpf"
	"github.com/fairlead-project/fairlead/kernel/cgroup"
	"github.com/fairlead-project/fairlead/kernel/netdev"
)

// Member registers one container on behalf of one feature: how to recognise its packets
// and tasks. Unset fields leave what other features registered unchanged.
type Member struct {
	ID      container.ID
	Tenant  Tenant
	Cgroups []uint64 // cgroup v2 ids of this container's tasks, its own cgroup first
	Devices []Device
	// HostNetwork: the container shares the host's network namespace, so only
	// sockets identify its packets.
	HostNetwork bool
	// Rank decides between members with the same device: the highest owns it, and the
	// earliest among equals.
	Rank int
}

// Device is one network device of a member. A device that several members share, as
// containers of a pod do, belongs to one of them; see Member.Rank.
type Device struct {
	Netns   uint64 // inode of its network namespace
	Ifindex int
	// HostEnd: the device is the host's end of the container's veth, where packets
	// arrive that the container sent. A device without it makes its whole namespace,
	// loopback included, the container's.
	HostEnd bool
	// Trusted: the namespace of this host end was not created by a container. An
	// untrusted host end, and one in a member's Home, identifies only the packets that
	// pass through it; other devices of that namespace are not the host's.
	Trusted bool
}

// cgroupsMost limits the cgroups of one container that are registered.
const cgroupsMost = 256

// Of describes a container: its tenant, its devices with their host ends, and its
// cgroups. If reading the cgroups fails, the Member has those read so far.
func Of(c container.Container) (Member, error) {
	m := Member{ID: c.ID, Tenant: c.TenantKey(), HostNetwork: c.HostNetwork}
	for _, dev := range c.Interfaces {
		m.Devices = append(m.Devices, Device{Netns: c.NetNS, Ifindex: dev.Index})
		if dev.Host.NetNS != 0 {
			m.Devices = append(m.Devices, Device{Netns: dev.Host.NetNS, Ifindex: dev.Host.Index, HostEnd: true, Trusted: dev.Host.Trusted})
		}
	}
	ids, err := cgroup.IDs(c.Cgroup.V2, cgroupsMost)
	if errors.Is(err, cgroup.ErrMany) || errors.Is(err, fs.ErrNotExist) {
		err = nil // the host's own cgroup needs no more; or the container is about to be forgotten
	}
	m.Cgroups = ids
	return m, err
}

// Identity holds the maps and their members. Make it with Open. It is safe for
// concurrent use.
type Identity struct {
	*Allocator
	object *bpf.Object
	maps   identityMaps
	epoch  *ebpf.Variable

	mu      sync.Mutex
	told    map[teller]*entry
	last    int // nth of the last entry
	index   index
	cgroups cgroups
	change  uint32 // what epoch is
}

// teller is the key of a registration: a feature and a container.
type teller struct {
	by string
	id container.ID
}

// entry is one registration.
type entry struct {
	Member
	nth   int // order of first registration
	slot  Slot
	homes []uint64 // network namespaces, present and past
}

// Open makes the maps. proc is the root of proc.
func Open(proc string) (_ *Identity, err error) {
	i := &Identity{
		Allocator: NewAllocator(time.Now),
		told:      make(map[teller]*entry),
	}
	defer func() {
		if err != nil {
			err = errors.Join(fmt.Errorf("identity: %w", err), i.Close())
		}
	}()
	self, err := netdev.InodeOf(proc, os.Getpid())
	if err != nil {
		return nil, err
	}
	if i.object, err = bpf.Open("identity", loadIdentity, nil, nil); err != nil {
		return nil, err
	}
	var objs struct {
		identityMaps
		Epoch *ebpf.Variable `ebpf:"fl_epoch"`
	}
	if err := i.object.Load(&objs, nil); err != nil {
		return nil, err
	}
	i.maps, i.epoch = objs.identityMaps, objs.Epoch
	i.index, i.cgroups = newIndex(self), newCgroups(i.maps.FlCgroups, "cgroups")
	if err := i.sync(); err != nil {
		return nil, err
	}
	return i, nil
}

// Maps returns the maps with which to open an object that includes bpf/identity.h or
// bpf/fate.h. The Identity owns them.
func (i *Identity) Maps() bpf.Maps { return i.object.Maps() }

// Usage returns how full the maps are.
func (i *Identity) Usage() []bpf.Usage {
	if i == nil {
		return nil
	}
	return i.object.Usage()
}

// Close closes the maps. Attached programs keep using them.
func (i *Identity) Close() error {
	if i == nil {
		return nil
	}
	return i.object.Close()
}

// Tell registers a container for the feature named by, and replaces the feature's earlier
// registration. It returns the slot of the container's tenant, which holds until Forget;
// Nobody while the container's network is unknown. On an error (no room in a map, or
// ErrFull) everything else is in force. Repeating a registration costs nothing.
func (i *Identity) Tell(by string, m Member) (Slot, error) {
	i.mu.Lock()
	defer i.mu.Unlock()
	var errs []error
	e := i.told[teller{by, m.ID}]
	if e != nil && i.index.devices.settled() && i.cgroups.stated.settled() && reflect.DeepEqual(e.Member, m) && (e.slot != Nobody || m.Tenant == Tenant{}) {
		return e.slot, i.cgroups.missing(m)
	}
	if e == nil {
		i.last++
		e = &entry{nth: i.last}
		i.told[teller{by, m.ID}] = e
	} else {
		i.index.remove(e)
		i.cgroups.remove(e)
	}
	if e.Tenant != m.Tenant || e.slot == Nobody {
		i.leave(e)
		var err error
		if m.Tenant != (Tenant{}) {
			e.slot, err = i.Take(m.Tenant)
		}
		errs = append(errs, err)
	}
	e.Member = m
	e.Cgroups, e.Devices = slices.Clone(m.Cgroups), slices.Clone(m.Devices)
	if home := m.Tenant.NetNS; home != 0 && !slices.Contains(e.homes, home) {
		e.homes = append(e.homes, home)
	}
	i.index.add(e)
	i.cgroups.add(e)
	errs = append(errs, i.sync(), i.cgroups.missing(m))
	return e.slot, errors.Join(errs...)
}

// Forget removes a registration. It succeeds if there is none.
func (i *Identity) Forget(by string, id container.ID) error {
	i.mu.Lock()
	defer i.mu.Unlock()
	e := i.told[teller{by, id}]
	if e == nil {
		return nil
	}
	i.leave(e)
	i.index.remove(e)
	i.cgroups.remove(e)
	delete(i.told, teller{by, id})
	return i.sync()
}

// leave releases the slot of an entry.
func (i *Identity) leave(e *entry) {
	if e.slot != Nobody {
		i.Release(e.Tenant)
		e.slot = Nobody
	}
}

// Changed invalidates what programs cache of an owner, because a feature changed its own
// attributes. A change of the maps does so by itself.
func (i *Identity) Changed() error {
	i.mu.Lock()
	defer i.mu.Unlock()
	return i.changed()
}

func (i *Identity) changed() error {
	i.change++
	return i.epoch.Set(i.change)
}

// Home reports whether a network namespace is, or was, that of a member: nothing in it is
// the host's. A nil Identity reports true.
func (i *Identity) Home(netns uint64) bool {
	if i == nil {
		return true
	}
	i.mu.Lock()
	defer i.mu.Unlock()
	return i.index.homes[netns] > 0
}

// sync writes the registrations to the maps.
func (i *Identity) sync() error {
	changed, err := i.index.devices.bring(i.maps.FlDevices, i.index.device, "devices")
	more, cerr := i.cgroups.sync()
	if changed || more {
		err = errors.Join(err, i.changed())
	}
	return errors.Join(err, cerr)
}
