package overlay

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"math/bits"
	"net"
	"slices"
	"time"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/feature/overlay/network"
	"github.com/fairlead-project/fairlead/hook"
	"github.com/fairlead-project/fairlead/kernel/bpf"
	"github.com/fairlead-project/fairlead/kernel/conntrack"
	"github.com/fairlead-project/fairlead/kernel/journal"
	"github.com/fairlead-project/fairlead/kernel/netdev"
	"github.com/fairlead-project/fairlead/tenant"
)

// Bounds of the BPF maps; maps.bpf.h.
const (
	maxNetworks = 255  // number 0 is none
	maxEnds     = 8191 // slot 0 is none
)

// key identifies a network by its tunnel device.
type key struct {
	netns uint64
	index int
}

func keyOf(n network.Network) key { return key{n.NetNS, n.Index} }

// force is a network with a fast path.
type force struct {
	network.Network
	number  uint32
	value   overlayNetwork // the content of fl_ov_nets
	ends    map[container.Device]overlayEnd
	ways    map[container.Device]network.Ways
	states  map[container.Device]network.EndState // as of the last look, without those that may have changed
	err     error                                 // of the last round; nothing is fast while it is set
	ns      *netdev.NS
	at      hook.Set
	liberal bool // conntrack accepts TCP packets even if it has missed others
	unwatch func() error

	raised    time.Time
	raisedBy  string
	evictions map[string]uint64
}

// endsWith returns the host ends of containers; fast: of those that ask for the fast path.
func (f *Overlay) endsWith(fast bool) (list map[container.Device]fastEnd, plain []container.End) {
	list = make(map[container.Device]fastEnd)
	for _, t := range f.tenants.Tenants() {
		if fast && !tenant.Agree(t.Members(), wants).Value {
			continue
		}
		for _, e := range t.Ends() {
			if e.Host {
				list[e.Device] = fastEnd{e, t}
				plain = append(plain, e)
			}
		}
	}
	return list, plain
}

type fastEnd struct {
	container.End
	of *tenant.Tenant
}

// round adapts the host to the tenants. It continues after an error of one network, which Apply reports
// to the network's containers.
func (f *Overlay) round(why string) error {
	f.looking.Begin()
	defer f.looking.End()
	fast, list := f.endsWith(true)
	if len(fast) == 0 && f.cache == nil {
		return nil
	}
	nets, err := f.find(list)
	if err != nil {
		return err
	}
	f.nets, f.looked, f.due = nets, f.cfg.Now(), ""
	clear(f.broken)
	wanted := make(map[key]network.Network)
	for _, n := range nets {
		if len(n.Refused) == 0 && len(n.Ends) > 0 {
			wanted[keyOf(n)] = n
		}
	}
	var errs []error
	for k, o := range f.force {
		if _, ok := wanted[k]; !ok || o.ns.Inode() != k.netns {
			errs = append(errs, f.drop(o))
		}
	}
	if err := f.slot(fast, wanted); err != nil {
		errs = append(errs, err)
	}
	if len(wanted) == 0 && (f.cache == nil || len(fast) == 0) {
		return errors.Join(append(errs, f.shut())...)
	}
	// The watch and the look notice a refused or recreated network.
	if err := f.open(); err != nil {
		return errors.Join(append(errs, err)...)
	}
	errs = append(errs, f.uplinks(wanted))
	for _, k := range slices.SortedFunc(maps.Keys(wanted), func(a, b key) int {
		return cmp.Or(cmp.Compare(a.netns, b.netns), cmp.Compare(a.index, b.index))
	}) {
		o := f.force[k]
		if o == nil {
			if o, err = f.begin(wanted[k]); err != nil {
				f.broken[k] = err
				f.cfg.Log.Warn("overlay network is not fast", "network", wanted[k].Name, "err", err)
				continue
			}
		}
		was := o.err
		if o.err = f.bring(o, wanted[k], fast, why); o.err != nil {
			o.err = errors.Join(o.err, f.write(o, 0))
			if was == nil || was.Error() != o.err.Error() {
				f.cfg.Log.Warn("overlay network is not fast", "network", o.Name, "err", o.err)
			}
		}
	}
	return errors.Join(errs...)
}

// slot gives slots to the tenants on fast networks. The accounts refer to tenants by slot.
func (f *Overlay) slot(fast map[container.Device]fastEnd, wanted map[key]network.Network) error {
	var err error
	on := make(map[tenant.Key]bool)
	for _, n := range wanted {
		for _, d := range n.Ends {
			if e, ok := fast[d]; ok {
				on[e.of.Key()] = true
			}
		}
	}
	for k := range on {
		if _, has := f.slots[k]; !has {
			s, terr := f.cfg.Identity.Take(k)
			if terr != nil {
				err = terr
				continue
			}
			f.slots[k] = s
		}
	}
	for k := range f.slots {
		if !on[k] {
			f.cfg.Identity.Release(k)
			delete(f.slots, k)
		}
	}
	return err
}

