package api

import (
	"cmp"
	"context"
	"net/http"
	"net/netip"
	"net/url"
	"slices"
	"strconv"
	"time"
)

// LatencyTracing says whether the agent records the packets of a container.
type LatencyTracing struct {
	On    bool      `json:"on" doc:"whether packets are recorded"`
	Until time.Time `json:"until,omitzero" doc:"when the recording ends without further requests for records; absent if there is none, and in a request"`
}

// LatencyMeasured says whether the agent measures the packets of a container for a process.
type LatencyMeasured struct {
	On    bool      `json:"on" doc:"whether the packets are measured for the calling process"`
	Until time.Time `json:"until,omitzero" doc:"when the measurement ends unless the process asks again; absent if there is none, and in a request"`
}

// LatencyMeasure is the Body of an [Ask] to measure a container for a process. The feature
// answers with a LatencyMeasured.
type LatencyMeasure struct {
	On  bool
	PID int // PID of the asking process, as the agent sees it
	UID int
}

// LatencyFilter selects packets. The zero value selects all of them.
type LatencyFilter struct {
	After    uint64
	Most     int          // the most packets in one answer; 0: all that are kept
	Peer     netip.Prefix // invalid: any
	Port     uint16       // 0: any
	Protocol string       // "": any
	Sample   uint32       // one flow in this many, with all its packets; 0 and 1: every flow
}

// The protocols that packets are grouped by.
const (
	LatencyTCP   = "tcp"
	LatencyUDP   = "udp"
	LatencyICMP  = "icmp"
	LatencyOther = "other"
)

// Query encodes the filter as the parameters of a request that waits for at most over.
func (f LatencyFilter) Query(over time.Duration) string {
	q := url.Values{}
	if f.After > 0 {
		q.Set("after", strconv.FormatUint(f.After, 10))
	}
	if over > 0 {
		q.Set("over", over.String())
	}
	if f.Peer.IsValid() {
		q.Set("peer", f.Peer.String())
	}
	if f.Port > 0 {
		q.Set("port", strconv.Itoa(int(f.Port)))
	}
	if f.Protocol != "" {
		q.Set("protocol", f.Protocol)
	}
	if f.Sample > 0 {
		q.Set("sample", strconv.FormatUint(uint64(f.Sample), 10))
	}
	return q.Encode()
}

// ParsePeer parses an address or a prefix.
func ParsePeer(s string) (netip.Prefix, error) {
	if a, err := netip.ParseAddr(s); err == nil {
		return netip.PrefixFrom(a.Unmap().WithZone(""), a.Unmap().BitLen()), nil
	}
	p, err := netip.ParsePrefix(s)
	return p.Masked(), err
}

// Latency returns the latency that this host has added to packets of the measured containers: for
// all if ref is "", otherwise for one, named as for Explain. If over is not 0 (at most [MaxOver]),
// the agent measures for that time before it answers.
func (c *Client) Latency(ctx context.Context, ref string, over time.Duration) (out Latency, err error) {
	return out, c.report(ctx, "latency", ref, over, &out)
}

// LatencyRecords returns the packets of one container, named as for Explain, that the filter
// selects. It waits for the first of them for at most over.
func (c *Client) LatencyRecords(ctx context.Context, ref string, f LatencyFilter, over time.Duration) (out LatencyRecords, err error) {
	return out, c.do(ctx, http.MethodGet, "/v1/containers/"+url.PathEscape(ref)+"/latency/records?"+f.Query(over), nil, &out)
}

// LatencyMeasured starts or stops measuring the packets of one container, named as for Explain, for
// this process, whatever policy says. The agent stops after 15 seconds without a new request.
func (c *Client) LatencyMeasured(ctx context.Context, ref string, on bool) (out LatencyMeasured, err error) {
	return out, c.do(ctx, http.MethodPost, "/v1/containers/"+url.PathEscape(ref)+"/latency/measured", LatencyMeasured{On: on}, &out)
}

