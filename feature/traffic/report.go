package traffic

import (
	"cmp"
	"context"
	"errors"
	"path/filepath"
	"slices"
	"strconv"
	"time"

	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/feature"
	"github.com/fairlead-project/fairlead/feature/traffic/delay"
	"github.com/fairlead-project/fairlead/feature/traffic/model"
	"github.com/fairlead-project/fairlead/hist"
	"github.com/fairlead-project/fairlead/kernel/netdev"
	"github.com/fairlead-project/fairlead/kernel/qdisc"
	"github.com/fairlead-project/fairlead/tenant"
	"github.com/fairlead-project/fairlead/tenant/identity"
)

// Direction is the direction of packets, as seen from the containers.
type Direction string

// Egress is from containers, Ingress towards them.
const (
	Egress  Direction = "egress"
	Ingress Direction = "ingress"
)

// Row is one class at one uplink, or the classes that limit a container to a ceil at the host end of
// its veth, with its due and its counters, without names and estimates. The counters restart when
// policy makes a class anew.
type Row struct {
	api.TrafficClass
	Members []container.ID // all that share the network; Container is the lowest

	class  delay.Class
	tenant tenant.Key      // zero: the default class
	Delays *hist.Histogram // queueing delays; nil: not measured, or packets are split
}

// Reading holds all classes, by uplink, direction and container.
type Reading struct {
	Taken  time.Time
	Rows   []Row
	Missed uint64 // packets not measured because too many waited
	Err    error  // why Measure has no delays; the rest is complete
}

// Read reads the counters of all classes, and the delays if they are always measured. It omits uplinks
// that are gone or have a foreign root qdisc. It may be called at any time.
func (f *Traffic) Read() Reading {
	f.mu.Lock()
	defer f.mu.Unlock()
	r := Reading{Taken: time.Now()}
	if f.programs == nil || len(f.shaped) == 0 {
		return r
	}
	all, err := f.plans()
	if err != nil { // an uplink has become too slow, as the status reports
		return r
	}
	owners := map[identity.Slot]*shaped{identity.Nobody: nil}
	for _, t := range f.shaped {
		owners[t.slot] = t
		for at, h := range t.holds {
			if h.live() && !t.summed(h) {
				r.Rows = f.read(r.Rows, h, at.way, *h.plan, map[identity.Slot]*shaped{identity.Nobody: t})
			}
		}
	}
	for index, u := range f.uplinks {
		for _, way := range directions() {
			if p, planned := all[way][index]; planned && u.hold(way).live() {
				r.Rows = f.read(r.Rows, u.hold(way), way, p, owners)
			}
		}
	}
	slices.SortFunc(r.Rows, func(a, b Row) int {
		return cmp.Or(cmp.Compare(a.Uplink, b.Uplink), cmp.Compare(a.Direction, b.Direction), cmp.Compare(a.Container, b.Container))
	})
	if f.meter != nil {
		if err := r.fill(f.meter, nil); err != nil {
			f.cfg.Log.Error("delays are not all known", "err", err)
		}
	}
	return r
}

// read adds those classes of a hold that belong to owners, by slot; nil owns the default class of an
// uplink. At a tenant's own device the default class is the tenant's, and guarantees nothing.
func (f *Traffic) read(to []Row, h *hold, way Direction, p model.Plan, owners map[identity.Slot]*shaped) []Row {
	ns, err := f.find.Open(h.path, h.of.NetNS)
	if err != nil {
		return to
	}
	defer ns.Close()
	d, err := qdisc.Open(ns, h.index)
	if err != nil {
		return to
	}
	defer d.Close()
	stats, _ := d.Stats(kindOf(p)) // empty if the device is gone, or its root qdisc is foreign
	for _, c := range p.Classes {
		minor := minorOf(c.Slot)
		t, known := owners[c.Slot]
		st, there := stats[minor]
		if !known || !there {
			continue
		}
		ceil := owners[identity.Nobody] != nil
		if ceil {
			st = together(st, stats[qdisc.MinorSparse])
		}
		row := Row{class: delay.Class{NetNS: h.of.NetNS, Index: h.index, Minor: minor}, TrafficClass: api.TrafficClass{
			Uplink: p.Link.Name, Direction: string(way), Link: p.Link.Rate,
			Guaranteed: c.Guaranteed, Ceil: c.Ceil, Level: c.Level, Split: c.Split,
			Bytes: st.Bytes, Packets: st.Packets, Borrowed: st.Borrowed, Drops: st.Drops, Overlimits: st.Overlimits,
			BacklogBytes: st.Backlog, BacklogPackets: st.Queued,
		}}
		if t != nil {
			row.Members, row.tenant = t.IDs(), t.Key()
			row.Container = api.ID(row.Members[0])
			n := t.due[way]
			row.Asked = &api.TrafficAsked{
				Rate: n.Rate, Ceil: n.Ceil, Weight: uint64(n.Weight), Priority: n.Priority, Latency: n.Latency.Seconds(), Split: n.Split,
			}
		}
		if ceil {
			row.Guaranteed = 0
		}
		to = append(to, row)
	}
	return to
}

