package api

import (
	"cmp"
	"context"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"time"
)

// MaxOverlayFlows is the most flows in one answer.
const MaxOverlayFlows = 1000

// OverlayAsk is the Body of an [Ask] for the report.
type OverlayAsk struct {
	Flows int // the most flows in the answer
}

// OverlaySwitch is the Body of an [Ask] to kill or to revive a network. The feature answers with
// the network's new state. Killing a killed network is no error.
type OverlaySwitch struct {
	Network string // as in the report
	Kill    bool
	By      string // the user, for people
}

// Overlay returns the overlay networks of the host and the state of their fast path: for all
// containers if ref is "", otherwise for one, named as for Explain. It lists up to flows flows, at
// most [MaxOverlayFlows]. [Overlay.After] turns two readings into a rate.
func (c *Client) Overlay(ctx context.Context, ref string, flows int) (out Overlay, err error) {
	query := url.Values{}
	if flows > 0 {
		query.Set("flows", strconv.Itoa(flows))
	}
	return out, c.ask(ctx, "overlay", ref, query, &out)
}

// KillOverlay stops the fast path of a network, until ReviveOverlay.
func (c *Client) KillOverlay(ctx context.Context, network string) (out OverlayNetwork, err error) {
	return out, c.do(ctx, http.MethodPost, "/v1/overlay/"+url.PathEscape(network)+"/kill", nil, &out)
}

// ReviveOverlay reverses KillOverlay.
func (c *Client) ReviveOverlay(ctx context.Context, network string) (out OverlayNetwork, err error) {
	return out, c.do(ctx, http.MethodPost, "/v1/overlay/"+url.PathEscape(network)+"/revive", nil, &out)
}

// The states of an overlay network.
const (
	OverlayOff       = "off"        // policy asks for no container on it
	OverlayOn        = "on"         // flows of some containers take the fast path
	OverlayLeftAlone = "left alone" // it cannot be accelerated, whatever policy says
	OverlayKilled    = "killed"     // by hand, until it is revived
)

// The paths of a container's packets.
const (
	WaySlow = "slow" // the kernel's ordinary path, in either direction
	WayFast = "fast" // from the container straight to the uplink
	WayPeer = "peer" // from the uplink straight into the container
	WayEnd  = "end"  // from the uplink to the host's end of the container's veth
)

// The reasons why a packet takes the slow path.
const (
	SlowNoEntry        = "no_entry"
	SlowLease          = "lease"
	SlowOtherDirection = "other_direction"
	SlowGeneration     = "generation"
	SlowKilled         = "killed"
	SlowOptions        = "options"
	SlowFragment       = "fragment"
	SlowTTL            = "ttl"
	SlowMTU            = "mtu"
	SlowProtocol       = "protocol"
	SlowTCPFlags       = "tcp_flags"
	SlowHeader         = "header"
	SlowSource         = "source"
	SlowChecksum       = "checksum"
	SlowWay            = "way"
	SlowCut            = "cut"
	SlowConntrack      = "conntrack"
	SlowRoom           = "room"
)

// SlowText returns a short text for people about a reason for the slow path; "" if the reason is
// unknown.
func SlowText(reason string) string { return slowTexts()[reason] }

func slowTexts() map[string]string {
	return map[string]string{
		SlowNoEntry:        "nothing is learnt of its flow yet",
		SlowLease:          "the lease has run out; this packet renews it",
		SlowOtherDirection: "no packet of the other direction was seen",
		SlowGeneration:     "what was learnt is older than the last change",
		SlowKilled:         "kill switch, or no heartbeat of the agent",
		SlowOptions:        "IP options or extension headers",
		SlowFragment:       "a fragment",
		SlowTTL:            "TTL or hop limit is too small",
		SlowMTU:            "larger than the MTU on its way",
		SlowProtocol:       "neither TCP nor UDP, or to a group",
		SlowTCPFlags:       "SYN, FIN or RST of TCP",
		SlowHeader:         "headers differ from those that were learnt",
		SlowSource:         "the node differs from the one that was learnt",
		SlowChecksum:       "its checksum has to be computed or checked",
		SlowWay:            "the container has no fast way in or out",
		SlowCut:            "shorter than its headers say",
		SlowConntrack:      "conntrack has to be told of its flow first",
		SlowRoom:           "no room for the outer headers",
	}
}

// Overlay describes the overlay networks of a host and their fast path. Its counters are totals
// since each network or container was first accelerated, or over the time from Since to Taken.
type Overlay struct {
	Since      time.Time          `json:"since,omitzero" doc:"when the previous reading was taken, if the counters are the difference of two readings; absent if they are totals"`
	Taken      time.Time          `json:"taken" doc:"when the counters were read"`
	Networks   []OverlayNetwork   `json:"networks" doc:"the overlay networks that this host is part of, by name, also those that are left alone"`
	Containers []OverlayContainer `json:"containers" doc:"the containers that are on an overlay network, by name; containers that share a network namespace have one element, under the lowest id"`
	Flows      []OverlayFlow      `json:"flows,omitempty" doc:"flows, those with the latest packets first; absent unless they were asked for"`
	MoreFlows  uint64             `json:"more_flows,omitempty" doc:"flows that are not listed, as there were more than were asked for"`
}

