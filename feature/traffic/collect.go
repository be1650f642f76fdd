package traffic

import (
	"time"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/container/slot"
	"github.com/fairlead-project/fairlead/feature"
	"github.com/fairlead-project/fairlead/feature/traffic/model"
	"github.com/fairlead-project/fairlead/kernel/qdisc"
)

// Snapshot implements feature.Feature. Its samples, for each container that is
// shaped (of those that share a network, the one with the lowest id) and each
// uplink; container 0 is the host and all that has no policy:
//
//	traffic_sent_bytes_total, traffic_sent_packets_total
//	traffic_borrowed_packets_total   those of them beyond what was guaranteed
//	traffic_dropped_packets_total    for which its queue had no room
//	traffic_backlog_bytes            that wait
//	traffic_guaranteed_bytes_per_second, traffic_ceil_bytes_per_second
//
// The counters begin anew when the class does: with the policy.
func (f *Traffic) Snapshot() feature.Snapshot {
	f.mu.Lock()
	defer f.mu.Unlock()
	s := feature.Snapshot{Taken: time.Now()}
	if f.programs == nil || len(f.tenants) == 0 {
		return s
	}
	plans, err := f.plan()
	if err != nil {
		return s
	}
	owner := map[slot.Slot]container.ID{slot.Nobody: 0}
	for _, t := range f.tenants {
		for id := range t.members {
			if o, ok := owner[t.slot]; !ok || id < o {
				owner[t.slot] = id
			}
		}
	}
	for index, u := range f.uplinks {
		if u.claimed && !u.lost {
			s.Samples = f.collect(s.Samples, index, plans[index], owner)
		}
	}
	return s
}

func (f *Traffic) collect(to []feature.Sample, index int, p model.Plan, owner map[slot.Slot]container.ID) []feature.Sample {
	d, err := qdisc.Open(f.host, index)
	if err != nil {
		return to
	}
	defer d.Close()
	stats, err := d.Stats(qdisc.KindHTB)
	if err != nil {
		return to // the device has gone, or someone else's qdisc is there
	}
	for _, c := range p.Classes {
		minor := uint16(c.Slot)
		if c.Slot == slot.Nobody {
			minor = qdisc.MinorDefault
		}
		id, known := owner[c.Slot]
		st, there := stats[minor]
		if !known || !there {
			continue
		}
		for name, v := range map[string]float64{
			"traffic_sent_bytes_total":            float64(st.Bytes),
			"traffic_sent_packets_total":          float64(st.Packets),
			"traffic_borrowed_packets_total":      float64(st.Borrowed),
			"traffic_dropped_packets_total":       float64(st.Drops),
			"traffic_backlog_bytes":               float64(st.Backlog),
			"traffic_guaranteed_bytes_per_second": float64(c.Guaranteed) / 8,
			"traffic_ceil_bytes_per_second":       float64(c.Ceil) / 8,
		} {
			to = append(to, feature.Sample{Container: id, Name: name, Device: p.Link.Name, Value: v})
		}
	}
	return to
}
