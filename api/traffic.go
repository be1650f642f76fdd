package api

import (
	"cmp"
	"context"
	"slices"
	"time"
)

// Traffic returns the bandwidth that containers are due and get: for all if ref is "", else for
// one, named as for Explain. [Traffic.After] turns two readings into a rate. If over is not 0 (at
// most [MaxOver]), the agent measures for that time how long packets wait, before it answers.
func (c *Client) Traffic(ctx context.Context, ref string, over time.Duration) (out Traffic, err error) {
	return out, c.report(ctx, "traffic", ref, over, &out)
}

// Traffic is the bandwidth that each container is due at the host's uplinks, and the bandwidth that
// it gets.
type Traffic struct {
	Since   time.Time      `json:"since,omitzero" doc:"when the previous reading was taken, if the counters are the difference of two readings; absent if they are totals since each class was made"`
	Taken   time.Time      `json:"taken" doc:"when the counters were read"`
	Classes []TrafficClass `json:"classes" doc:"one element for each uplink, direction and shaped container, and one for all the others together"`

	Contended []TrafficContended `json:"contended,omitempty" doc:"containers that have lost bandwidth to others at uplinks that no policy divides; of containers that share a network, the first stands for all"`

	Sharer string `json:"sharer,omitempty" doc:"of one container: the one that shares its network, whose policy the classes have; absent where it has policy itself"`

	Measured *TrafficMeasured `json:"measured,omitempty" doc:"how delays were measured; absent where no time was given over which to"`
}

// TrafficMeasured is the time over which the delays of packets were measured.
type TrafficMeasured struct {
	Seconds float64 `json:"seconds" doc:"for so long before taken"`
	Missed  uint64  `json:"missed_packets" doc:"packets that were not measured, as too many waited, or left at once"`
	Error   string  `json:"error,omitempty" doc:"why no delay could be measured"`
}

// TrafficContended is what a container has lost at one uplink that no policy divides, since the
// agent first saw it. docs/slowed.md defines the loss.
type TrafficContended struct {
	Container   ID      `json:"container,string" doc:"id of the container"`
	Name        string  `json:"name,omitempty" doc:"name of the container"`
	Uplink      string  `json:"uplink" doc:"device of the host"`
	Lost        float64 `json:"lost_seconds" doc:"time that it lost, in seconds: a second at a quarter of the rate that it would have alone is three quarters of a second"`
	Culprit     ID      `json:"culprit,omitempty,string" doc:"id of the other container that sent the most there when that was last seen; absent if none is known"`
	CulpritName string  `json:"culprit_name,omitempty" doc:"name of the culprit"`
}

// TrafficDelay is how long packets waited in the qdisc, from enqueue to dequeue for the device.
type TrafficDelay struct {
	Packets uint64  `json:"packets" doc:"packets that were sent; enqueued and sent within the time, if one was given, else since delays are measured for the class; a super-packet is one"`
	P50     float64 `json:"p50_seconds" doc:"median wait; as all quantiles, exact to 1/16 of its value"`
	P99     float64 `json:"p99_seconds" doc:"99 % of them did not wait longer"`
	P999    float64 `json:"p999_seconds" doc:"99.9 % of them did not wait longer"`
}

