package latency

import (
	"math"
	"slices"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/kernel/netdev"
)

// devices says what each device is to fl_devices: of the tenants, at both ends of
// their veths, and the uplinks. What is in a namespace of a tenant's own comes
// before what a tenant says to be its veth's host end, and an uplink is nobody's.
// queued says that an uplink is a veth, which may not poll.
func (f *Latency) devices() (all map[latencyDevice]uint32, queued bool, err error) {
	all = make(map[latencyDevice]uint32)
	note := func(netns uint64, index int, value uint32) {
		if netns == 0 || netns > math.MaxUint32 || index <= 0 || index > math.MaxInt32 {
			return // there is no such device
		}
		d := latencyDevice{Netns: uint32(netns), Ifindex: uint32(index)}
		if _, taken := all[d]; !taken {
			all[d] = value
		}
	}
	links, err := f.host.Links(netdev.MostLinks)
	if err != nil {
		return nil, false, err
	}
	for _, l := range links {
		if f.isUplink(l, links) {
			note(f.host.Inode(), l.Index, roleUplink)
			queued = queued || l.Kind == "veth"
		}
	}
	each := func(visit func(t *tenant, value uint32)) {
		for _, t := range f.tenants {
			value := uint32(t.slot)
			if t.traced {
				value |= flagTraced
			}
			visit(t, value)
		}
	}
	each(func(t *tenant, value uint32) {
		for _, c := range t.members {
			for _, dev := range c.Interfaces {
				note(c.NetNS, dev.Index, value|roleContainer)
			}
		}
	})
	each(func(t *tenant, value uint32) {
		for _, c := range t.members {
			for _, dev := range c.Interfaces {
				note(dev.Host.NetNS, dev.Host.Index, value|roleHostEnd)
			}
		}
	})
	return all, queued, nil
}

// isUplink says whether packets leave the host by a device, and are not sent on by
// a device above it that is one.
func (f *Latency) isUplink(l netdev.Link, all []netdev.Link) bool {
	if len(f.cfg.Uplinks) > 0 {
		return slices.Contains(f.cfg.Uplinks, l.Name)
	}
	if !l.Up || l.Name == "lo" || l.Kind != "device" && l.Kind != "bond" {
		return false
	}
	i := slices.IndexFunc(all, func(m netdev.Link) bool { return m.Index == l.Master })
	return i < 0 || all[i].Kind != "bond" && all[i].Kind != "team"
}

// cgroups gives by id the cgroups of tenants that no device is seen to receive for, as
// in the host's namespace and with macvlan, and by directory those of all: at these
// their sockets are.
func (f *Latency) cgroups() (unseen map[uint64]uint32, dirs map[string]sockets) {
	unseen, dirs = make(map[uint64]uint32), make(map[string]sockets)
	for _, t := range f.tenants {
		for _, c := range t.members {
			if c.Cgroup.V2 == "" {
				continue
			}
			way, value := uint8(byDevice), uint32(t.slot)
			switch {
			case c.HostNetwork:
				way = byUplink
			case slices.ContainsFunc(c.Interfaces, func(i container.Interface) bool { return i.Kind == "macvlan" || i.Kind == "ipvlan" }):
				way, value = byMacvlan, value|flagUnseen
			}
			if t.traced {
				value |= flagTraced
			}
			if way != byDevice {
				unseen[uint64(c.ID)] = value
			}
			dirs[c.Cgroup.V2] = sockets{t.slot, way}
		}
	}
	return unseen, dirs
}
