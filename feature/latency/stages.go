package latency

import (
	"slices"

	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/hist"
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

// Protocols with separate counters. ICMP includes ICMPv6.
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

// gaps returns the stages that cannot be measured for a container, with the reasons. If the host end of
// a veth is unknown, the preceding stage includes its stages.
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

// subBits is HIST_SUB_BITS of maps.bpf.h, buckets is HIST_BUCKETS.
const (
	subBits = 3
	topBits = 34
	buckets = (topBits - subBits + 1) << subBits
)

// tally is struct tally of maps.bpf.h.
type tally struct {
	Coverage

	Window, Emitted uint32 // limit the rate of records

	Stage [stages]struct {
		Sum   uint64
		Count [buckets]uint64
	}
}

// tallies holds all tallies of one tenant.
type tallies [directions][protocols]tally

// since subtracts an earlier reading. If a counter went down, this is a new tenant.
func (t *tallies) since(before *tallies) *tallies {
	out := new(tallies)
	*out = *t
	for d := range directions {
		for p := range protocols {
			now, was := &out[d][p], &before[d][p]
			if now.Seen < was.Seen {
				return t
			}
			for i, n := range was.counts() {
				*now.counts()[i] -= *n
			}
			for s := range stages {
				now.Stage[s].Sum -= was.Stage[s].Sum
				for i := range now.Stage[s].Count {
					now.Stage[s].Count[i] -= was.Stage[s].Count[i]
				}
			}
		}
	}
	return out
}

// Coverage counts the packets of one direction and protocol by the result of the measurement. It is
// the head of struct tally.
type Coverage struct {
	Seen       uint64 // sent or received by the container's device
	Matched    uint64 // measured between the container's device and the uplink
	Local      uint64 // between containers of this host, or from the host itself
	Unsampled  uint64 // arrived without a stamp while packets were passed over
	Unmatched  uint64 // dropped, for the host itself, or not followed
	Mismatched uint64 // the stamp belonged to another packet
	Evicted    uint64 // a newer packet took the place of the stamp
}

func (c *Coverage) counts() [7]*uint64 {
	return [...]*uint64{&c.Seen, &c.Matched, &c.Local, &c.Unsampled, &c.Unmatched, &c.Mismatched, &c.Evicted}
}

// Waiting returns the number of packets in flight, including those that ended unseen.
func (c Coverage) Waiting() uint64 {
	ended := c.Matched + c.Local + c.Unsampled + c.Unmatched + c.Mismatched + c.Evicted
	if ended > c.Seen {
		return 0 // counters are read one after the other
	}
	return c.Seen - ended
}

// Of returns the coverage of one direction and some protocols.
func (t Tenant) Of(d Direction, of ...Protocol) (c Coverage) {
	for _, p := range of {
		for i, n := range t.tallies[d][p].counts() {
			*c.counts()[i] += *n
		}
	}
	return c
}

// Histogram returns the times of some protocols' packets in a stage.
func (t Tenant) Histogram(d Direction, s Stage, of ...Protocol) *hist.Histogram {
	sum := hist.New(subBits, topBits)
	for _, p := range of {
		h := &t.tallies[d][p].Stage[s]
		sum.Add(&hist.Histogram{Sub: subBits, Counts: h.Count[:], Sum: h.Sum})
	}
	return sum
}

// every lists all protocols.
func every() []Protocol { return []Protocol{TCP, UDP, ICMP, Other} }