// TrafficClass is one container at one uplink. Containers that share a network share a class, which
// is listed under the lowest of their ids.
type TrafficClass struct {
	Container  ID            `json:"container,omitempty,string" doc:"id of the container; absent for the host and all containers without policy"`
	Name       string        `json:"name,omitempty" doc:"name of the container; absent if unknown"`
	Uplink     string        `json:"uplink" doc:"device of the host: an uplink, or the host's end of a veth, where the ceil of what a container receives is held"`
	Direction  string        `json:"direction" doc:"egress (from the container) or ingress"`
	Link       uint64        `json:"link_bits_per_second" doc:"rate of the uplink; 0 if unknown"`
	Asked      *TrafficAsked `json:"asked,omitempty" doc:"what policy asks for; absent for the others"`
	Guaranteed uint64        `json:"guaranteed_bits_per_second" doc:"what the class gets now even if all others want everything; 0 if the rate of the uplink is unknown"`
	Ceil       uint64        `json:"ceil_bits_per_second" doc:"the most that the class gets; 0: no bound on an uplink whose rate is unknown"`
	Level      int           `json:"level" doc:"order in which idle bandwidth is taken, 0 to 7, the smallest first"`
	Split      int           `json:"split_bytes,omitempty" doc:"packets that are longer are cut into frames, for the latency of another container; absent where none are"`

	Achieved   float64 `json:"achieved_bits_per_second,omitempty" doc:"what was sent, over the time from since to taken; absent in totals"`
	Bytes      uint64  `json:"sent_bytes" doc:"bytes sent"`
	Packets    uint64  `json:"sent_packets" doc:"packets sent; a super-packet is one"`
	Borrowed   uint64  `json:"borrowed_packets" doc:"those of them beyond what was guaranteed"`
	Drops      uint64  `json:"dropped_packets" doc:"packets for which the queue of the class had no room"`
	Overlimits uint64  `json:"overlimits" doc:"how often the class reached its ceil"`

	BacklogBytes   uint64  `json:"backlog_bytes" doc:"bytes that wait now"`
	BacklogPackets uint64  `json:"backlog_packets" doc:"packets that wait now"`
	Drain          float64 `json:"drain_estimate_seconds" doc:"estimated time until the backlog is sent: backlog divided by the guaranteed rate, or by the achieved rate if that is larger"`

	Delay *TrafficDelay `json:"delay,omitempty" doc:"how long packets of the class waited; absent if that was not measured"`
}

// TrafficAsked is what policy sets for one direction; fields that it does not set are absent.
type TrafficAsked struct {
	Rate     uint64  `json:"rate_bits_per_second,omitempty" doc:"guaranteed rate"`
	Ceil     uint64  `json:"ceil_bits_per_second,omitempty" doc:"upper bound"`
	Weight   uint64  `json:"weight,omitempty" doc:"share of what is not guaranteed"`
	Priority *int    `json:"priority,omitempty" doc:"order for idle bandwidth, the smaller first"`
	Latency  float64 `json:"latency_seconds,omitempty" doc:"bound on the queueing delay"`
	Split    bool    `json:"latency_split,omitempty" doc:"packets of others may be cut into frames for that"`
}

// SelfTraffic is what a container may know about its bandwidth: its own classes.
type SelfTraffic struct {
	Taken   time.Time      `json:"taken" doc:"when the counters were read"`
	Classes []TrafficClass `json:"classes" doc:"one element for each uplink and direction"`
}

// After returns the difference between an earlier reading and this one, over the time from
// before.Taken to t.Taken. Counters of a class that was made in between are kept as they are.
func (t Traffic) After(before Traffic) Traffic {
	type key struct {
		container         ID
		uplink, direction string
	}
	t.Since = before.Taken
	span := t.Taken.Sub(before.Taken).Seconds()
	t.Classes = since(t.Classes, before.Classes, func(c TrafficClass) key { return key{c.Container, c.Uplink, c.Direction} }, func(c, was TrafficClass) TrafficClass {
		if c.Bytes < was.Bytes || c.Packets < was.Packets {
			was = TrafficClass{} // another class of the same container
		}
		c.Bytes, c.Packets, c.Borrowed = c.Bytes-was.Bytes, c.Packets-was.Packets, less(c.Borrowed, was.Borrowed)
		c.Drops, c.Overlimits = less(c.Drops, was.Drops), less(c.Overlimits, was.Overlimits)
		if span > 0 {
			c.Achieved = 8 * float64(c.Bytes) / span
		}
		c.Drain = c.drain()
		return c
	})
	t.Contended = since(t.Contended, before.Contended, func(c TrafficContended) key { return key{container: c.Container, uplink: c.Uplink} }, func(c, was TrafficContended) TrafficContended {
		c.Lost = less(c.Lost, was.Lost)
		return c
	})
	t.Contended = slices.DeleteFunc(t.Contended, func(c TrafficContended) bool { return c.Lost == 0 })
	return t
}