// OverlayNetwork is a tunnel device and the containers behind it.
type OverlayNetwork struct {
	Network     string   `json:"network" doc:"what the network is called here: the name of its tunnel device, with @ and the inode of the device's network namespace behind it where that is not the agent's"`
	Device      string   `json:"device" doc:"name of the tunnel device"`
	NetNS       uint64   `json:"netns,omitempty" doc:"inode of the network namespace of the device; absent for the agent's"`
	Kind        string   `json:"kind" doc:"kind of the tunnel device: vxlan, geneve, or of one that is left alone ipip, wireguard, openvswitch and others, as in ip-link(8)"`
	VNI         uint64   `json:"vni,omitempty" doc:"network identifier; absent if there is none"`
	Port        int      `json:"port,omitempty" doc:"UDP port of the tunnel; absent if there is none"`
	Form        string   `json:"form,omitempty" doc:"routed (the tunnel device has routes) or bridged (it is a port of a bridge); absent if unknown"`
	Bridge      string   `json:"bridge,omitempty" doc:"name of that bridge"`
	Uplinks     []string `json:"uplinks,omitempty" doc:"devices by which the tunnel's packets leave and arrive"`
	State       string   `json:"state" doc:"off (policy asks for no container on it), on, left alone (it cannot be accelerated), or killed (by hand, until it is revived)"`
	Reason      string   `json:"reason,omitempty" doc:"why it is left alone or killed, as a word for programs"`
	Why         string   `json:"why,omitempty" doc:"the same as a sentence for people"`
	Containers  int      `json:"containers" doc:"containers of this host that are on the network"`
	Accelerated int      `json:"accelerated" doc:"those of them with a fast path in at least one direction"`

	Tables     []OverlayTable    `json:"tables,omitempty" doc:"what is learnt: flow, remote (containers of other nodes) and local (containers of this one)"`
	Generation uint64            `json:"generation" doc:"number of the generation; what was learnt in an earlier one does not count"`
	Raised     time.Time         `json:"raised,omitzero" doc:"when the generation was last raised; absent if never"`
	RaisedBy   string            `json:"raised_by,omitempty" doc:"the change that it was last raised for"`
	Evictions  []OverlayEviction `json:"evictions,omitempty" doc:"how often all that was learnt was forgotten, by cause"`
	Egress     OverlayTraffic    `json:"egress" doc:"packets from the containers"`
	Ingress    OverlayTraffic    `json:"ingress" doc:"packets to the containers"`
}

// OverlayTable is the fill level of one table of a network.
type OverlayTable struct {
	Kind     string `json:"kind" doc:"flow, remote or local"`
	Entries  uint64 `json:"entries" doc:"entries now"`
	Capacity uint64 `json:"capacity" doc:"the most entries, of all networks together; a new one then takes the place of the one that was used least recently"`
}

// OverlayEviction counts how often everything learnt about a network was forgotten.
type OverlayEviction struct {
	Cause string `json:"cause" doc:"the change that it was for, as a word"`
	Times uint64 `json:"times" doc:"how often"`
}

// OverlayPackets counts packets by path. A super-packet counts as one.
type OverlayPackets struct {
	Fast      uint64 `json:"fast_packets" doc:"packets that took the fast path"`
	FastBytes uint64 `json:"fast_bytes" doc:"their bytes, without the outer headers"`
	Slow      uint64 `json:"slow_packets" doc:"packets that took the kernel's own path"`
	SlowBytes uint64 `json:"slow_bytes" doc:"their bytes, without the outer headers"`
}

// HitRate is the fraction of the packets that took the fast path. ok is false without packets.
func (p OverlayPackets) HitRate() (rate float64, ok bool) {
	if p.Fast+p.Slow == 0 {
		return 0, false
	}
	return float64(p.Fast) / float64(p.Fast+p.Slow), true
}

// Add returns the sum of both.
func (p OverlayPackets) Add(o OverlayPackets) OverlayPackets {
	return OverlayPackets{p.Fast + o.Fast, p.FastBytes + o.FastBytes, p.Slow + o.Slow, p.SlowBytes + o.SlowBytes}
}

// OverlayTraffic is one direction of a network.
type OverlayTraffic struct {
	OverlayPackets
	Reasons []OverlayReason `json:"slow_reasons,omitempty" doc:"the packets of the slow path by reason, most first"`
	Saved   float64         `json:"saved_nanoseconds,omitempty" doc:"time from the host end to the uplink that the fast path saves for a packet that is sent, in the mean, as timed on this host; absent if unknown"`
}