// SelfLatencyRecords returns packets of the calling container. It works on the agent's
// self socket only.
func (c *Client) SelfLatencyRecords(ctx context.Context, f LatencyFilter, over time.Duration) (out LatencyRecords, err error) {
	return out, c.do(ctx, http.MethodGet, "/v1/self/latency/records?"+f.Query(over), nil, &out)
}

// SelfLatencyTracing starts or stops recording the packets of the calling container. It
// works on the agent's self socket only.
func (c *Client) SelfLatencyTracing(ctx context.Context, on bool) (out LatencyTracing, err error) {
	return out, c.do(ctx, http.MethodPost, "/v1/self/latency/tracing", LatencyTracing{On: on}, &out)
}

// Latency is the latency that this host has added to the packets of the measured containers.
type Latency struct {
	Since      time.Time          `json:"since,omitzero" doc:"start of the measurement; absent if it began, for each container, when the container was first measured"`
	Taken      time.Time          `json:"taken" doc:"when the counters were read"`
	Passed     uint64             `json:"passed_events" doc:"how often this host did not measure a packet because its CPU had too many"`
	Evicted    uint64             `json:"evicted_packets" doc:"packets on this host that lost their time stamp before their container was known"`
	Lost       uint64             `json:"lost_records" doc:"records of packets that did not fit into the buffer, or were beyond 20,000 per second of one container, direction and protocol, since the agent began to measure"`
	LostWaits  uint64             `json:"lost_waits" doc:"waits of recorded packets that were overwritten or had no room, since the agent began to measure"`
	Unwatched  float64            `json:"unwatched_seconds" doc:"time for which this host measured no packets because of a flood"`
	Containers []LatencyContainer `json:"containers" doc:"one element for each direction of each measured container; containers that share a network have one, under the lowest id"`
}

// LatencyContainer is one direction of one container.
type LatencyContainer struct {
	Container ID     `json:"container,string" doc:"id of the container"`
	Name      string `json:"name,omitempty" doc:"name of the container; absent if unknown"`
	Direction string `json:"direction" doc:"egress (from the container) or ingress"`
	LatencyTimes
	Protocols []LatencyProtocol `json:"protocols" doc:"the same numbers for each protocol that has packets"`
	Uncovered []LatencyGap      `json:"uncovered,omitempty" doc:"stages and sums that cannot be measured for this container; absent if there are none"`
	Meanwhile *LatencyMeanwhile `json:"meanwhile,omitempty" doc:"work of the same CPUs for the packets of others; only for ingress and with a time to measure, absent if unknown"`
}

// LatencyGap names stages that cannot be measured for a container.
type LatencyGap struct {
	Stages []string `json:"stages" doc:"names of stages and sums"`
	Why    string   `json:"why" doc:"the reason"`
}

// LatencyMeanwhile is the packet work of the CPUs on which a container's packets wait, that is in
// the CPUs' backlogs and in the threads that poll the container's devices.
type LatencyMeanwhile struct {
	CPUs []int              `json:"cpus" doc:"CPUs that handled packets of the container"`
	Own  float64            `json:"own_share" doc:"fraction of the time of these CPUs that was spent on the container's own packets"`
	By   []LatencyNeighbour `json:"by" doc:"others whose packets these CPUs handled, the largest share first"`
}

// LatencyNeighbour is the work for another container's packets.
type LatencyNeighbour struct {
	Container ID      `json:"container,omitempty,string" doc:"id of the other container; absent for the system"`
	Name      string  `json:"name,omitempty" doc:"name of the other container; absent if unknown"`
	Share     float64 `json:"share" doc:"fraction of the time of these CPUs"`
}

// LatencyProtocol is one protocol of one direction.
type LatencyProtocol struct {
	Protocol string `json:"protocol" doc:"tcp, udp, icmp or other"`
	LatencyTimes
}

