package latency

import (
	"slices"

	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/container"
)

// Direction is the direction of packets as the container sees it.
type Direction int

// Egress packets leave the container, Ingress packets arrive there.
const (
	Egress Direction = iota
	Ingress
	directions
)

func (d Direction) String() string { return [...]string{"egress", "ingress"}[d] }

// Protocol is a class of packets.
type Protocol int

// The protocols with counters of their own. ICMP includes ICMPv6.
const (
	TCP Protocol = iota
	UDP
	ICMP
	Other
	protocols
)

func (p Protocol) String() string { return [...]string{"tcp", "udp", "icmp", "other"}[p] }

// Stage is a part of a packet's path through the host, or a sum of parts. The order is that of
// maps.bpf.h.
type Stage int

// First is the qdisc of the container's device on egress, and the time before the stack (GRO, RPS)
// on ingress. Added, Stack and Local are sums.
const (
	First Stage = iota
	Deliver
	Forward
	QDisc
	Socket
	Added
	Stack
	Local
	stages
)

// Name returns the name of a stage in one direction.
func (s Stage) Name(d Direction) string {
	if s == First {
		return [...]string{"device", "gro"}[d]
	}
	return [...]string{"", "deliver", "forward", "qdisc", "socket", "added", "stack", "local"}[s]
}

// way returns the stages of a direction in the order in which a packet passes them.
func way(d Direction) []Stage {
	if d == Egress {
		return []Stage{First, Deliver, Forward, QDisc}
	}
	return []Stage{First, Forward, QDisc, Deliver, Socket}
}

// gaps returns the stages that cannot be measured for a container, with the reasons. If the host
// end of a veth is unknown, the preceding stage includes the time of its stages.
func gaps(c container.Container, d Direction, uplinks bool) (out []api.LatencyGap) {
	missing := func(why string, list ...Stage) {
		g := api.LatencyGap{Why: why}
		for _, s := range list {
			g.Stages = append(g.Stages, s.Name(d))
		}
		out = append(out, g)
	}
	is := func(of func(container.Interface) bool) bool { return slices.ContainsFunc(c.Interfaces, of) }
	onUplink := is(func(i container.Interface) bool { return i.Kind == "macvlan" || i.Kind == "ipvlan" })
	if !uplinks {
		missing("no device of this host is an uplink: only packets between its containers are measured", append(way(d), Added, Stack)...)
		return out
	}
	switch {
	case c.HostNetwork && d == Egress:
		missing("the container is in the host's network, and has no device of its own", First, Deliver, Forward, Added, Local)
	case c.HostNetwork:
		missing("the container is in the host's network, and has no device of its own", Forward, QDisc, Deliver, Added, Local)
	case onUplink && d == Egress:
		missing("a macvlan or ipvlan device has no end on the host", Deliver)
	case onUplink:
		missing("the kernel has no event where a macvlan or ipvlan device receives", Forward, QDisc, Deliver, Added)
	case is(func(i container.Interface) bool { return i.Kind == "veth" && i.Host.Index == 0 }):
		if d == Egress {
			missing("the host's end of its veth was not found", Deliver)
		} else {
			missing("the host's end of its veth was not found", QDisc, Deliver)
		}
	}
	if d == Ingress && c.Cgroup.V2 == "" {
		missing("its cgroup is not known, and so not its sockets", Socket, Stack)
	}
	return out
}