// The bounds of traffic_delay_seconds are 2^firstBound ns (16 us) and each doubling up to
// 2^lastBound ns (4.3 s).
const (
	firstBound = 14
	lastBound  = 32
)

// help describes the samples of Snapshot. All but the last are of one class at one device.
var help = map[string]string{
	"traffic_sent_bytes_total":            "Bytes sent.",
	"traffic_sent_packets_total":          "Packets sent.",
	"traffic_borrowed_packets_total":      "Packets sent beyond the guaranteed rate.",
	"traffic_dropped_packets_total":       "Packets for which the queue of the class had no room.",
	"traffic_overlimits_total":            "How often the class reached its ceil.",
	"traffic_backlog_bytes":               "Bytes in the queue of the class.",
	"traffic_backlog_packets":             "Packets in the queue of the class.",
	"traffic_guaranteed_bytes_per_second": "Rate that the class gets now if all other classes use their full share.",
	"traffic_ceil_bytes_per_second":       "Upper bound on the rate of the class.",
	"traffic_rate_bytes_per_second":       "Rate that policy asks for.",
	"traffic_delay_seconds":               "Queueing delay of the packets that were sent.",
	"traffic_delay_missed_packets_total":  "Packets on this host whose delay was not measured, because too many were in the queues.",
}

// Snapshot implements feature.Feature. It has a sample of each name for each Row, with the
// direction as a label. The samples of delays exist only while delays are always measured.
func (f *Traffic) Snapshot() feature.Snapshot {
	r := f.Read()
	s := feature.Snapshot{Taken: r.Taken, Help: help}
	for _, row := range r.Rows {
		sample := feature.Sample{
			Container: container.ID(row.Container), Device: row.Uplink, Labels: []feature.Label{{Name: "direction", Value: row.Direction}},
		}
		add := func(name string, v float64) {
			sample.Name, sample.Value = name, v
			s.Samples = append(s.Samples, sample)
		}
		add("traffic_sent_bytes_total", float64(row.Bytes))
		add("traffic_sent_packets_total", float64(row.Packets))
		add("traffic_borrowed_packets_total", float64(row.Borrowed))
		add("traffic_dropped_packets_total", float64(row.Drops))
		add("traffic_overlimits_total", float64(row.Overlimits))
		add("traffic_backlog_bytes", float64(row.BacklogBytes))
		add("traffic_backlog_packets", float64(row.BacklogPackets))
		add("traffic_guaranteed_bytes_per_second", float64(row.Guaranteed)/8)
		add("traffic_ceil_bytes_per_second", float64(row.Ceil)/8)
		if row.Asked != nil && row.Asked.Rate > 0 {
			add("traffic_rate_bytes_per_second", float64(row.Asked.Rate)/8)
		}
		if row.Delays != nil {
			sample.Histogram = row.Delays.Forms(firstBound, lastBound)
			add("traffic_delay_seconds", 0)
		}
	}
	if slices.ContainsFunc(r.Rows, func(row Row) bool { return row.Delays != nil }) {
		s.Samples = append(s.Samples, feature.Sample{Name: "traffic_delay_missed_packets_total", Value: float64(r.Missed)})
	}
	return s
}

// Report implements feature.Reporter: each container's due and the bandwidth that it gets. If ask.Over
// is not 0, it measures queueing delays for that time.
func (f *Traffic) Report(ctx context.Context, of *container.Container, ask api.Ask) (any, error) {
	m, err := f.Measure(ctx, ask.Over)
	if err != nil {
		return nil, err
	}
	r := m
	sharer := container.ID(0)
	if of != nil {
		if own := rowsOf(r, of.ID); len(own.Rows) > 0 {
			r = own
		} else {
			r, sharer = rowsShared(r, *of)
		}
	}
	t := wire(r, f.cfg.Containers.Lookup)
	t.Contended = f.contention()
	if of != nil {
		t.Contended = slices.DeleteFunc(t.Contended, func(c api.TrafficContended) bool { return c.Container != api.ID(of.ID) })
	}
	if sharer != 0 {
		t.Sharer = cmp.Or(nameOf(f.cfg.Containers.Lookup(sharer)), sharer.String())
	}
	if ask.Over != 0 {
		t.Measured = &api.TrafficMeasured{Seconds: ask.Over.Seconds(), Missed: m.Missed}
		if m.Err != nil {
			t.Measured.Error = m.Err.Error()
		}
	}
	return t, nil
}

// rowsOf returns the rows of one container, under its own id even if it shares them with others.
func rowsOf(r Reading, id container.ID) Reading {
	own := Reading{Taken: r.Taken}
	for _, row := range r.Rows {
		if slices.Contains(row.Members, id) {
			row.Container = api.ID(id)
			own.Rows = append(own.Rows, row)
		}
	}
	return own
}

