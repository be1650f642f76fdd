package api

import (
	"slices"
	"time"
)

// LatencyTrip is a round trip: a packet of the container, and its reply.
type LatencyTrip struct {
	Time      time.Time `json:"time"` // when the packet left by the uplink
	Protocol  string    `json:"protocol"`
	Peer      string    `json:"peer"`
	Seq       uint64    `json:"seq,omitempty"`
	Raw       float64   `json:"raw_seconds"`       // from the container's device to its socket
	Egress    float64   `json:"egress_seconds"`    // to the uplink
	Ingress   float64   `json:"ingress_seconds"`   // from the uplink
	Corrected float64   `json:"corrected_seconds"` // what is left
}

// LatencyTrips pairs each packet with its reply: ICMP echoes by sequence number, UDP by
// ports and order, and TCP handshakes by ports. Other TCP packets are ignored. unpaired
// counts the packets without a counterpart. LatencyTrips sorts records by time.
func LatencyTrips(records []LatencyRecord) (trips []LatencyTrip, unpaired int) {
	type flow struct {
		protocol, near, far string
		nearPort, farPort   int
		seq                 uint64 // of ICMP
	}
	trips = []LatencyTrip{}
	slices.SortStableFunc(records, func(a, b LatencyRecord) int { return a.Time.Compare(b.Time) })
	asked := make(map[flow]LatencyRecord) // packets without a reply yet; the first of repetitions
	for _, r := range records {
		if r.Protocol == LatencyTCP && !r.Syn {
			continue // only in a handshake is it clear which packet answers which
		}
		f := flow{protocol: r.Protocol, near: r.From, far: r.To, nearPort: r.FromPort, farPort: r.ToPort}
		if r.Direction == "ingress" {
			f.near, f.far, f.nearPort, f.farPort = r.To, r.From, r.ToPort, r.FromPort
		}
		if r.Protocol == LatencyICMP {
			f.seq = r.Seq
		}
		if r.Direction == "egress" {
			if _, twice := asked[f]; !twice {
				asked[f] = r
			}
			continue
		}
		q, known := asked[f]
		if !known || q.Stack == nil || r.Stack == nil {
			unpaired++
			continue
		}
		delete(asked, f)
		t := LatencyTrip{Time: q.Time, Protocol: q.Protocol, Peer: q.To, Seq: f.seq, Egress: *q.Stack, Ingress: *r.Stack}
		t.Corrected = r.Time.Sub(q.Time).Seconds() - t.Ingress
		t.Raw = t.Corrected + t.Egress + t.Ingress
		trips = append(trips, t)
	}
	return trips, unpaired + len(asked)
}