// begin prepares a network. Nothing is fast yet.
func (f *Overlay) begin(n network.Network) (_ *force, err error) {
	o := &force{Network: n, ends: make(map[container.Device]overlayEnd), states: make(map[container.Device]network.EndState), evictions: make(map[string]uint64)}
	defer func() {
		if err != nil {
			err = fmt.Errorf("network %s: %w", n.Name, errors.Join(err, f.drop(o)))
		}
	}()
	used := make(map[uint32]bool)
	for _, other := range f.force {
		used[other.number] = true
	}
	for o.number = 1; used[o.number]; o.number++ {
	}
	if o.number > maxNetworks {
		return nil, fmt.Errorf("there is room for %d networks", maxNetworks)
	}
	if o.ns, err = netdev.Open(n.Path); err != nil {
		return nil, err
	}
	if o.ns.Inode() != n.NetNS {
		return nil, fmt.Errorf("netns %d: %w", n.NetNS, netdev.ErrNoNS)
	}
	table, err := conntrack.Open(o.ns)
	if err != nil && !errors.Is(err, conntrack.ErrUnsupported) {
		return nil, err
	}
	if err == nil {
		f.asking.Lock()
		f.tables[o.number] = table
		f.asking.Unlock()
	}
	if o.unwatch, err = f.watch(o.ns, n.Path); err != nil {
		return nil, err
	}
	f.force[keyOf(n)] = o
	return o, nil
}

// drop undoes begin and bring.
func (f *Overlay) drop(o *force) error {
	errs := []error{f.write(o, 0), o.at.Close()}
	if o.unwatch != nil {
		errs = append(errs, o.unwatch())
	}
	if o.ns != nil && o.NetNS != f.host.Inode() {
		errs = append(errs, f.restore(func(e journal.Entry) bool { return e.Ref == o.ns.Pair(o.Index, f.host).Ref() }))
	}
	if f.cache != nil {
		for _, t := range tunnelsOf(o.value) {
			errs = append(errs, absent(f.cache.maps.FlOvTunnels.Delete(t)))
		}
		for d := range o.ends {
			errs = append(errs, f.forget(o, d))
		}
		errs = append(errs, f.cache.forget(o.number))
	}
	f.asking.Lock()
	if table := f.tables[o.number]; table != nil {
		table.Close()
	}
	delete(f.tables, o.number)
	f.asking.Unlock()
	if o.ns != nil {
		errs = append(errs, o.ns.Close())
	}
	if f.force[keyOf(o.Network)] == o {
		delete(f.force, keyOf(o.Network))
	}
	return errors.Join(errs...)
}

// bring updates a network to the present host. It invalidates learnt entries that predate a change: all
// of them by a new generation, or those of the ends that have changed.
func (f *Overlay) bring(o *force, n network.Network, fast map[container.Device]fastEnd, why string) error {
	want, err := f.valueOf(o, n)
	if err != nil {
		return err
	}
	list, ways, err := f.endsOf(o, n, fast)
	if err != nil {
		return err
	}
	o.ways, o.Network = ways, n
	others, err := f.fill(o, list)
	if err != nil {
		return err
	}
	want.Gen, want.From = o.value.Gen, o.value.From
	if want != o.value {
		o.value = want
		f.raise(o, why)
		err = f.write(o, f.flags(o))
		for _, t := range tunnelsOf(want) { // they do not change while the device exists
			err = errors.Join(err, f.cache.maps.FlOvTunnels.Put(t, o.number))
		}
	} else {
		err = f.unlearn(o, others, why)
	}
	if err := errors.Join(err, f.attach(o, list)); err != nil {
		return err
	}
	if o.liberal, err = conntrack.Liberal(o.ns); err != nil {
		return err
	}
	o.err = nil
	return f.write(o, f.flags(o))
}

// valueOf returns the programs' description of a network.
func (f *Overlay) valueOf(o *force, n network.Network) (v overlayNetwork, err error) {
	if n.Bridge == 0 {
		v.Flags |= netRouted
	}
	if n.InheritTOS {
		v.Flags |= netTOS
	}
	v.Tunnel = uint32(n.Index)
	v.Port = fromNetwork(n.Port)
	v.Word = bits.ReverseBytes32(0x08000000) // VXLAN: a VNI is present
	if n.Kind == "geneve" {
		v.Word = bits.ReverseBytes32(0x6558) // no options, Ethernet inside
	}
	v.Vni = bits.ReverseBytes32(n.VNI << 8)
	v.Mtu = uint16(min(n.MTU, 65535))
	v.Low, v.High = n.SourcePorts[0], n.SourcePorts[1]
	if n.NetNS == f.host.Inode() {
		return v, nil
	}
	if err := f.cfg.Journal.Turn(o.ns.Pair(n.Index, f.host), netdev.OurPair, journal.Owner{Feature: name}); err != nil {
		return v, err
	}
	inner, outer, err := o.ns.PairEnds(n.Index)
	v.Inside, v.Outside = uint32(inner), uint32(outer)
	return v, err
}

