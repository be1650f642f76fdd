package account

import (
	"cmp"
	"errors"
	"fmt"
	"math"
	"slices"

	"github.com/cilium/ebpf"
)

// What fl_devices says of a device, beside the slot; maps.bpf.h.
const (
	flagHostEnd  = 0x10000
	flagHostSide = 0x20000
	slotMask     = 0xffff
)

// wanted is what the maps are to hold for the given tenants, in the order in
// which the first who names a thing has it. self is the inode of the host's
// network namespace: it is never all one tenant's. Of cgroups there are room at
// most, which tenants get in turns: who has made many cannot take the others' place.
func wanted(tenants []Tenant, slots []uint32, self uint64, room int) (map[accountDevice]uint32, map[uint64]uint32) {
	devices, cgroups := make(map[accountDevice]uint32), make(map[uint64]uint32)
	device := func(netns uint64, index int, value uint32) {
		key := accountDevice{Netns: uint32(netns), Ifindex: uint32(index)}
		if _, ok := devices[key]; !ok {
			devices[key] = value
		}
	}
	// The host's side first: a namespace with a host end in it is nobody's own.
	for i, t := range tenants {
		for _, d := range t.Devices {
			switch {
			case !d.HostEnd || !inside(d):
			case d.Trusted:
				device(d.Netns, d.Ifindex, slots[i]|flagHostEnd|flagHostSide)
				device(d.Netns, 0, flagHostSide)
			default:
				device(d.Netns, d.Ifindex, slots[i]|flagHostEnd)
			}
		}
	}
	if self != 0 {
		device(self, 0, flagHostSide)
	}
	for i, t := range tenants {
		for _, d := range t.Devices {
			if !d.HostEnd && inside(d) {
				device(d.Netns, d.Ifindex, slots[i])
				device(d.Netns, 0, slots[i])
			}
		}
	}
	for turn, more := 0, true; more; turn++ {
		more = false
		for i, t := range tenants {
			if turn >= len(t.Cgroups) {
				continue
			}
			more = true
			if _, ok := cgroups[t.Cgroups[turn]]; !ok && len(cgroups) < room {
				cgroups[t.Cgroups[turn]] = slots[i]
			}
		}
	}
	return devices, cgroups
}

// inside says whether a device is one that there can be.
func inside(d Device) bool {
	return d.Netns > 0 && d.Netns <= math.MaxUint32 && d.Ifindex > 0 && d.Ifindex <= math.MaxInt32
}

// ranked lists the tenants in the order in which they have what they name.
func (m *Meter) ranked() []*tenant {
	var list []*tenant
	for _, t := range m.slots {
		if t != nil && t.state == watched {
			list = append(list, t)
		}
	}
	slices.SortStableFunc(list, func(a, b *tenant) int { return cmp.Compare(b.told.Rank, a.told.Rank) })
	return list
}

// sync brings fl_devices and fl_cgroups to what the tenants were told to be.
func (m *Meter) sync() error {
	var tenants []Tenant
	var slots []uint32
	for _, t := range m.ranked() {
		tenants, slots = append(tenants, t.told), append(slots, t.slot)
	}
	devices, cgroups := wanted(tenants, slots, m.self, int(m.maps.FlCgroups.MaxEntries()))
	err := errors.Join(
		apply(m.maps.FlDevices, m.devices, devices, "device"),
		apply(m.maps.FlCgroups, m.cgroups, cgroups, "cgroup"),
	)
	m.generation++
	return errors.Join(err, m.epoch.Set(m.generation))
}

// bySocket says whether nothing but sockets tells some of a tenant's packets:
// no veth leads to it.
func bySocket(t Tenant) bool {
	for _, d := range t.Devices {
		if d.HostEnd {
			return t.HostNetwork
		}
	}
	return t.HostNetwork || len(t.Devices) > 0
}

// missing says that not all cgroups of a tenant are known: some had no room.
func (m *Meter) missing(t Tenant) error {
	n := 0
	for _, id := range t.Cgroups {
		if _, ok := m.cgroups[id]; !ok {
			n++
		}
	}
	if n == 0 {
		return nil
	}
	return fmt.Errorf("note cgroups: no room for %d of %d", n, len(t.Cgroups))
}

// apply makes a map hold what is wanted; have is what it holds, and is kept
// true when something fails. However much fails, the error is one sentence, and
// the same one when the same fails again.
func apply[K comparable](to *ebpf.Map, have, want map[K]uint32, what string) error {
	var forget, note failures
	for k := range have {
		if _, ok := want[k]; ok {
			continue
		}
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
		if err := to.Put(k, v); err != nil {
			note.add(err)
			continue
		}
		have[k] = v
	}
	return errors.Join(forget.err("forget", what), note.err("note", what))
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