// OverlayReason counts packets of the slow path.
type OverlayReason struct {
	Reason  string `json:"reason" doc:"no_entry, lease, other_direction, generation, killed, options, fragment, ttl, mtu, protocol, tcp_flags, header, source, checksum, way, cut, conntrack or room"`
	Packets uint64 `json:"packets" doc:"packets that took the slow path for it"`
}

// OverlayContainer is a container on an overlay network.
type OverlayContainer struct {
	Container ID           `json:"container,string" doc:"id of the container"`
	Name      string       `json:"name,omitempty" doc:"name of the container; absent if unknown"`
	Ends      []OverlayEnd `json:"ends" doc:"one element for each of its devices that is on an overlay network"`
}

// OverlayEnd is a container's device on an overlay network.
type OverlayEnd struct {
	Network string     `json:"network" doc:"the network, as in networks"`
	Device  string     `json:"device" doc:"name of the container's device"`
	Egress  OverlayWay `json:"egress" doc:"packets from the container"`
	Ingress OverlayWay `json:"ingress" doc:"packets to the container"`
}

// OverlayWay is the path of packets between a container's device and the uplink.
type OverlayWay struct {
	Way    string `json:"way" doc:"slow; on egress fast; on ingress peer (straight into the container) or end (to the host's end of its veth, with the queue and the programs there)"`
	Reason string `json:"reason,omitempty" doc:"why the way is slow or end, as a word for programs"`
	Why    string `json:"why,omitempty" doc:"the same as a sentence for people"`
	OverlayPackets
}

// OverlayFlow is one flow of a container.
type OverlayFlow struct {
	Network    string  `json:"network" doc:"the network, as in networks"`
	Container  ID      `json:"container,omitempty,string" doc:"id of the container; absent if it is no longer known"`
	Name       string  `json:"name,omitempty" doc:"name of the container; absent if unknown"`
	Protocol   string  `json:"protocol" doc:"tcp or udp"`
	Local      string  `json:"local" doc:"address of the container"`
	LocalPort  int     `json:"local_port" doc:"port of the container"`
	Remote     string  `json:"remote" doc:"address of the other side"`
	RemotePort int     `json:"remote_port" doc:"port of the other side"`
	State      string  `json:"state" doc:"fast, or the reason why the next packet takes the slow path"`
	Age        float64 `json:"lease_age_seconds" doc:"for how long nothing has renewed the lease of the flow"`
}

// After returns the difference between an earlier reading and this one, over the time from
// before.Taken to o.Taken. Counters that began in between are kept as they are.
func (o Overlay) After(before Overlay) Overlay {
	o.Since = before.Taken
	o.Networks = since(o.Networks, before.Networks, func(n OverlayNetwork) string { return n.Network }, func(n, was OverlayNetwork) OverlayNetwork {
		n.Egress, n.Ingress = n.Egress.after(was.Egress), n.Ingress.after(was.Ingress)
		n.Evictions = since(n.Evictions, was.Evictions, func(e OverlayEviction) string { return e.Cause }, func(e, was OverlayEviction) OverlayEviction {
			e.Times = less(e.Times, was.Times)
			return e
		})
		n.Evictions = slices.DeleteFunc(n.Evictions, func(e OverlayEviction) bool { return e.Times == 0 })
		return n
	})
	type end struct{ network, device string }
	o.Containers = since(o.Containers, before.Containers, func(c OverlayContainer) ID { return c.Container }, func(c, was OverlayContainer) OverlayContainer {
		c.Ends = since(c.Ends, was.Ends, func(e OverlayEnd) end { return end{e.Network, e.Device} }, func(e, was OverlayEnd) OverlayEnd {
			e.Egress.OverlayPackets = e.Egress.OverlayPackets.after(was.Egress.OverlayPackets)
			e.Ingress.OverlayPackets = e.Ingress.OverlayPackets.after(was.Ingress.OverlayPackets)
			return e
		})
		return c
	})
	return o
}

func (t OverlayTraffic) after(was OverlayTraffic) OverlayTraffic {
	t.OverlayPackets = t.OverlayPackets.after(was.OverlayPackets)
	t.Reasons = since(t.Reasons, was.Reasons, func(r OverlayReason) string { return r.Reason }, func(r, was OverlayReason) OverlayReason {
		r.Packets = less(r.Packets, was.Packets)
		return r
	})
	t.Reasons = slices.DeleteFunc(t.Reasons, func(r OverlayReason) bool { return r.Packets == 0 })
	slices.SortStableFunc(t.Reasons, func(a, b OverlayReason) int { return cmp.Compare(b.Packets, a.Packets) })
	return t
}

func (p OverlayPackets) after(was OverlayPackets) OverlayPackets {
	return OverlayPackets{less(p.Fast, was.Fast), less(p.FastBytes, was.FastBytes), less(p.Slow, was.Slow), less(p.SlowBytes, was.SlowBytes)}
}
