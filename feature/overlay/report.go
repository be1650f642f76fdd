package overlay

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"slices"
	"time"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/feature"
	"github.com/fairlead-project/fairlead/feature/overlay/network"
	"github.com/fairlead-project/fairlead/kernel/bpf"
	"github.com/fairlead-project/fairlead/policy"
	"github.com/fairlead-project/fairlead/tenant"
)

// Directions and paths in the counters; maps.bpf.h.
const (
	out = 0
	in  = 1

	fastPath = 0
	slowPath = 1
)

// reasons are the words of enum reason in maps.bpf.h, in its order.
var reasons = [...]string{
	"", // fast
	api.SlowNoEntry, api.SlowLease, api.SlowGeneration, api.SlowOtherDirection, api.SlowConntrack, api.SlowNoEntry, api.SlowNoEntry,
	api.SlowKilled, api.SlowOptions, api.SlowFragment, api.SlowTTL, api.SlowMTU, api.SlowProtocol, api.SlowTCPFlags, api.SlowHeader,
	api.SlowSource, api.SlowChecksum, api.SlowWay, api.SlowCut, api.SlowRoom,
}

// timedEnough is how many packets of each path must be timed for a meaningful mean.
const timedEnough = 16

// Report implements feature.Reporter: the networks, and their fast and slow packets.
func (f *Overlay) Report(_ context.Context, of *container.Container, ask api.Ask) (any, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.host == nil {
		return nil, f.Unavailable()
	}
	r, err := f.report(of)
	if err != nil {
		return nil, err
	}
	if body, ok := ask.Body.(api.OverlayAsk); ok && body.Flows > 0 {
		r.Flows, r.MoreFlows, err = f.flows(of, min(body.Flows, api.MaxOverlayFlows))
	}
	return r, err
}

var _ feature.Commander = (*Overlay)(nil)

