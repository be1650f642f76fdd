// Package identity says whose a packet, a device, a socket or a task is: one slot for
// each network tenant of the host, and the maps by which BPF programs find it
// (bpf/identity.h). Features tell it who there is, each with what is its own to say,
// and read the rest in one look-up.
//
// It attaches nothing (package ends does) and reads no packet. What a container, an
// image or an address says of itself decides nothing here: who is told comes from
// package container, which has it of the kernel. The agent makes one Identity.
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

// Member is what one feature tells of a container: by what its packets and its tasks
// are known, and what the feature says of them. Zero fields say nothing, so that
// several features can each say a part.
type Member struct {
	ID      container.ID
	Tenant  Tenant
	Cgroups []uint64 // cgroup v2 ids whose tasks are this container's, itself first
	Devices []Device
	// HostNetwork says that it shares the host's network namespace, so that
	// only sockets tell its packets.
	HostNetwork bool
	// Rank decides between members that name the same device: the highest has it, and
	// among equals the first.
	Rank int

	Account uint16 // of netcpu's accounts
	Class   Slot   // the class of traffic for what sockets in the cgroups send
	Counted bool   // netcpu's early drop counts the polls of the devices
}

// Device is one network device of a member. If several members name the same one, as
// containers of a pod do, it is one's only; see Member.Rank.
type Device struct {
	Netns   uint64 // inode of the network namespace that it is in
	Ifindex int
	// HostEnd says that it is the host's end of the container's veth: what
	// arrives there was sent by the container. A device that is not makes the
	// whole of its namespace, loopback included, the container's.
	HostEnd bool
	// Trusted says of a host's end that no container can have made the namespace
	// that it is in. In any other, and in one that is a member's Home, it tells of what
	// passes through itself, and what else is there is not the host's.
	Trusted bool
}

// cgroupsMost bounds how many cgroups a container can have its tasks in and
// still be known by all of them.
const cgroupsMost = 256

// Of gives what is known of a container: its tenant, its devices with their host
// ends, and its cgroups. The error is of the cgroups, of which those that were read
// are there.
func Of(c container.Container) (Member, error) {
	m := Member{ID: c.ID, Tenant: TenantOf(c), HostNetwork: c.HostNetwork}
	for _, dev := range c.Interfaces {
		m.Devices = append(m.Devices, Device{Netns: c.NetNS, Ifindex: dev.Index})
		if dev.Host.NetNS != 0 {
			m.Devices = append(m.Devices, Device{Netns: dev.Host.NetNS, Ifindex: dev.Host.Index, HostEnd: true, Trusted: dev.Host.Trusted})
		}
	}
	ids, err := cgroup.IDs(c.Cgroup.V2, cgroupsMost)
	if errors.Is(err, cgroup.ErrMany) || errors.Is(err, fs.ErrNotExist) {
		err = nil // the rest counts for the host's own; or the container is about to be let go of
	}
	m.Cgroups = ids
	return m, err
}

// Identity is the maps, and who is in them. Make it with Open. Its methods may be
// called from several goroutines.
type Identity struct {
	*Allocator
	object *bpf.Object
	maps   identityMaps
	epoch  *ebpf.Variable

	mu     sync.Mutex
	told   map[teller]*entry
	last   int // nth of the last entry
	index  index
	change uint32 // what epoch is
}

// teller names what one feature has told of one container.
type teller struct {
	by string
	id container.ID
}

// entry is what a teller has told.
type entry struct {
	Member
	nth   int // in the order in which they were first told
	slot  Slot
	homes []uint64 // network namespaces that it is in, or has left
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
	i.index = newIndex(self, int(i.maps.FlCgroups.MaxEntries()))
	if err := i.sync(); err != nil {
		return nil, err
	}
	return i, nil
}

// Maps are what an object that includes bpf/identity.h is opened with. They belong to
// the Identity.
func (i *Identity) Maps() bpf.Maps { return i.object.Maps() }

// Usage says how full the maps are.
func (i *Identity) Usage() []bpf.Usage {
	if i == nil {
		return nil
	}
	return i.object.Usage()
}

// Close closes the maps. Programs that are attached go on with them.
func (i *Identity) Close() error {
	if i == nil {
		return nil
	}
	return i.object.Close()
}

// Tell says for a feature who a container is. What the feature said of it before is
// replaced. Until Forget the container's tenant has a slot, which is returned; Nobody
// for one whose network is not known. The error is of a part that had no room, or no
// slot (ErrFull), and the rest is in force. Saying the same again costs nothing.
func (i *Identity) Tell(by string, m Member) (Slot, error) {
	i.mu.Lock()
	defer i.mu.Unlock()
	var errs []error
	e := i.told[teller{by, m.ID}]
	if e != nil && i.index.settled() && reflect.DeepEqual(e.Member, m) && (e.slot != Nobody || m.Tenant == Tenant{}) {
		return e.slot, i.missing(m)
	}
	if e == nil {
		i.last++
		e = &entry{nth: i.last}
		i.told[teller{by, m.ID}] = e
	} else {
		i.index.remove(e)
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
	errs = append(errs, i.sync(), i.missing(m))
	return e.slot, errors.Join(errs...)
}

// Forget ends what a feature has said of a container. One of which it has said nothing
// is a success.
func (i *Identity) Forget(by string, id container.ID) error {
	i.mu.Lock()
	defer i.mu.Unlock()
	e := i.told[teller{by, id}]
	if e == nil {
		return nil
	}
	i.leave(e)
	i.index.remove(e)
	delete(i.told, teller{by, id})
	return i.sync()
}

// leave gives back the slot that an entry holds.
func (i *Identity) leave(e *entry) {
	if e.slot != Nobody {
		i.Release(e.Tenant)
		e.slot = Nobody
	}
}

// AccountAt gives the account that a device is known by, 0 for none; index 0 is the
// rest of its namespace.
func (i *Identity) AccountAt(netns uint64, index int) uint16 {
	i.mu.Lock()
	defer i.mu.Unlock()
	return i.index.devices.held[identityFlDevice{Netns: uint32(netns), Ifindex: uint32(index)}].Account
}

// Home says whether somebody who was told lives in a network namespace, or has lived
// there: nothing in it is the host's. Without an Identity all are.
func (i *Identity) Home(netns uint64) bool {
	if i == nil {
		return true
	}
	i.mu.Lock()
	defer i.mu.Unlock()
	return i.index.homes[netns] > 0
}

// sync brings the maps to what was told.
func (i *Identity) sync() error {
	changed, err := i.index.devices.bring(i.maps.FlDevices, i.index.device, "device")
	more, cerr := i.index.cgroups.bring(i.maps.FlCgroups, i.index.cgroup(), "cgroup")
	if changed || more {
		i.change++
		err = errors.Join(err, i.epoch.Set(i.change))
	}
	return errors.Join(err, cerr)
}

// missing says that not all cgroups of a member are known: some had no room.
func (i *Identity) missing(m Member) error {
	n := 0
	for _, id := range m.Cgroups {
		if _, ok := i.index.cgroups.held[id]; !ok {
			n++
		}
	}
	if n == 0 {
		return nil
	}
	return fmt.Errorf("note cgroups: no room for %d of %d", n, len(m.Cgroups))
}
