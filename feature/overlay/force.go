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

// key names a network: by its tunnel device.
type key struct {
	netns uint64
	index int
}

func keyOf(n network.Network) key { return key{n.NetNS, n.Index} }

// force is a network with a fast path.
type force struct {
	network.Network
	number  uint32
	value   overlayNetwork  // what fl_ov_nets holds
	tunnels []overlayTunnel // the keys by which packets find it
	ends    map[container.Device]overlayEnd
	ways    map[container.Device]network.Ways
	err     error // of the last round; if set, nothing is fast
	ns      *netdev.NS
	table   *conntrack.Table // nil: the kernel has none
	at      hook.Set
	// tracking is how conntrack takes what it did not see: netLiberal, netEager.
	tracking uint32
	unwatch  func() error

	raised    time.Time
	raisedBy  string
	evictions map[string]uint64
}

// fast returns the host ends of containers that ask for the fast path.
func (f *Overlay) fast() map[container.Device]fastEnd {
	list := make(map[container.Device]fastEnd)
	for _, t := range f.tenants.Tenants() {
		if !tenant.Agree(t.Members(), wants).Value {
			continue
		}
		for _, e := range t.Ends() {
			if e.Host {
				list[e.Device] = fastEnd{e, t}
			}
		}
	}
	return list
}

type fastEnd struct {
	container.End
	of *tenant.Tenant
}

// round brings the host to what the tenants want. An error of one network, which Apply reports to
// its containers, does not stop it.
func (f *Overlay) round(why string) error {
	f.looking.Begin()
	defer f.looking.End()
	fast := f.fast()
	if len(fast) == 0 && f.cache == nil {
		return nil
	}
	list := make([]container.End, 0, len(fast))
	for _, e := range fast {
		list = append(list, e.End)
	}
	nets, err := f.find(list)
	if err != nil {
		return err
	}
	f.nets = nets
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
	// The watch and the look take up a network that was refused, or is recreated.
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

// slot gives the tenants on fast networks slots, by which the accounts know them.
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

// begin takes a network up. Nothing is fast yet.
func (f *Overlay) begin(n network.Network) (_ *force, err error) {
	o := &force{Network: n, ends: make(map[container.Device]overlayEnd), evictions: make(map[string]uint64)}
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
	path := n.Path
	if n.NetNS == f.host.Inode() {
		path = f.cfg.NetNS
	}
	if o.ns, err = netdev.Open(path); err != nil {
		return nil, err
	}
	if o.ns.Inode() != n.NetNS {
		return nil, fmt.Errorf("netns %d: %w", n.NetNS, netdev.ErrNoNS)
	}
	if o.table, err = conntrack.Open(o.ns); err != nil && !errors.Is(err, conntrack.ErrUnsupported) {
		return nil, err
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
		errs = append(errs, f.undo(o.ns.Pair(o.Index, f.host).Ref()))
	}
	if f.cache != nil {
		for _, t := range o.tunnels {
			errs = append(errs, absent(f.cache.maps.FlOvTunnels.Delete(t)))
		}
		for d := range o.ends {
			errs = append(errs, f.forget(o, d))
		}
		errs = append(errs, f.cache.forget(o.number), f.cache.clear(o.number))
	}
	if o.table != nil {
		o.table.Close()
	}
	if o.ns != nil {
		errs = append(errs, o.ns.Close())
	}
	if f.force[keyOf(o.Network)] == o {
		delete(f.force, keyOf(o.Network))
	}
	return errors.Join(errs...)
}

// bring updates a network to the present host. If learnt entries could predate a change, they are
// invalidated: learning pauses, the generation goes up, the change is made, and learning goes on.
func (f *Overlay) bring(o *force, n network.Network, fast map[container.Device]fastEnd, why string) error {
	want, err := f.valueOf(o, n)
	if err != nil {
		return err
	}
	list, ways, err := f.endsOf(o, n, fast)
	if err != nil {
		return err
	}
	tunnels := tunnelsOf(want)
	o.ways = ways
	want.Gen = o.value.Gen
	same := want == o.value && maps.Equal(list, o.ends) && slices.Equal(tunnels, o.tunnels)
	o.Network = n
	if !same {
		o.value = want
		f.raise(o, why)
		if err := f.write(o, netPaused); err != nil {
			return err
		}
		if err := f.fill(o, list, tunnels); err != nil {
			return err
		}
	}
	if err := f.attach(o, list); err != nil {
		return err
	}
	s, err := conntrack.Read(o.ns)
	if err != nil {
		return err
	}
	switch o.tracking = 0; {
	case s.Liberal:
		o.tracking = netLiberal | netEager
	case s.Entries == 0:
		o.tracking = netEager
	}
	flags := uint32(netOn)
	if f.killed[f.nameOf(o.Network)] != "" {
		flags = 0
	}
	return f.write(o, flags)
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

// tunnelsOf returns the keys that match received packets of a network.
func tunnelsOf(v overlayNetwork) []overlayTunnel {
	return []overlayTunnel{{Vni: v.Vni, Port: v.Port}, {Vni: v.Vni, Port: v.Port, V6: 1}}
}

// endsOf returns the ends of a network, and the paths of their packets.
func (f *Overlay) endsOf(o *force, n network.Network, fast map[container.Device]fastEnd) (map[container.Device]overlayEnd, map[container.Device]network.Ways, error) {
	list, ways := make(map[container.Device]overlayEnd), make(map[container.Device]network.Ways)
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
		state, err := f.look(e)
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

// fill updates the maps to the ends and the tunnels of a network.
func (f *Overlay) fill(o *force, list map[container.Device]overlayEnd, tunnels []overlayTunnel) error {
	var errs []error
	for _, t := range o.tunnels {
		if !slices.Contains(tunnels, t) {
			errs = append(errs, absent(f.cache.maps.FlOvTunnels.Delete(t)))
		}
	}
	for _, t := range tunnels {
		errs = append(errs, f.cache.maps.FlOvTunnels.Put(t, o.number))
	}
	o.tunnels = tunnels
	for d := range o.ends {
		if _, ok := list[d]; !ok {
			errs = append(errs, f.forget(o, d))
		}
	}
	for d, v := range list {
		if o.ends[d] != v {
			errs = append(errs, f.cache.maps.FlOvEnds.Put(overlayEndKey{Net: o.number, Ifindex: uint32(d.Index)}, v))
			o.ends[d] = v
		}
	}
	return errors.Join(errs...)
}

// forget removes an end from the maps.
func (f *Overlay) forget(o *force, d container.Device) error {
	err := absent(f.cache.maps.FlOvEnds.Delete(overlayEndKey{Net: o.number, Ifindex: uint32(d.Index)}))
	err = errors.Join(err, f.cache.unpass(o.ends[d].Slot))
	delete(o.ends, d)
	return err
}

// raise invalidates all that was learnt of a network, as of the next write.
func (f *Overlay) raise(o *force, why string) {
	f.last++
	o.value.Gen, o.raised, o.raisedBy = f.last, f.cfg.Now(), why
	o.evictions[why]++
}

// write passes a network to the programs, with the flags that are no property of it.
func (f *Overlay) write(o *force, flags uint32) error {
	if f.cache == nil || o.number == 0 || o.number > maxNetworks {
		return nil
	}
	if flags&netPaused != 0 && o.err == nil && f.killed[f.nameOf(o.Network)] == "" {
		flags |= netOn // what was learnt is invalid, and nothing is learnt
	}
	v := o.value
	v.Flags |= flags | o.tracking
	return f.cache.maps.FlOvNets.Put(o.number, v)
}
