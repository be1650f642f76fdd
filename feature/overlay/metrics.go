package overlay

import (
	"slices"

	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/feature"
)

// help describes the samples. The device of a sample is the name of the network.
var help = map[string]string{
	"overlay_network":                 "1 for the state of an overlay network of this host: off, on, left alone or killed.",
	"overlay_containers":              "Containers of this host on the network.",
	"overlay_accelerated_containers":  "Containers on the network with a fast path in at least one direction.",
	"overlay_packets_total":           "Packets of the network by the path that they took; a super-packet is one.",
	"overlay_bytes_total":             "Bytes of these packets, without the outer headers.",
	"overlay_slow_packets_total":      "Packets of the network that took the slow path, by the reason.",
	"overlay_entries":                 "Entries of the network's tables: flow, remote and local.",
	"overlay_capacity_entries":        "Most entries of these tables, of all networks together.",
	"overlay_evictions_total":         "How often all that was learnt of the network was forgotten, by the change that it was for.",
	"overlay_generation":              "Number of the network's generation; a change that makes all entries invalid raises it.",
	"overlay_saved_seconds":           "Mean time from the host end to the uplink that the fast path saves for a packet that is sent, as measured here.",
	"overlay_container_packets_total": "Packets of the container on overlay networks by the path that they took.",
	"overlay_container_bytes_total":   "Bytes of these packets, without the outer headers.",
}

// snapshot converts a report with counters since the start to samples.
func snapshot(o api.Overlay) feature.Snapshot {
	s := feature.Snapshot{Taken: o.Taken, Help: help}
	add := func(c container.ID, device, name string, value float64, labels ...feature.Label) {
		s.Samples = append(s.Samples, feature.Sample{Container: c, Device: device, Name: name, Value: value, Labels: labels})
	}
	label := func(name, value string) feature.Label { return feature.Label{Name: name, Value: value} }
	paths := func(c container.ID, device, before, direction string, p api.OverlayPackets) {
		for _, x := range []struct {
			path           string
			packets, bytes uint64
		}{{"fast", p.Fast, p.FastBytes}, {"slow", p.Slow, p.SlowBytes}} {
			add(c, device, before+"packets_total", float64(x.packets), label("direction", direction), label("path", x.path))
			add(c, device, before+"bytes_total", float64(x.bytes), label("direction", direction), label("path", x.path))
		}
	}
	for _, n := range o.Networks {
		add(0, n.Network, "overlay_network", 1, label("kind", n.Kind), label("state", n.State))
		add(0, n.Network, "overlay_containers", float64(n.Containers))
		if n.State == api.OverlayLeftAlone {
			continue
		}
		add(0, n.Network, "overlay_accelerated_containers", float64(n.Accelerated))
		add(0, n.Network, "overlay_generation", float64(n.Generation))
		for _, t := range n.Tables {
			add(0, n.Network, "overlay_entries", float64(t.Entries), label("kind", t.Kind))
			add(0, n.Network, "overlay_capacity_entries", float64(t.Capacity), label("kind", t.Kind))
		}
		for _, e := range n.Evictions {
			add(0, n.Network, "overlay_evictions_total", float64(e.Times), label("cause", e.Cause))
		}
		for _, d := range []struct {
			name string
			api.OverlayTraffic
		}{{"egress", n.Egress}, {"ingress", n.Ingress}} {
			paths(0, n.Network, "overlay_", d.name, d.OverlayPackets)
			for _, r := range d.Reasons {
				add(0, n.Network, "overlay_slow_packets_total", float64(r.Packets), label("direction", d.name), label("reason", r.Reason))
			}
			if d.Saved > 0 {
				add(0, n.Network, "overlay_saved_seconds", d.Saved/1e9, label("direction", d.name))
			}
		}
	}
	for _, c := range o.Containers {
		for _, e := range byNetwork(c.Ends) { // a container chooses the names of its devices
			paths(container.ID(c.Container), e.Network, "overlay_container_", "egress", e.Egress.OverlayPackets)
			paths(container.ID(c.Container), e.Network, "overlay_container_", "ingress", e.Ingress.OverlayPackets)
		}
	}
	return s
}

// byNetwork sums the packets of ends on the same network.
func byNetwork(ends []api.OverlayEnd) (sums []api.OverlayEnd) {
	for _, e := range ends {
		i := slices.IndexFunc(sums, func(s api.OverlayEnd) bool { return s.Network == e.Network })
		if i < 0 {
			sums = append(sums, e)
			continue
		}
		sums[i].Egress.OverlayPackets = sums[i].Egress.Add(e.Egress.OverlayPackets)
		sums[i].Ingress.OverlayPackets = sums[i].Ingress.Add(e.Ingress.OverlayPackets)
	}
	return sums
}
