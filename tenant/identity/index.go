package identity

import (
	"cmp"
	"errors"
	"fmt"
	"math"
	"slices"

	"github.com/cilium/ebpf"
)

// Flags of struct fl_owner; bpf/identity.h.
const (
	flagHostEnd  = 1
	flagHostSide = 2
)

// index holds the entries of each device. The owner of a device depends on its own entries
// alone, so the cost of a change does not grow with the number of containers.
type index struct {
	self    uint64         // inode of the host's network namespace, which no member owns
	homes   map[uint64]int // number of entries, present and past, by network namespace
	devices stated[identityFlDevice, identityFlOwner]
}

// stated holds the entries of each device, or of each cgroup, and what the BPF map says.
type stated[K, V comparable] struct {
	by    map[K][]*entry // in precedence order
	held  map[K]V        // content of the BPF map
	stale map[K]bool     // keys that held may be out of date for
}

func newStated[K, V comparable]() stated[K, V] {
	return stated[K, V]{by: make(map[K][]*entry), held: make(map[K]V), stale: make(map[K]bool)}
}

func (s *stated[K, V]) add(k K, e *entry) {
	s.stale[k] = true
	if at, there := slices.BinarySearchFunc(s.by[k], e, precedence); !there {
		s.by[k] = slices.Insert(s.by[k], at, e)
	}
}

func (s *stated[K, V]) remove(k K, e *entry) {
	s.stale[k] = true
	if s.by[k] = slices.DeleteFunc(s.by[k], func(o *entry) bool { return o == e }); len(s.by[k]) == 0 {
		delete(s.by, k)
	}
}

// precedence orders entries: the first one wins.
func precedence(a, b *entry) int {
	return cmp.Or(cmp.Compare(b.Rank, a.Rank), cmp.Compare(a.nth, b.nth))
}

// settled reports whether the BPF map is up to date, as far as there is room.
func (s *stated[K, V]) settled() bool { return len(s.stale) == 0 }

func newIndex(self uint64) index {
	x := index{self: self, homes: make(map[uint64]int), devices: newStated[identityFlDevice, identityFlOwner]()}
	x.devices.stale[at(self, 0)] = true
	return x
}

// add adds an entry, which must not change until remove.
func (x *index) add(e *entry) {
	for _, key := range e.keys() {
		x.devices.add(key, e)
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
	for _, netns := range e.homes {
		if x.homes[netns]--; x.homes[netns] == 0 {
			delete(x.homes, netns)
			x.doubt(netns)
		}
	}
}

// doubt marks the devices of a namespace stale that has become a home, or is none any more.
func (x *index) doubt(netns uint64) {
	for _, e := range x.devices.by[at(netns, 0)] {
		for _, key := range e.keys() {
			if uint64(key.Netns) == netns {
				x.devices.stale[key] = true
			}
		}
	}
}

// keys returns the devices that an entry describes; index 0 is the rest of a namespace.
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

// inside reports whether the numbers of a device are in range.
func inside(d Device) bool {
	return d.Netns > 0 && d.Netns <= math.MaxUint32 && d.Ifindex > 0 && d.Ifindex <= math.MaxInt32
}

// device returns the owner of a device, or of the rest of its namespace. A device is a
// host end if any entry says so, and no member owns a namespace with a host end.
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
			o, known = e.device(o, flagHostEnd|side), true
		case side != 0:
			return identityFlOwner{Flags: flagHostSide}, true
		}
	}
	if known {
		return o, true
	}
	for e, d := range x.named(key) {
		if !d.HostEnd {
			o, known = e.device(o, 0), true
		}
	}
	return o, known
}

// named yields the entries that list a device, or any of its namespace for index 0.
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

// device adds the entry's part to the owner of a device. The tenant of the first entry
// stays.
func (e *entry) device(o identityFlOwner, flags uint16) identityFlOwner {
	if o.Tenant == uint16(Nobody) {
		o.Tenant = uint16(e.slot)
	}
	o.Flags |= flags
	return o
}

// bring writes the value that want returns for each stale key to a BPF map, and deletes
// the key for false. Keys that fail stay stale. The error is one sentence however many
// keys fail, and the same when the same keys fail again.
func (s *stated[K, V]) bring(to *ebpf.Map, want func(K) (V, bool), what string) (changed bool, err error) {
	var forget, note failures
	for k := range s.stale { // first, to make room
		if _, wanted := want(k); wanted {
			continue
		}
		if _, held := s.held[k]; held {
			changed = true
			if err := to.Delete(k); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
				forget.add(err)
				continue
			}
			delete(s.held, k)
		}
		delete(s.stale, k)
	}
	for k := range s.stale {
		v, wanted := want(k)
		if !wanted {
			continue
		}
		if old, held := s.held[k]; !held || old != v {
			changed = true
			if err := to.Put(k, v); err != nil {
				note.add(err)
				continue
			}
			s.held[k] = v
		}
		delete(s.stale, k)
	}
	return changed, errors.Join(forget.err("forget", what), note.err("note", what))
}

// failures counts failures, and keeps the first error.
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
	return fmt.Errorf("%s %d %s: %w", operation, f.n, what, f.first)
}
