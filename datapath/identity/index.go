package identity

import (
	"cmp"
	"maps"
	"math"
	"slices"
)

// Flags of struct fl_owner; bpf/identity.h.
const (
	flagHostEnd  = 1
	flagHostSide = 2
	flagCounted  = 4
)

// index is what was told, by what it is about. What a device or a cgroup is known by
// follows from the entries that name it alone, so that a change costs the same however
// many containers there are.
type index struct {
	self    uint64 // inode of the host's network namespace, which is never all one member's
	room    int    // for cgroups
	crowded bool   // there was not enough of it

	homes   map[uint64]int // network namespaces, and how many entries have lived there
	devices stated[identityFlDevice]
	cgroups stated[uint64]
}

// stated is who says something of each device, or of each cgroup.
type stated[K comparable] struct {
	by    map[K][]*entry        // those who are right first
	held  map[K]identityFlOwner // what the BPF map holds
	stale map[K]bool            // of which that may be out of date
}

func newStated[K comparable]() stated[K] {
	return stated[K]{by: make(map[K][]*entry), held: make(map[K]identityFlOwner), stale: make(map[K]bool)}
}

func (s *stated[K]) add(k K, e *entry) {
	s.stale[k] = true
	if at, there := slices.BinarySearchFunc(s.by[k], e, precedence); !there {
		s.by[k] = slices.Insert(s.by[k], at, e)
	}
}

func (s *stated[K]) remove(k K, e *entry) {
	s.stale[k] = true
	if s.by[k] = slices.DeleteFunc(s.by[k], func(o *entry) bool { return o == e }); len(s.by[k]) == 0 {
		delete(s.by, k)
	}
}

// precedence orders entries: the first who says a thing is right.
func precedence(a, b *entry) int {
	return cmp.Or(cmp.Compare(b.Rank, a.Rank), cmp.Compare(a.nth, b.nth))
}

func newIndex(self uint64, room int) index {
	x := index{self: self, room: room, homes: make(map[uint64]int), devices: newStated[identityFlDevice](), cgroups: newStated[uint64]()}
	x.devices.stale[at(self, 0)] = true
	return x
}

// settled says whether the BPF maps hold what was told, as far as there is room.
func (x *index) settled() bool { return len(x.devices.stale) == 0 && len(x.cgroups.stale) == 0 }

// add takes an entry up, which must not change until it is removed.
func (x *index) add(e *entry) {
	for _, key := range e.keys() {
		x.devices.add(key, e)
	}
	for _, id := range e.Cgroups {
		x.cgroups.add(id, e)
	}
	for _, netns := range e.homes {
		if x.homes[netns]++; x.homes[netns] == 1 {
			x.doubt(netns)
		}
	}
}

// remove undoes add.
func (x *index) remove(e *entry) {
	for _, key := range e.keys() {
		x.devices.remove(key, e)
	}
	for _, id := range e.Cgroups {
		x.cgroups.remove(id, e)
	}
	for _, netns := range e.homes {
		if x.homes[netns]--; x.homes[netns] == 0 {
			delete(x.homes, netns)
			x.doubt(netns)
		}
	}
}

// doubt has the devices of a namespace looked at again in which somebody lives now, or
// nobody any more.
func (x *index) doubt(netns uint64) {
	for _, e := range x.devices.by[at(netns, 0)] {
		for _, key := range e.keys() {
			if uint64(key.Netns) == netns {
				x.devices.stale[key] = true
			}
		}
	}
}

// keys gives the devices of which an entry says something: index 0 is the rest of a
// namespace.
func (e *entry) keys() (keys []identityFlDevice) {
	for _, d := range e.Devices {
		if !inside(d) {
			continue
		}
		keys = append(keys, at(d.Netns, d.Ifindex))
		if !d.HostEnd || d.Trusted {
			keys = append(keys, at(d.Netns, 0))
		}
	}
	return keys
}

func at(netns uint64, index int) identityFlDevice {
	return identityFlDevice{Netns: uint32(netns), Ifindex: uint32(index)}
}

// inside says whether a device is one that there can be.
func inside(d Device) bool {
	return d.Netns > 0 && d.Netns <= math.MaxUint32 && d.Ifindex > 0 && d.Ifindex <= math.MaxInt32
}

// device gives what is to be known of a device, or of the rest of its namespace. It is
// a host end if anybody says so, and a namespace with one in it is nobody's own.
func (x *index) device(key identityFlDevice) (o identityFlOwner, known bool) {
	if x.self != 0 && key == at(x.self, 0) {
		return identityFlOwner{Flags: flagHostSide}, true
	}
	for e, d := range x.named(key) {
		side := uint16(0)
		if d.Trusted && x.homes[d.Netns] == 0 {
			side = flagHostSide
		}
		switch {
		case !d.HostEnd:
		case key.Ifindex != 0:
			o, known = e.device(o, key, flagHostEnd|side), true
		case side != 0:
			return identityFlOwner{Flags: flagHostSide}, true
		}
	}
	if known {
		return o, true
	}
	for e, d := range x.named(key) {
		if !d.HostEnd {
			o, known = e.device(o, key, 0), true
		}
	}
	return o, known
}

// named gives who says what of a device, or of those of the namespace for index 0.
func (x *index) named(key identityFlDevice) func(yield func(*entry, Device) bool) {
	return func(yield func(*entry, Device) bool) {
		for _, e := range x.devices.by[key] {
			for _, d := range e.Devices {
				if inside(d) && uint32(d.Netns) == key.Netns && (key.Ifindex == 0 || uint32(d.Ifindex) == key.Ifindex) && !yield(e, d) {
					return
				}
			}
		}
	}
}

// cgroup gives what says what is to be known of a cgroup. Of cgroups there are room at
// most, which entries get in turns: who has made many cannot take the others' place.
func (x *index) cgroup() func(id uint64) (identityFlOwner, bool) {
	crowded := len(x.cgroups.by) > x.room
	if crowded || x.crowded { // then any of them may have to go, or come
		for id := range x.cgroups.by {
			x.cgroups.stale[id] = true
		}
	}
	x.crowded = crowded
	var let map[uint64]bool
	if crowded {
		let = x.turns()
	}
	return func(id uint64) (o identityFlOwner, known bool) {
		if crowded && !let[id] {
			return o, false
		}
		// One below another's is its own: that comes earlier in its list.
		deep := func(a, b *entry) int { return cmp.Compare(slices.Index(a.Cgroups, id), slices.Index(b.Cgroups, id)) }
		for _, e := range slices.SortedStableFunc(slices.Values(x.cgroups.by[id]), deep) {
			o, known = e.owner(o), true
		}
		return o, known
	}
}

// turns chooses the cgroups for which there is room.
func (x *index) turns() map[uint64]bool {
	those := make(map[*entry]bool)
	for _, by := range x.cgroups.by {
		for _, e := range by {
			those[e] = true
		}
	}
	list := slices.SortedFunc(maps.Keys(those), precedence)
	let := make(map[uint64]bool, x.room)
	for turn, more := 0, true; more; turn++ {
		more = false
		for _, e := range list {
			if turn < len(e.Cgroups) {
				more = true
				if len(let) < x.room {
					let[e.Cgroups[turn]] = true
				}
			}
		}
	}
	return let
}

// device adds to what is known of a device what the entry has to say.
func (e *entry) device(o identityFlOwner, key identityFlDevice, flags uint16) identityFlOwner {
	o = e.owner(o)
	o.Class = uint16(Nobody) // it is of sockets
	o.Flags |= flags
	if e.Counted && key.Ifindex != 0 {
		o.Flags |= flagCounted
	}
	return o
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