// tunnelsOf returns the keys that match a network's received packets.
func tunnelsOf(v overlayNetwork) []overlayTunnel {
	return []overlayTunnel{{Vni: v.Vni, Port: v.Port}, {Vni: v.Vni, Port: v.Port, V6: 1}}
}

// endsOf returns the ends of a network, and the paths of their packets.
func (f *Overlay) endsOf(o *force, n network.Network, fast map[container.Device]fastEnd) (map[container.Device]overlayEnd, map[container.Device]network.Ways, error) {
	list, ways := make(map[container.Device]overlayEnd), make(map[container.Device]network.Ways)
	maps.DeleteFunc(o.states, func(d container.Device, _ network.EndState) bool { return !slices.Contains(n.Ends, d) })
	slots := make(map[uint16]bool)
	for _, other := range f.force {
		for _, e := range other.ends {
			slots[e.Slot] = true
		}
	}
	for _, d := range n.Ends {
		e, ok := fast[d]
		if !ok {
			continue
		}
		state, err := f.look(o, e)
		if errors.Is(err, journal.ErrGone) || errors.Is(err, netdev.ErrNoLink) || errors.Is(err, netdev.ErrNoNS) {
			gone := network.Reason{Word: network.Unread, Text: fmt.Sprintf("it could not be looked at: %v", err)} // its container ends, or begins
			ways[d] = network.Ways{In: network.Slow, WhyIn: gone, WhyOut: gone}
			continue
		}
		if err != nil {
			return nil, nil, err
		}
		w := network.Way(state)
		ways[d] = w
		v := overlayEnd{Tenant: uint16(f.slots[e.of.Key()]), Slot: o.ends[d].Slot}
		switch w.In {
		case network.Peer:
			v.Way = wayPeer
		case network.End:
			v.Way = wayEnd
		}
		if w.Out {
			v.Way |= wayOut
		}
		mac, err := net.ParseMAC(e.Inside.MAC)
		if err != nil {
			continue // it cannot receive frames
		}
		copy(v.Mac[:], mac)
		v.Mtu = uint16(min(state.MTU, 65535))
		for next := uint16(1); v.Slot == 0 && next <= maxEnds; next++ {
			if !slots[next] {
				v.Slot, slots[next] = next, true
			}
		}
		if v.Way != 0 && v.Slot != 0 {
			list[d] = v
		}
	}
	return list, ways, nil
}

// fill updates the maps to the ends of a network. It returns earlier ends that have changed or
// disappeared.
func (f *Overlay) fill(o *force, list map[container.Device]overlayEnd) (others map[uint32]bool, err error) {
	var errs []error
	others = make(map[uint32]bool)
	for d := range o.ends {
		if _, ok := list[d]; !ok {
			others[uint32(d.Index)] = true
			errs = append(errs, f.forget(o, d))
		}
	}
	for d, v := range list {
		if was, ok := o.ends[d]; was != v {
			if ok {
				others[uint32(d.Index)] = true
			}
			errs = append(errs, f.cache.maps.FlOvEnds.Put(overlayEndKey{Net: o.number, Ifindex: uint32(d.Index)}, v))
			o.ends[d] = v
		}
	}
	return others, errors.Join(errs...)
}

// unlearn invalidates learnt entries of some ends only, because flows of other ends do not pass there.
func (f *Overlay) unlearn(o *force, ends map[uint32]bool, why string) error {
	if len(ends) == 0 {
		return nil
	}
	if f.cache.unlearn(o.number, ends) == nil {
		o.evictions[why]++
		return nil
	}
	f.raise(o, why) // the map changed too much during the walk
	return f.write(o, f.flags(o))
}

// forget removes an end from the maps.
func (f *Overlay) forget(o *force, d container.Device) error {
	err := absent(f.cache.maps.FlOvEnds.Delete(overlayEndKey{Net: o.number, Ifindex: uint32(d.Index)}))
	err = errors.Join(err, zero[overlayPassed](f.cache.maps.FlOvPassed, uint32(o.ends[d].Slot)))
	delete(o.ends, d)
	return err
}

// raise invalidates everything that was learnt of a network, as of the next write.
func (f *Overlay) raise(o *force, why string) {
	f.last++
	o.value.Gen, o.value.From = f.last, bpf.Clock()+uint64(settle)
	o.raised, o.raisedBy = f.cfg.Now(), why
	o.evictions[why]++
}

// write passes a network to the programs, together with flags that do not belong to the network.
func (f *Overlay) write(o *force, flags uint32) error {
	if f.cache == nil || o.number == 0 || o.number > maxNetworks {
		return nil
	}
	v := o.value
	v.Flags |= flags
	if o.liberal {
		v.Flags |= netLiberal
	}
	return f.cache.maps.FlOvNets.Put(o.number, v)
}
