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

// attach attaches the programs of a network where they should be.
func (f *Overlay) attach(o *force, list map[container.Device]overlayEnd) error {
	by := journal.Owner{Feature: name}
	pair := map[container.Device]string{
		{NetNS: o.NetNS, Index: int(o.value.Inside)}:         o.Path,
		{NetNS: f.host.Inode(), Index: int(o.value.Outside)}: f.cfg.NetNS,
	}
	put := func(d container.Device, path, at, program string, egress bool, number uint32) error {
		stage := hook.Redirect
		if egress {
			stage = hook.Observe
		}
		return o.at.Put(f.cfg.Ends, hook.Place{Device: d, Path: path, Egress: egress, Stage: stage, Name: at, Owner: by}, f.cache.program(program, number))
	}
	err := o.at.Drop(func(d container.Device, _ bool, at string) bool {
		_, fast := list[d]
		return (at == atSend || at == atArrive) && !fast || at == atTunnel && d.Index != o.Index || at == atPair && pair[d] == ""
	})
	errs := []error{err, put(container.Device{NetNS: o.NetNS, Index: o.Index}, o.Path, atTunnel, overlayProgFlOvTunnel, true, o.number)}
	for d, path := range pair {
		if d.Index != 0 {
			errs = append(errs, put(d, path, atPair, overlayProgFlOvPair, false, 0))
		}
	}
	for d := range list {
		for _, err := range []error{
			put(d, o.Path, atArrive, overlayProgFlOvArrive, true, o.number),
			put(d, o.Path, atSend, overlayProgFlOvSend, false, o.number),
		} {
			if !errors.Is(err, journal.ErrGone) { // its container ends
				errs = append(errs, err)
			}
		}
	}
	return errors.Join(errs...)
}

// uplinks attaches the programs at exactly the uplinks of the networks.
func (f *Overlay) uplinks(wanted map[key]network.Network) error {
	mtus := make(map[uint32]uint32)
	for _, n := range wanted {
		for _, u := range n.Uplinks {
			mtus[uint32(u.Index)] = uint32(u.MTU)
		}
	}
	errs := []error{f.at.Drop(func(d container.Device, _ bool, _ string) bool { return mtus[uint32(d.Index)] == 0 })}
	for index := range f.mtus {
		if mtus[index] == 0 {
			errs = append(errs, absent(f.cache.maps.FlOvUplinks.Delete(index)))
		}
	}
	for index, mtu := range mtus {
		if f.mtus[index] != mtu {
			errs = append(errs, f.cache.maps.FlOvUplinks.Put(index, mtu))
			for _, o := range f.force { // learnt entries have the old one
				f.raise(o, "link")
			}
		}
		for _, p := range []struct {
			at, program string
			egress      bool
		}{{atUplink, overlayProgFlOvUplink, true}, {atNIC, overlayProgFlOvReceive, false}} {
			stage := hook.Redirect
			if p.egress {
				stage = hook.Observe
			}
			errs = append(errs, f.at.Put(f.cfg.Ends, hook.Place{
				Device: container.Device{NetNS: f.host.Inode(), Index: int(index)}, Path: f.cfg.NetNS, Egress: p.egress,
				Stage: stage, Name: p.at, Owner: journal.Owner{Feature: name},
			}, f.cache.program(p.program, 0)))
		}
	}
	f.mtus = mtus
	return errors.Join(errs...)
}
