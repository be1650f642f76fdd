package rig

import (
	"errors"
	"fmt"
	"time"

	"github.com/cilium/ebpf"

	"github.com/fairlead-project/fairlead/kernel/bpf"
	"github.com/fairlead-project/fairlead/kernel/netdev"
)

// Tap records when packets of one UDP port leave and enter by the NIC, by its own programs.
type Tap struct {
	object *bpf.Object
	links  bpf.Links
	objs   struct {
		Stamps *ebpf.Map      `ebpf:"fl_stamps"`
		Taken  *ebpf.Variable `ebpf:"fl_taken"`
	}
}

// Trip is one request and its reply, as times of the monotonic clock.
type Trip struct{ Asked, Answered time.Duration }

// Tap begins to record requests to a port outside and their replies. One request is under way at a
// time. The caller closes it.
func (r *Rig) Tap(port uint16) (_ *Tap, err error) {
	t := new(Tap)
	defer func() {
		if err != nil {
			err = errors.Join(fmt.Errorf("tap %s: %w", NICDevice, err), t.Close())
		}
	}()
	ns, err := netdev.Open(r.Node.NetNS())
	if err != nil {
		return nil, err
	}
	defer ns.Close()
	index, err := ns.Index(NICDevice)
	if err != nil {
		return nil, err
	}
	vars := bpf.Vars{tapVarFlNetns: uint32(ns.Inode()), tapVarFlIfindex: uint32(index), tapVarFlPort: port}
	if t.object, err = bpf.Open("tap", loadTap, vars, nil); err != nil {
		return nil, err
	}
	if err := t.object.Load(&t.objs, nil); err != nil {
		return nil, err
	}
	t.links, err = t.object.Attach(tapProgFlIn, tapProgFlOut)
	return t, err
}

// Trips returns the answered requests, in order. A request that is sent again counts from the last
// time.
func (t *Tap) Trips() (trips []Trip, err error) {
	var taken uint32
	if err := t.objs.Taken.Get(&taken); err != nil {
		return nil, fmt.Errorf("read stamps: %w", err)
	}
	var asked time.Duration
	for i := range taken {
		var s tapStamp
		if err := t.objs.Stamps.Lookup(i, &s); err != nil {
			return nil, fmt.Errorf("read stamps: %w", err)
		}
		switch at := time.Duration(s.At); {
		case s.Out != 0:
			asked = at
		case asked != 0:
			trips = append(trips, Trip{asked, at})
			asked = 0
		}
	}
	return trips, nil
}

// Close removes the tap.
func (t *Tap) Close() error { return errors.Join(t.links.Close(), t.object.Close()) }
