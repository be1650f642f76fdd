package identity

import (
	"errors"
	"fmt"
	"math"

	"github.com/cilium/ebpf"
)

// Flags of struct fl_owner; bpf/identity.h.
const (
	flagHostEnd  = 1
	flagHostSide = 2
	flagCounted  = 4
)

// wanted is what the maps are to hold for what was told, in the order in which the
// first who says a thing of a device or a cgroup is right. self is the inode of the
// host's network namespace: it is never all one member's. Of cgroups there are room at
// most, which members get in turns: who has made many cannot take the others' place.
func wanted(told []*entry, self uint64, room int) (map[identityFlDevice]identityFlOwner, map[uint64]identityFlOwner) {
	devices, cgroups := make(map[identityFlDevice]identityFlOwner), make(map[uint64]identityFlOwner)
	at := func(netns uint64, index int) identityFlDevice {
		return identityFlDevice{Netns: uint32(netns), Ifindex: uint32(index)}
	}
	homes := make(map[uint64]bool)
	for _, e := range told {
		for _, netns := range e.homes {
			homes[netns] = true
		}
	}
	// The host's side first: a namespace with a host end in it is nobody's own.
	for _, e := range told {
		for _, d := range e.Devices {
			if !d.HostEnd || !inside(d) {
				continue
			}
			flags := uint16(flagHostEnd)
			if d.Trusted && !homes[d.Netns] {
				flags |= flagHostSide
				devices[at(d.Netns, 0)] = identityFlOwner{Flags: flagHostSide}
			}
			e.add(devices, at(d.Netns, d.Ifindex), flags)
		}
	}
	if self != 0 {
		devices[at(self, 0)] = identityFlOwner{Flags: flagHostSide}
	}
	for _, e := range told {
		for _, d := range e.Devices {
			if d.HostEnd || !inside(d) {
				continue
			}
			for _, index := range []int{d.Ifindex, 0} {
				if key := at(d.Netns, index); devices[key].Flags&(flagHostEnd|flagHostSide) == 0 {
					e.add(devices, key, 0)
				}
			}
		}
	}
	for turn, more := 0, true; more; turn++ {
		more = false
		for _, e := range told {
			if turn >= len(e.Cgroups) {
				continue
			}
			more = true
			id := e.Cgroups[turn]
			if _, ok := cgroups[id]; ok || len(cgroups) < room {
				cgroups[id] = e.owner(cgroups[id])
			}
		}
	}
	return devices, cgroups
}

// add says of a device what the entry has to say.
func (e *entry) add(devices map[identityFlDevice]identityFlOwner, key identityFlDevice, flags uint16) {
	o := e.owner(devices[key])
	o.Class = uint16(Nobody) // it is of sockets
	o.Flags |= flags
	if e.Counted && key.Ifindex != 0 {
		o.Flags |= flagCounted
	}
	devices[key] = o
}

// owner fills in what nobody has said before.
func (e *entry) owner(o identityFlOwner) identityFlOwner {
	if o.Tenant == uint16(Nobody) {
		o.Tenant = uint16(e.slot)
	}
	if o.Account == 0 {
		o.Account = e.Account
	}
	if o.Class == uint16(Nobody) {
		o.Class = uint16(e.Class)
	}
	return o
}

// inside says whether a device is one that there can be.
func inside(d Device) bool {
	return d.Netns > 0 && d.Netns <= math.MaxUint32 && d.Ifindex > 0 && d.Ifindex <= math.MaxInt32
}

// apply makes a map hold what is wanted; have is what it holds, and is kept
// true when something fails. However much fails, the error is one sentence, and
// the same one when the same fails again.
func apply[K comparable](to *ebpf.Map, have, want map[K]identityFlOwner, what string) (changed bool, err error) {
	var forget, note failures
	for k := range have {
		if _, ok := want[k]; ok {
			continue
		}
		changed = true
		if err := to.Delete(k); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
			forget.add(err)
			continue
		}
		delete(have, k)
	}
	for k, v := range want {
		if old, ok := have[k]; ok && old == v {
			continue
		}
		changed = true
		if err := to.Put(k, v); err != nil {
			note.add(err)
			continue
		}
		have[k] = v
	}
	return changed, errors.Join(forget.err("forget", what), note.err("note", what))
}

// failures counts what failed, and keeps why the first did.
type failures struct {
	n     int
	first error
}

func (f *failures) add(err error) {
	if f.n++; f.n == 1 {
		f.first = err
	}
}

func (f *failures) err(operation, what string) error {
	if f.n == 0 {
		return nil
	}
	return fmt.Errorf("%s %d %ss: %w", operation, f.n, what, f.first)
}
