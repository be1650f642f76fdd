package latency

import (
	"slices"

	"github.com/fairlead-project/fairlead/kernel/netdev"
)

// ends is where packets of the tenants are looked at, as maps.bpf.h has it.
type ends struct {
	near    [4096]uint16 // NEAR
	uplinks [64]uint32   // UPLINKS
	tenants [1 << 16]uint8
	unseen  uint32             // tenants that no device is seen to receive for
	sockets map[string]sockets // by directory of the cgroup
	queued  bool               // an uplink is a veth, which may not poll
}

// ends finds them. Whose a device is package identity says.
func (f *Latency) ends() (*ends, error) {
	e := &ends{sockets: make(map[string]sockets)}
	links, err := f.host.Links(netdev.MostLinks)
	if err != nil {
		return nil, err
	}
	for _, t := range f.tenants {
		flags := uint8(tenantMeasured)
		if t.traced {
			flags |= tenantTraced
		}
		for _, c := range t.members {
			way := uint8(byDevice)
			for _, dev := range c.Interfaces {
				e.watch(dev.Index, begin(hookQueue)|begin(hookReceive)|pass(hookReceive)|pass(hookXmit))
				e.watch(dev.Host.Index, begin(hookQueue)|pass(hookReceive)|pass(hookQueue)|pass(hookXmit))
				if dev.Kind == "macvlan" || dev.Kind == "ipvlan" {
					way = byMacvlan
				}
			}
			if c.HostNetwork {
				way, flags = byUplink, flags|tenantHost
			}
			if way != byDevice {
				e.unseen++
			}
			if c.Cgroup.V2 != "" {
				e.sockets[c.Cgroup.V2] = sockets{t.slot, way}
			}
		}
		e.tenants[t.slot] = flags
	}
	bits := begin(hookPoll) | begin(hookReceive) | pass(hookReceive) | pass(hookQueue) | pass(hookXmit) | nearUplink
	if e.unseen > 0 {
		bits |= begin(hookQueue)
	}
	found := 0
	for _, l := range links {
		if f.isUplink(l, links) && found < len(e.uplinks) {
			e.watch(l.Index, bits)
			e.uplinks[found] = uint32(l.Index)
			e.queued = e.queued || l.Kind == "veth"
			found++
		}
	}
	return e, nil
}

func (e *ends) watch(index int, bits uint16) {
	if index > 0 {
		e.near[index%len(e.near)] |= bits
	}
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