// LatencyTimes is the latency of a group of packets.
type LatencyTimes struct {
	Coverage LatencyCoverage `json:"coverage" doc:"how many packets were measured, and why others were not"`
	Added    *LatencyStage   `json:"added,omitempty" doc:"time between the container's device and the uplink: the overhead of the container's network; absent without packets"`
	Stack    *LatencyStage   `json:"stack,omitempty" doc:"time between the container's socket and the uplink; absent without packets"`
	Local    *LatencyStage   `json:"local,omitempty" doc:"time between this container's device and that of another container of this host, in either direction; absent without packets"`
	Stages   []LatencyStage  `json:"stages" doc:"stages in the order in which packets pass them; stages without packets are left out"`
}

// LatencyCoverage counts the packets of a container by the result of the measurement.
type LatencyCoverage struct {
	Seen       uint64 `json:"seen" doc:"packets seen at the container's device; a super-packet counts as one"`
	Matched    uint64 `json:"matched" doc:"packets measured between the container's device and the uplink"`
	Local      uint64 `json:"local" doc:"packets exchanged with another container of this host, or received from the host itself"`
	Unsampled  uint64 `json:"unsampled" doc:"packets that arrived unmeasured while CPUs had too many to measure all"`
	Unmatched  uint64 `json:"unmatched" doc:"packets seen at one end only: dropped, sent to the host itself, or lost by the measurement"`
	Mismatched uint64 `json:"mismatched" doc:"packets whose time stamp belonged to another packet"`
	Evicted    uint64 `json:"evicted" doc:"packets whose time stamp was evicted by a newer one"`
	Waiting    uint64 `json:"waiting" doc:"packets that are under way, or that ended where the measurement does not see it"`
}

// Ratio returns the fraction of the packets that was measured. Packets that were skipped because a
// CPU had too many do not count. ok is false without packets.
func (c LatencyCoverage) Ratio() (ratio float64, ok bool) {
	of := c.Seen - min(c.Seen, c.Unsampled)
	if of == 0 {
		return 0, false
	}
	return float64(c.Matched+c.Local) / float64(of), true
}

// LatencyStage is the latency of packets in one stage, or in a sum of stages.
type LatencyStage struct {
	Stage   string  `json:"stage" doc:"device, deliver, forward, qdisc, gro, socket; added, stack or local"`
	Packets uint64  `json:"packets" doc:"packets measured in the stage"`
	Mean    float64 `json:"mean_seconds" doc:"mean"`
	P50     float64 `json:"p50_seconds" doc:"median; all quantiles are exact to 1/16 of their value"`
	P90     float64 `json:"p90_seconds" doc:"90th percentile"`
	P99     float64 `json:"p99_seconds" doc:"99th percentile"`
	Max     float64 `json:"max_seconds" doc:"maximum"`
}

// SelfLatency is the latency of the calling container's own packets.
type SelfLatency struct {
	Taken      time.Time          `json:"taken" doc:"when the counters were read"`
	Directions []LatencyContainer `json:"directions" doc:"one element for each direction"`
}

// LatencyRecords are packets of one container.
type LatencyRecords struct {
	Next   uint64 `json:"next" doc:"value of after for the next request"`
	Missed uint64 `json:"missed" doc:"packets that were overwritten before this request; at least 1 if the recording that after is from has ended"`
	Lost   uint64 `json:"lost_records" doc:"records of all containers that did not fit into the buffer, or were beyond 20,000 per second of one container, direction and protocol, since the agent began to measure"`
	// LostWaits also covers all containers.
	LostWaits uint64          `json:"lost_waits" doc:"waits of recorded packets of all containers that were overwritten or had no room, since the agent began to measure"`
	Limited   bool            `json:"limited,omitempty" doc:"the host is not watched for this container now, because it asks by its self socket and has had its time: packets have no waits, and a busy CPU passes some over"`
	Records   []LatencyRecord `json:"records" doc:"packets in the order of their arrival"`
}