// Command implements feature.Commander: it stops a network, or allows it again.
func (f *Overlay) Command(_ context.Context, _ *container.Container, ask api.Ask) (any, error) {
	to, ok := ask.Body.(api.OverlaySwitch)
	if !ok {
		return nil, fmt.Errorf("overlay: no command %T", ask.Body)
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.host == nil {
		return nil, f.Unavailable()
	}
	if err := f.kill(to.Network, to.Kill, to.By); err != nil {
		return nil, err
	}
	r, err := f.report(nil)
	if err != nil {
		return nil, err
	}
	i := slices.IndexFunc(r.Networks, func(n api.OverlayNetwork) bool { return n.Network == to.Network })
	if i < 0 {
		return nil, &api.Error{Status: http.StatusNotFound, Code: "not_found", Text: "there is no such network any more"}
	}
	return r.Networks[i], nil
}

// Snapshot implements feature.Feature.
func (f *Overlay) Snapshot() feature.Snapshot {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.host == nil {
		return feature.Snapshot{Taken: f.cfg.Now()}
	}
	r, err := f.report(nil)
	if err != nil {
		f.cfg.Log.Warn("read overlay networks", "err", err)
		return feature.Snapshot{Taken: f.cfg.Now()}
	}
	return snapshot(r)
}

// all finds the networks of all containers, from the tenants' ends.
func (f *Overlay) all() ([]network.Network, map[container.Device]fastEnd, error) {
	list, of := f.endsWith(false)
	nets, err := f.find(of)
	return nets, list, err
}

// condition returns a network's state, and why (a word, a sentence). o is nil: it has no fast path.
func (f *Overlay) condition(n network.Network, o *force) (state, word, why string) {
	switch by := f.killed[f.nameOf(n)]; {
	case len(n.Refused) > 0:
		return api.OverlayLeftAlone, n.Refused[0].Word, n.Refused[0].Text
	case by != "":
		return api.OverlayKilled, "killed", "it was stopped by hand (" + by + "): fairlead overlay revive " + f.nameOf(n)
	case o != nil && o.err != nil:
		return api.OverlayLeftAlone, "error", o.err.Error()
	case o != nil:
		return api.OverlayOn, "", ""
	}
	return api.OverlayOff, "error", "it is not taken up yet"
}

// report reads the counters, if of is set for one container only.
func (f *Overlay) report(of *container.Container) (api.Overlay, error) {
	r := api.Overlay{Taken: f.cfg.Now(), Networks: []api.OverlayNetwork{}, Containers: []api.OverlayContainer{}}
	nets, on, err := f.all()
	if err != nil {
		return r, err
	}
	entries, err := f.entries()
	if err != nil {
		return r, err
	}
	byTenant := make(map[tenant.Key]*api.OverlayContainer)
	for _, n := range nets {
		o := f.force[keyOf(n)]
		wire := f.wire(n, o, entries)
		containers := make(map[tenant.Key]bool)
		for _, d := range n.Ends {
			e, ok := on[d]
			if !ok {
				continue
			}
			key := e.of.Key()
			end := f.wireEnd(n, o, e)
			if !containers[key] {
				containers[key] = true
				wire.Containers++
				if end.Egress.Way == api.WayFast || end.Ingress.Way != api.WaySlow {
					wire.Accelerated++
				}
			}
			if of != nil && !slices.ContainsFunc(e.of.Members(), func(m policy.Target) bool { return m.Container.ID == of.ID }) {
				continue
			}
			c := byTenant[key]
			if c == nil {
				first := slices.MinFunc(e.of.Members(), func(a, b policy.Target) int { return cmp.Compare(a.Container.ID, b.Container.ID) }).Container
				if of != nil {
					first = *of
				}
				c = &api.OverlayContainer{Container: api.ID(first.ID), Name: first.Name}
				byTenant[key] = c
			}
			c.Ends = append(c.Ends, end)
		}
		if of == nil || slices.ContainsFunc(slices.Collect(maps.Values(byTenant)), func(c *api.OverlayContainer) bool {
			return slices.ContainsFunc(c.Ends, func(e api.OverlayEnd) bool { return e.Network == wire.Network })
		}) {
			r.Networks = append(r.Networks, wire)
		}
	}
	for _, c := range byTenant {
		r.Containers = append(r.Containers, *c)
	}
	slices.SortFunc(r.Containers, func(a, b api.OverlayContainer) int {
		return cmp.Or(cmp.Compare(a.Name, b.Name), cmp.Compare(a.Container, b.Container))
	})
	slices.SortFunc(r.Networks, func(a, b api.OverlayNetwork) int { return cmp.Compare(a.Network, b.Network) })
	return r, nil
}

// wire converts a network to the API's form; o is nil if it has no fast path.
func (f *Overlay) wire(n network.Network, o *force, entries map[uint32][3]uint64) api.OverlayNetwork {
	w := api.OverlayNetwork{
		Network: f.nameOf(n), Device: n.Name, Kind: n.Kind, VNI: uint64(n.VNI), Port: int(n.Port), Bridge: n.BridgeName,
	}
	if n.NetNS != f.host.Inode() {
		w.NetNS = n.NetNS
	}
	if n.Port != 0 {
		if w.Form = "routed"; n.Bridge != 0 {
			w.Form = "bridged"
		}
	}
	for _, u := range n.Uplinks {
		w.Uplinks = append(w.Uplinks, u.Name)
	}
	if w.State, w.Reason, w.Why = f.condition(n, o); w.State == api.OverlayOff {
		w.Reason, w.Why = "", ""
	}
	if o == nil {
		return w
	}
	w.Generation, w.Raised, w.RaisedBy = uint64(o.value.Gen), o.raised, o.raisedBy
	for _, cause := range slices.Sorted(maps.Keys(o.evictions)) {
		w.Evictions = append(w.Evictions, api.OverlayEviction{Cause: cause, Times: o.evictions[cause]})
	}
	e := entries[o.number]
	w.Tables = []api.OverlayTable{
		{Kind: "flow", Entries: e[0], Capacity: uint64(f.cache.maps.FlOvFlows.MaxEntries())},
		{Kind: "remote", Entries: e[1], Capacity: uint64(f.cache.maps.FlOvRemotes.MaxEntries())},
		{Kind: "local", Entries: e[2], Capacity: uint64(f.cache.maps.FlOvLocals.MaxEntries())},
	}
	var counts []overlayCounts
	if f.cache.maps.FlOvCounts.Lookup(o.number, &counts) != nil {
		return w
	}
	for dir, t := range []*api.OverlayTraffic{out: &w.Egress, in: &w.Ingress} {
		sums := make(map[string]uint64)
		var timed, took [2]float64
		for _, c := range counts {
			for path := range timed {
				timed[path] += float64(c.Timed[path])
				took[path] += float64(c.Ns[path])
			}
			t.FastBytes += c.Bytes[dir][fastPath]
			t.SlowBytes += c.Bytes[dir][slowPath]
			for why, n := range c.Packets[dir] {
				if why == fastPath {
					t.Fast += n
					continue
				}
				t.Slow += n
				sums[reasons[why]] += n
			}
		}
		if dir == out && min(timed[fastPath], timed[slowPath]) >= timedEnough {
			t.Saved = max(0, took[slowPath]/timed[slowPath]-took[fastPath]/timed[fastPath])
		}
		for reason, n := range sums {
			if n > 0 {
				t.Reasons = append(t.Reasons, api.OverlayReason{Reason: reason, Packets: n})
			}
		}
		slices.SortFunc(t.Reasons, func(a, b api.OverlayReason) int {
			return cmp.Or(cmp.Compare(b.Packets, a.Packets), cmp.Compare(a.Reason, b.Reason))
		})
	}
	return w
}

// wireEnd converts an end to the API's form.
func (f *Overlay) wireEnd(n network.Network, o *force, e fastEnd) api.OverlayEnd {
	w := api.OverlayEnd{Network: f.nameOf(n), Device: e.Inside.Name}
	state, word, why := f.condition(n, o)
	if len(n.Refused) == 0 && !tenant.Agree(e.of.Members(), wants).Value {
		state, word, why = api.OverlayOff, "off", "policy does not ask for it"
	}
	ways := network.Ways{WhyIn: network.Reason{Word: word, Text: why}, WhyOut: network.Reason{Word: word, Text: why}}
	if state == api.OverlayOn {
		ways = o.ways[e.Device]
	}
	w.Ingress.Way, w.Ingress.Reason, w.Ingress.Why = string(cmp.Or(ways.In, network.Slow)), ways.WhyIn.Word, ways.WhyIn.Text
	w.Egress.Way, w.Egress.Reason, w.Egress.Why = api.WaySlow, ways.WhyOut.Word, ways.WhyOut.Text
	if ways.Out {
		w.Egress.Way = api.WayFast
	}
	if o == nil {
		return w
	}
	if slot := o.ends[e.Device].Slot; slot != 0 {
		var passed []overlayPassed
		if f.cache.maps.FlOvPassed.Lookup(uint32(slot), &passed) == nil {
			for _, p := range passed {
				w.Egress.OverlayPackets = w.Egress.Add(packets(p, out))
				w.Ingress.OverlayPackets = w.Ingress.Add(packets(p, in))
			}
		}
	}
	return w
}

func packets(p overlayPassed, dir int) api.OverlayPackets {
	return api.OverlayPackets{
		Fast: p.Packets[dir][fastPath], FastBytes: p.Bytes[dir][fastPath],
		Slow: p.Packets[dir][slowPath], SlowBytes: p.Bytes[dir][slowPath],
	}
}

// entries counts the learnt entries by network: flows, remote and local containers.
func (f *Overlay) entries() (map[uint32][3]uint64, error) {
	n := make(map[uint32][3]uint64)
	if f.cache == nil {
		return n, nil
	}
	count := func(net uint32, kind int) {
		e := n[net]
		e[kind]++
		n[net] = e
	}
	var flow overlayFlowKey
	var host overlayHostKey
	err := keys(f.cache.maps.FlOvFlows, &flow, func() { count(flow.Net, 0) })
	err = errors.Join(err, keys(f.cache.maps.FlOvRemotes, &host, func() { count(host.Net, 1) }))
	return n, errors.Join(err, keys(f.cache.maps.FlOvLocals, &host, func() { count(host.Net, 2) }))
}

// keys walks the keys of a changing map.
func keys[K any](m *ebpf.Map, key *K, see func()) error {
	it := m.Iterate()
	var value []byte
	for it.Next(key, &value) {
		see()
	}
	if errors.Is(it.Err(), ebpf.ErrIterationAborted) {
		return nil // many entries come and go: the count is an estimate
	}
	return it.Err()
}

// flows lists flows, those with the most recent slow packets first.
func (f *Overlay) flows(of *container.Container, most int) ([]api.OverlayFlow, uint64, error) {
	if f.cache == nil {
		return nil, 0, nil
	}
	now := bpf.Clock()
	numbers := make(map[uint32]*force)
	for _, o := range f.force {
		numbers[o.number] = o
	}
	var list []api.OverlayFlow
	var k overlayFlowKey
	var v overlayFlow
	it := f.cache.maps.FlOvFlows.Iterate()
	for it.Next(&k, &v) {
		o := numbers[k.Net]
		if o == nil {
			continue
		}
		local, remote := addrPort(k.Local.Ip, k.Lport), addrPort(k.Remote.Ip, k.Rport)
		w := api.OverlayFlow{
			Network: f.nameOf(o.Network), Protocol: protocols[k.Proto],
			Local: local.Addr().String(), LocalPort: int(local.Port()), Remote: remote.Addr().String(), RemotePort: int(remote.Port()),
			State: flowState(v, o.value.Gen, now), Age: age(v, now).Seconds(),
		}
		if c, ok := f.holder(local.Addr().String()); ok {
			w.Container, w.Name = api.ID(c.ID), c.Name
		}
		if of == nil || api.ID(of.ID) == w.Container {
			list = append(list, w)
		}
	}
	if err := it.Err(); err != nil && !errors.Is(err, ebpf.ErrIterationAborted) {
		return nil, 0, err
	}
	slices.SortFunc(list, func(a, b api.OverlayFlow) int { return cmp.Compare(a.Age, b.Age) })
	n := min(len(list), most)
	return list[:n], uint64(len(list) - n), nil
}

var protocols = map[uint32]string{unix.IPPROTO_TCP: "tcp", unix.IPPROTO_UDP: "udp"}

// lease is how long a learnt entry is valid; maps.bpf.h.
const lease = 700 * time.Millisecond

// age returns the time since a flow's lease was renewed.
func age(v overlayFlow, now uint64) time.Duration {
	last := max(v.Dir[out].Until, v.Dir[in].Until)
	if last == 0 {
		return time.Duration(now - min(now, v.Learnt))
	}
	return max(0, time.Duration(now)-time.Duration(last)+lease)
}

// flowState returns why the next packet of a flow is slow, or api.WayFast.
func flowState(v overlayFlow, gen uint32, now uint64) string {
	switch {
	case v.Dir[out].Until == 0 && v.Dir[in].Until == 0:
		return api.SlowNoEntry
	case v.Dir[out].Gen != gen && v.Dir[in].Gen != gen:
		return api.SlowGeneration
	case v.To.Seal == 0 && (v.Dir[out].Gen != gen || v.Dir[in].Gen != gen): // a service has a flow for each direction
		return api.SlowOtherDirection
	case v.Ready == 0:
		return api.SlowConntrack
	case max(v.Dir[out].Until, v.Dir[in].Until) <= now:
		return api.SlowLease
	}
	return api.WayFast
}

// holder returns the container with an address.
func (f *Overlay) holder(addr string) (container.Container, bool) {
	for _, t := range f.tenants.Tenants() {
		for _, m := range t.Members() {
			for _, dev := range m.Container.Interfaces {
				for _, a := range dev.Addrs {
					if len(a) > len(addr) && a[:len(addr)] == addr && a[len(addr)] == '/' {
						return m.Container, true
					}
				}
			}
		}
	}
	return container.Container{}, false
}
