package latency

import (
	"slices"

	"github.com/fairlead-project/fairlead/kernel/netdev"
)

// ends lists where the programs look at packets, in the form of maps.bpf.h.
type ends struct {
	near    [4096]uint16 // NEAR
	uplinks uplinks
	tenants [1 << 16]uint8
	unseen  uint32             // tenants without a device at which the programs see packets arrive
	sockets map[string]sockets // by cgroup directory
}

// ends finds the devices, uplinks and sockets of the measured tenants. Package identity maps them
// to tenants.
func (f *Latency) ends() (*ends, error) {
	e := &ends{sockets: make(map[string]sockets)}
	var err error
	if e.uplinks, err = f.findUplinks(); err != nil {
		return nil, err
	}
	f.uplinks = e.uplinks
	for _, t := range f.tenants.Tenants() {
		m := f.measured[t.Key()]
		if m == nil {
			continue // about to be measured
		}
		flags := uint8(tenantMeasured)
		if m.traced {
			flags |= tenantTraced
		}
		for _, member := range t.Members() {
			c, way := member.Container, uint8(byDevice)
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
				e.sockets[c.Cgroup.V2] = sockets{m.slot, way}
			}
		}
		e.tenants[m.slot] = flags
	}
	bits := begin(hookPoll) | begin(hookReceive) | pass(hookReceive) | pass(hookQueue) | pass(hookXmit) | nearUplink
	if e.unseen > 0 {
		bits |= begin(hookQueue)
	}
	for _, index := range e.uplinks.at {
		e.watch(int(index), bits)
	}
	return e, nil
}

// uplinks are the devices by which packets leave the host: those in Config, or all.
type uplinks struct {
	at     [64]uint32 // UPLINKS
	queued bool       // one is a veth, so its driver may not poll
}

func (f *Latency) findUplinks() (list uplinks, err error) {
	links, err := f.cfg.Roots.Monitor.Links(f.host, netdev.MostLinks)
	found := 0
	for _, l := range links {
		named := slices.Contains(f.cfg.Uplinks, l.Name)
		if (named || len(f.cfg.Uplinks) == 0 && l.Leaves(links)) && found < len(list.at) {
			list.at[found] = uint32(l.Index)
			list.queued = list.queued || l.Kind == "veth"
			found++
		}
	}
	return list, err
}

func (e *ends) watch(index int, bits uint16) {
	if index > 0 {
		e.near[index%len(e.near)] |= bits
	}
}