// LatencyRecord is one packet. Unknown times are absent.
type LatencyRecord struct {
	Time      time.Time     `json:"time" doc:"when the packet left by the uplink or reached the container"`
	Direction string        `json:"direction" doc:"egress (from the container) or ingress"`
	Protocol  string        `json:"protocol" doc:"tcp, udp, icmp or other"`
	From      string        `json:"from" doc:"source address, as the container sees it"`
	FromPort  int           `json:"from_port,omitempty" doc:"source port; absent without one"`
	To        string        `json:"to" doc:"destination address, as the container sees it"`
	ToPort    int           `json:"to_port,omitempty" doc:"destination port; absent without one"`
	Seq       uint64        `json:"seq,omitempty" doc:"sequence number of TCP or of an ICMP echo"`
	Type      int           `json:"icmp_type,omitempty" doc:"type of an ICMP message other than 0"`
	Syn       bool          `json:"tcp_syn,omitempty" doc:"the packet has the SYN flag"`
	Bytes     int           `json:"bytes" doc:"length of the IP packet"`
	Added     *float64      `json:"added_seconds,omitempty" doc:"time between the container's device and the uplink"`
	Stack     *float64      `json:"stack_seconds,omitempty" doc:"time between the container's socket and the uplink"`
	Stages    []LatencyPart `json:"stages" doc:"stages in the order in which the packet passed them"`
	Waits     []LatencyWait `json:"waits,omitempty" doc:"what the CPU did while the packet waited for it; absent if the packet did not wait, or if unknown"`
}

// The kinds of work for which a packet waits.
const (
	LatencyTasks   = "tasks"
	LatencyPackets = "packets"
	LatencySoftIRQ = "softirq"
	LatencyIdle    = "idle"
	LatencyOthers  = "others"
)

// LatencyWait is the wait of one packet for a CPU.
type LatencyWait struct {
	Stage   string           `json:"stage" doc:"deliver or gro"`
	Seconds float64          `json:"seconds" doc:"length of the wait"`
	By      []LatencyCulprit `json:"by" doc:"what the CPU did meanwhile, the longest first; at most three elements"`
	Unknown float64          `json:"unknown_seconds" doc:"the rest of the wait"`
}

// LatencyCulprit is work that a CPU did while a packet waited, and the container of that work.
type LatencyCulprit struct {
	Work      string  `json:"work" doc:"tasks, packets, softirq (other work of the kernel), idle, or others (on the self socket: anything but the container's own)"`
	Container ID      `json:"container,omitempty,string" doc:"id of the container whose tasks or packets they were; absent for others"`
	Name      string  `json:"name,omitempty" doc:"name of that container; absent if unknown"`
	Cgroup    string  `json:"cgroup,omitempty" doc:"cgroup of tasks that are in no container"`
	Own       bool    `json:"own,omitempty" doc:"it is the container whose packet waited"`
	Seconds   float64 `json:"seconds" doc:"time of the work"`
}

// LatencyPart is the time of one packet in one stage.
type LatencyPart struct {
	Stage   string  `json:"stage" doc:"name of the stage"`
	Seconds float64 `json:"seconds" doc:"time in the stage"`
}

// SortLatency sorts containers by name, egress first.
func SortLatency(list []LatencyContainer) {
	slices.SortFunc(list, func(a, b LatencyContainer) int {
		return cmp.Or(cmp.Compare(a.Name, b.Name), cmp.Compare(a.Container, b.Container), cmp.Compare(a.Direction, b.Direction))
	})
}

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

// slowed returns a function that fills in the latency that the host adds to a container's packets,
// of the worse direction. The report may be nil.
func (l *Latency) slowed() func(*OverviewRow) losses {
	if l == nil {
		return func(*OverviewRow) losses { return nil }
	}
	added := make(map[ID]float64)
	for _, c := range l.Containers {
		if c.Added != nil {
			added[c.Container] = max(added[c.Container], c.Added.P99)
		}
	}
	return func(row *OverviewRow) losses {
		row.Added = added[row.Container]
		return nil
	}
}
