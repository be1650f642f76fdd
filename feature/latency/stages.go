package latency

// Direction is which way packets go, as seen from the containers.
type Direction int

// Egress is from them, Ingress towards them.
const (
	Egress Direction = iota
	Ingress
	directions
)

func (d Direction) String() string { return [...]string{"egress", "ingress"}[d] }

// Protocol is a class of packets.
type Protocol int

// The protocols that are told apart. ICMP is also that of IPv6.
const (
	TCP Protocol = iota
	UDP
	ICMP
	Other
	protocols
)

func (p Protocol) String() string { return [...]string{"tcp", "udp", "icmp", "other"}[p] }

// Stage is a part of a packet's way through the host, or one of the sums. The
// order is that of maps.bpf.h.
type Stage int

// First is the qdisc of the container's device on egress, and the time before the
// stack (GRO, RPS) on ingress. Added, Stack and Local are sums and never mixed.
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

// Name is what a stage is called in one direction.
func (s Stage) Name(d Direction) string {
	if s == First {
		return [...]string{"device", "gro"}[d]
	}
	return [...]string{"", "deliver", "forward", "qdisc", "socket", "added", "stack", "local"}[s]
}

// way lists the stages of a direction in the order in which a packet passes them.
func way(d Direction) []Stage {
	if d == Egress {
		return []Stage{First, Deliver, Forward, QDisc}
	}
	return []Stage{First, Forward, QDisc, Deliver, Socket}
}