// drain computes Drain, an estimate.
func (c TrafficClass) drain() float64 {
	if c.BacklogBytes == 0 {
		return 0
	}
	return 8 * float64(c.BacklogBytes) / max(float64(c.Guaranteed), c.Achieved, 1)
}

// SortTraffic sorts classes by uplink and direction, then by name, with the class of all others
// last. It also fills in the estimates.
func SortTraffic(classes []TrafficClass) {
	slices.SortFunc(classes, func(a, b TrafficClass) int {
		rest := func(c TrafficClass) int {
			if c.Container == 0 {
				return 1
			}
			return 0
		}
		return cmp.Or(cmp.Compare(a.Uplink, b.Uplink), cmp.Compare(a.Direction, b.Direction), rest(a)-rest(b), cmp.Compare(a.Name, b.Name), cmp.Compare(a.Container, b.Container))
	})
	for i := range classes {
		classes[i].Drain = classes[i].drain()
	}
}

// slowed returns a function that fills in how much bandwidth a container lost since an earlier
// report. Either report may be nil.
func (t *Traffic) slowed(before *Traffic) func(*OverviewRow) losses {
	if t == nil || before == nil {
		return func(*OverviewRow) losses { return nil }
	}
	type place struct {
		container         ID
		uplink, direction string
	}
	waited := make(map[place]bool) // in the earlier report as well
	for _, c := range before.Classes {
		waited[place{c.Container, c.Uplink, c.Direction}] = c.BacklogBytes > 0
	}
	classes := make(map[ID][]TrafficClass)
	carried := make(map[place]float64)    // of all classes, by uplink and direction
	worst := make(map[place]TrafficClass) // the class furthest beyond its guarantee, by uplink and direction
	now := t.After(*before)
	span := now.Taken.Sub(now.Since).Seconds()
	contended := make(map[ID][]TrafficContended)
	for _, c := range now.Contended {
		contended[c.Container] = append(contended[c.Container], c)
	}
	for _, c := range now.Classes {
		classes[c.Container] = append(classes[c.Container], c)
		at := place{0, c.Uplink, c.Direction}
		carried[at] += c.Achieved
		if w, known := worst[at]; !known || c.beyond() > w.beyond() {
			worst[at] = c
		}
	}
	return func(row *OverviewRow) (l losses) {
		if len(classes[row.Container]) > 0 {
			row.Egress.Achieved, row.Ingress.Achieved = 0, 0 // the uplink is divided, and counts frames
		}
		for _, c := range classes[row.Container] {
			rate := &row.Egress
			if c.Direction == "ingress" {
				rate = &row.Ingress
			}
			rate.Achieved += c.Achieved
			rate.Due += c.Guaranteed
			if c.Asked != nil && c.Asked.Ceil > 0 {
				rate.Ceil = c.Asked.Ceil
			}
			// A queue that is empty at either end may have been empty for most of the time.
			queued := c.BacklogBytes > 0 && waited[place{c.Container, c.Uplink, c.Direction}] || c.Drops > 0
			// Without the others it would have had no more than all have together.
			at := place{0, c.Uplink, c.Direction}
			due := min(float64(c.Guaranteed), carried[at])
			if missing := due - c.Achieved; queued && missing > 0 {
				x := Slowdown{Cause: SlowedByUplink, Slowed: missing / due}
				if w := worst[at]; w.beyond() > 0 {
					x.Culprit, x.Name = w.Container, w.Name
				}
				l = append(l, x)
			}
		}
		for _, c := range contended[row.Container] {
			if span > 0 {
				l = append(l, Slowdown{SlowedByUplink, min(c.Lost/span, 1), c.Culprit, c.CulpritName})
			}
		}
		return l
	}
}

// beyond returns by how much a class exceeds its guarantee, in bit/s; negative: it falls short.
func (c TrafficClass) beyond() float64 { return c.Achieved - float64(c.Guaranteed) }
