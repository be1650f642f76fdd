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
// network namespace: it is never all one tenant's.
func wanted(tenants []Tenant, slots []uint32, self uint64) (map[accountDevice]uint32, map[uint64]uint32) {
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
			if d.HostEnd && inside(d) {
				device(d.Netns, d.Ifindex, slots[i]|flagHostEnd|flagHostSide)
				device(d.Netns, 0, flagHostSide)
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
		for _, id := range t.Cgroups {
			if _, ok := cgroups[id]; !ok {
				cgroups[id] = slots[i]
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
	devices, cgroups := wanted(tenants, slots, m.self)
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

// apply makes a map hold what is wanted; have is what it holds, and is kept
// true when something fails.
func apply[K comparable](to *ebpf.Map, have, want map[K]uint32, what string) error {
	var errs []error
	for k := range have {
		if _, ok := want[k]; ok {
			continue
		}
		if err := to.Delete(k); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
			errs = append(errs, fmt.Errorf("forget %s %v: %w", what, k, err))
			continue
		}
		delete(have, k)
	}
	for k, v := range want {
		if old, ok := have[k]; ok && old == v {
			continue
		}
		if err := to.Put(k, v); err != nil {
			errs = append(errs, fmt.Errorf("note %s %v: %w", what, k, err))
			continue
		}
		have[k] = v
	}
	return errors.Join(errs...)
}
