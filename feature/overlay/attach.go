package overlay

import (
	"errors"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/feature/overlay/network"
	"github.com/fairlead-project/fairlead/hook"
	"github.com/fairlead-project/fairlead/kernel/journal"
)

// The names of the programs at their hooks. Package network looks for send and arrive.
const (
	atSend   = "overlay_send"
	atArrive = "overlay_arrive"
	atTunnel = "overlay_tunnel"
	atPair   = "overlay_pair"
	atUplink = "overlay_uplink"
	atNIC    = "overlay_nic"
)

// put attaches the copy of a program for a network; number 0: for all.
func (f *Overlay) put(set *hook.Set, d container.Device, path, at, program string, egress bool, number uint32) error {
	stage := hook.Redirect
	if egress {
		stage = hook.Observe
	}
	return set.Put(f.cfg.Ends, hook.Place{Device: d, Path: path, Egress: egress, Stage: stage, Name: at, Owner: journal.Owner{Feature: name}}, f.cache.program(program, number))
}

// attach attaches the programs of a network where they should be.
func (f *Overlay) attach(o *force, list map[container.Device]overlayEnd) error {
	pair := map[container.Device]string{
		{NetNS: o.NetNS, Index: int(o.value.Inside)}:         o.Path,
		{NetNS: f.host.Inode(), Index: int(o.value.Outside)}: f.cfg.NetNS,
	}
	err := o.at.Drop(func(d container.Device, _ bool, at string) bool {
		_, fast := list[d]
		return (at == atSend || at == atArrive) && !fast || at == atTunnel && d.Index != o.Index || at == atPair && pair[d] == ""
	})
	errs := []error{err, f.put(&o.at, container.Device{NetNS: o.NetNS, Index: o.Index}, o.Path, atTunnel, overlayProgFlOvTunnel, true, o.number)}
	for d, path := range pair {
		if d.Index != 0 {
			errs = append(errs, f.put(&o.at, d, path, atPair, overlayProgFlOvPair, false, 0))
		}
	}
	for d := range list {
		for _, err := range []error{
			f.put(&o.at, d, o.Path, atArrive, overlayProgFlOvArrive, true, o.number),
			f.put(&o.at, d, o.Path, atSend, overlayProgFlOvSend, false, o.number),
		} {
			if !errors.Is(err, journal.ErrGone) { // its container is ending
				errs = append(errs, err)
			}
		}
	}
	return errors.Join(errs...)
}

// uplinks attaches the programs at exactly the uplinks of the wanted networks.
func (f *Overlay) uplinks(wanted map[key]network.Network) error {
	list := make(map[uint32]overlayUplink)
	for _, n := range wanted {
		for _, u := range n.Uplinks {
			list[uint32(u.Index)] = overlayUplink{Mtu: uint32(u.MTU), Group: u.Group}
		}
	}
	errs := []error{f.at.Drop(func(d container.Device, _ bool, _ string) bool { return list[uint32(d.Index)].Mtu == 0 })}
	for index := range f.by {
		if list[index].Mtu == 0 {
			errs = append(errs, absent(f.cache.maps.FlOvUplinks.Delete(index)))
		}
	}
	for index, u := range list {
		if f.by[index] != u {
			errs = append(errs, f.cache.maps.FlOvUplinks.Put(index, u))
			for _, o := range f.force { // learnt entries contain the old value
				f.raise(o, "link")
			}
		}
		d := container.Device{NetNS: f.host.Inode(), Index: int(index)}
		errs = append(errs, f.put(&f.at, d, f.cfg.NetNS, atUplink, overlayProgFlOvUplink, true, 0), f.put(&f.at, d, f.cfg.NetNS, atNIC, overlayProgFlOvReceive, false, 0))
	}
	f.by = list
	return errors.Join(errs...)
}