// rowsShared returns the rows of the network of a container without policy, and the container that
// determines their policy, or 0.
func rowsShared(r Reading, of container.Container) (shared Reading, by container.ID) {
	shared.Taken = r.Taken
	for _, row := range r.Rows {
		if key := of.TenantKey(); key != (tenant.Key{}) && row.tenant == key {
			shared.Rows, by = append(shared.Rows, row), container.ID(row.Container)
		}
	}
	return shared, by
}

func nameOf(c container.Container, _ bool) string { return c.Name }

// wire adds names and delays to the classes of a reading.
func wire(r Reading, lookup func(container.ID) (container.Container, bool)) api.Traffic {
	t := api.Traffic{Taken: r.Taken, Classes: make([]api.TrafficClass, 0, len(r.Rows))}
	for _, row := range r.Rows {
		c := row.TrafficClass
		if c.Container != 0 {
			c.Name = nameOf(lookup(container.ID(c.Container)))
		}
		if h := row.Delays; h != nil {
			c.Delay = &api.TrafficDelay{
				Packets: h.Count(),
				P50:     h.Quantile(0.5).Seconds(), P99: h.Quantile(0.99).Seconds(), P999: h.Quantile(0.999).Seconds(),
			}
		}
		t.Classes = append(t.Classes, c)
	}
	api.SortTraffic(t.Classes)
	return t
}

// SelfReport implements feature.SelfReporter: a container sees its own classes.
func (f *Traffic) SelfReport(context.Context) func(container.Container, *api.SelfReports) {
	r := f.Read()
	return func(c container.Container, out *api.SelfReports) {
		t := wire(rowsOf(r, c.ID), func(container.ID) (container.Container, bool) { return c, true })
		if len(t.Classes) > 0 {
			out.Traffic = &api.SelfTraffic{Taken: t.Taken, Classes: t.Classes}
		}
	}
}

// deviceBytes is the metric that Export adds.
const deviceBytes = "traffic_device_bytes_total"

// Export implements feature.Exporter: the bytes on the devices of all containers, with or without
// policy. Among containers that share a network, the first stands for all.
func (f *Traffic) Export() feature.Snapshot {
	s := feature.Snapshot{Taken: f.cfg.Now(), Help: map[string]string{
		deviceBytes: "Bytes that a device of the container has sent (egress) or received (ingress), as the kernel counts at it, the overlay's fast path included.",
	}}
	if f.cfg.Containers == nil {
		return s
	}
	f.spaces(func(c container.Container, ns *netdev.NS) {
		for device, n := range f.bytesOf(c, ns) {
			add := func(way Direction, bytes uint64) {
				s.Samples = append(s.Samples, feature.Sample{
					Container: c.ID, Name: deviceBytes, Device: device, Value: float64(bytes),
					Labels: []feature.Label{{Name: "direction", Value: string(way)}},
				})
			}
			add(Egress, n.TxBytes)
			add(Ingress, n.RxBytes)
		}
	})
	return s
}

// spaces calls fn once for each network namespace of containers, with the first container there.
func (f *Traffic) spaces(fn func(container.Container, *netdev.NS)) {
	seen := make(map[uint64]bool)
	for _, c := range f.cfg.Containers.Running() {
		if c.HostNetwork || c.NetNS == 0 || seen[c.NetNS] {
			continue
		}
		seen[c.NetNS] = true
		ns, err := f.find.Open(filepath.Join(f.cfg.Roots.Proc, strconv.Itoa(c.PID), "ns", "net"), c.NetNS)
		if err != nil {
			continue // the container has ended
		}
		fn(c, ns)
		ns.Close()
	}
}

// bytesOf returns the counters of a container's devices, by the name of the host end, or by the kind of
// a device without one, because a container may rename its devices at will. It reads the container's
// ends, because packets handed over by bpf_redirect_peer bypass the host ends.
func (f *Traffic) bytesOf(c container.Container, ns *netdev.NS) map[string]netdev.Counters {
	all, err := ns.AllCounters(mostOwn)
	if err != nil && !errors.Is(err, netdev.ErrMany) {
		return nil
	}
	of := make(map[string]netdev.Counters)
	for _, e := range c.Ends(f.cfg.Roots.Proc) {
		// A device leads to the host if it has a host end where no container can have made it, or is on top
		// of a device outside. A container may have made any other device.
		if !(e.Host && e.Trusted || unseen(e.Inside.Kind) && e.Inside.Apart) {
			continue
		}
		n, ok := all[e.Inside.Index]
		if !ok {
			continue // the device is gone
		}
		name := e.Inside.Kind
		if e.Host {
			name = e.Name
		}
		sum := of[name]
		sum.TxBytes, sum.RxBytes = sum.TxBytes+n.TxBytes, sum.RxBytes+n.RxBytes
		of[name] = sum
	}
	return of
}
