package api

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"net/http"
	"net/netip"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/fairlead-project/fairlead/container"
)

// maxSelfOver is the longest time for which a container's request for records waits:
// it is below the time in which an answer to a container has to be written.
const maxSelfOver = 5 * time.Second

// maxSelfRecords bounds what an answer to a container costs the agent: one may ask
// a hundred times a second.
const maxSelfRecords = 256

func latencyRoutes() []route {
	query := map[string]string{
		"after":    "the next of the answer before; absent: packets from now on",
		"over":     "a time, as 2s, at most 30s (5s on the self socket): how long to wait for the first packet; absent: not at all",
		"peer":     "packets to or from an address, or a prefix, as 10.0.0.0/8",
		"port":     "packets to or from a port",
		"protocol": "packets of tcp, udp, icmp or other",
		"sample":   "a number N: all packets of one flow in N, both ways, and none of the others",
	}
	self := maps.Clone(query)
	self["format"] = "slide: a line of text for each packet, [seconds] (number) direction: nanoseconds, in place of JSON"
	return append(report("latency", Latency{},
		"a time, as 2s, at most 30s: the answer comes after it, and is about packets of that time alone",
		"Say what this host has cost the packets of measured containers, by stage, since each was first measured.",
		"The same for one container. There is nothing in it if the container is not measured."),
		route{
			method: "GET", path: "/v1/containers/{ref}/latency/records", query: query, out: LatencyRecords{},
			summary: "Give the packets of one container one by one. Packets are recorded from the first request until ten seconds after the last.",
			call: func(b Backend, r *http.Request) (any, error) {
				in, over, err := recordsAsk(r.URL.Query(), MaxOver)
				if err != nil {
					return nil, err
				}
				return b.Report(r.Context(), Ask{Feature: "latency", Container: r.PathValue("ref"), Over: over, Body: in})
			},
		},
		route{
			method: "GET", path: "/v1/self/latency/records", query: self, out: LatencyRecords{}, self: true,
			summary: "Give the calling container its own packets one by one. Served on the self socket only.",
			call:    selfRecords,
		},
		route{
			method: "POST", path: "/v1/self/latency/tracing", in: LatencyTracing{}, out: LatencyTracing{}, self: true,
			summary: "Begin to record the calling container's own packets, or end it. Served on the self socket only. Ask for records after 1 to get all since then.",
			call:    selfTracing,
		})
}

func selfRecords(b Backend, r *http.Request) (any, error) {
	in, over, err := recordsAsk(r.URL.Query(), maxSelfOver)
	if err != nil {
		return nil, err
	}
	in.Most = maxSelfRecords
	format := r.URL.Query().Get("format")
	if format != "" && format != "slide" {
		return nil, &Error{Status: http.StatusBadRequest, Code: "bad_request", Text: fmt.Sprintf("format=%q: want slide, or none", format)}
	}
	out, err := selfAsk(b, r, Ask{Feature: "latency", Over: over, Body: in})
	if got, ok := out.(LatencyRecords); ok && format == "slide" {
		var text strings.Builder
		for _, r := range got.Records {
			text.WriteString(r.Slide())
		}
		return plainText(text.String()), err
	}
	return out, err
}

func selfTracing(b Backend, r *http.Request) (any, error) {
	var in LatencyTracing
	if err := read(r, &in); err != nil {
		return nil, err
	}
	return selfAsk(b, r, Ask{Feature: "latency", Body: in})
}

// LatencyTracing says whether a container's packets are recorded one by one.
type LatencyTracing struct {
	On    bool      `json:"on" doc:"whether packets are recorded"`
	Until time.Time `json:"until,omitzero" doc:"when that ends unless somebody asks for records; absent while they are not, and in a request"`
}

// LatencyFilter says which packets are wanted. The zero value is all.
type LatencyFilter struct {
	After    uint64
	Most     int          // packets in one answer; 0: as many as are kept
	Peer     netip.Prefix // invalid: any
	Port     uint16       // 0: any
	Protocol string       // "": any
	Sample   uint32       // all packets of one flow in so many; 0 and 1: of each flow
}

// The protocols by which packets are told apart.
const (
	LatencyTCP   = "tcp"
	LatencyUDP   = "udp"
	LatencyICMP  = "icmp"
	LatencyOther = "other"
)

func (f LatencyFilter) query(over time.Duration) string {
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

// recordsAsk reads the parameters of a request for records.
func recordsAsk(q url.Values, most time.Duration) (f LatencyFilter, over time.Duration, err error) {
	bad := func(name, want string) error {
		return &Error{Status: http.StatusBadRequest, Code: "bad_request", Text: fmt.Sprintf("%s=%q: want %s", name, q.Get(name), want)}
	}
	if v := q.Get("after"); v != "" {
		if f.After, err = strconv.ParseUint(v, 10, 64); err != nil {
			return f, 0, bad("after", "a whole number")
		}
	}
	if v := q.Get("over"); v != "" {
		if over, err = time.ParseDuration(v); err != nil || over <= 0 || over > most {
			return f, 0, bad("over", fmt.Sprintf("a time of at most %v, as 2s", most))
		}
	}
	if v := q.Get("peer"); v != "" {
		if f.Peer, err = ParsePeer(v); err != nil {
			return f, 0, bad("peer", "an address, or a prefix, as 10.0.0.0/8")
		}
	}
	if v := q.Get("port"); v != "" {
		n, err := strconv.ParseUint(v, 10, 16)
		if err != nil || n == 0 {
			return f, 0, bad("port", "a number from 1 to 65535")
		}
		f.Port = uint16(n)
	}
	if v := q.Get("sample"); v != "" {
		n, err := strconv.ParseUint(v, 10, 32)
		if err != nil || n == 0 {
			return f, 0, bad("sample", "a whole number from 1")
		}
		f.Sample = uint32(n)
	}
	if f.Protocol = q.Get("protocol"); f.Protocol != "" && !slices.Contains([]string{LatencyTCP, LatencyUDP, LatencyICMP, LatencyOther}, f.Protocol) {
		return f, 0, bad("protocol", "tcp, udp, icmp or other")
	}
	return f, over, nil
}

// ParsePeer reads an address, or a prefix.
func ParsePeer(s string) (netip.Prefix, error) {
	if a, err := netip.ParseAddr(s); err == nil {
		return netip.PrefixFrom(a.Unmap().WithZone(""), a.Unmap().BitLen()), nil
	}
	p, err := netip.ParsePrefix(s)
	return p.Masked(), err
}

// Latency says what this host has cost the packets of measured containers: of all
// if ref is "", else of one, named as for Explain. With a time over other than 0,
// at most [MaxOver], the answer comes after that, and is about that time alone.
func (c *Client) Latency(ctx context.Context, ref string, over time.Duration) (out Latency, err error) {
	return out, c.report(ctx, "latency", ref, over, &out)
}

// LatencyRecords gives packets of one container, named as for Explain, one by one:
// those that the filter wants from its After on. It waits no longer than over for
// the first of them.
func (c *Client) LatencyRecords(ctx context.Context, ref string, f LatencyFilter, over time.Duration) (out LatencyRecords, err error) {
	return out, c.do(ctx, http.MethodGet, "/v1/containers/"+url.PathEscape(ref)+"/latency/records?"+f.query(over), nil, &out)
}

// SelfLatencyRecords gives the calling container its own packets. It works on the
// agent's self socket only.
func (c *Client) SelfLatencyRecords(ctx context.Context, f LatencyFilter, over time.Duration) (out LatencyRecords, err error) {
	return out, c.do(ctx, http.MethodGet, "/v1/self/latency/records?"+f.query(over), nil, &out)
}

// SelfLatencyTracing begins to record the calling container's packets, or ends it.
// It works on the agent's self socket only.
func (c *Client) SelfLatencyTracing(ctx context.Context, on bool) (out LatencyTracing, err error) {
	return out, c.do(ctx, http.MethodPost, "/v1/self/latency/tracing", LatencyTracing{On: on}, &out)
}

// Latency is what this host has cost the packets of measured containers.
type Latency struct {
	Since      time.Time          `json:"since,omitzero" doc:"when the time began that this is about; absent where it is since each container was first measured"`
	Taken      time.Time          `json:"taken" doc:"when the counters were read"`
	Passed     uint64             `json:"passed_events" doc:"how often a packet was passed over on this host, as a CPU had more than it measures"`
	Evicted    uint64             `json:"evicted_packets" doc:"packets on this host whose stamp was lost before it was known whose they were"`
	Lost       uint64             `json:"lost_records" doc:"records of single packets for which there was no room, since the agent began to measure"`
	Unwatched  float64            `json:"unwatched_seconds" doc:"for how long no packet on this host was looked at, as there was a flood"`
	Containers []LatencyContainer `json:"containers" doc:"one element for each direction of each measured container; those that share a network are one, shown for the one with the lowest id"`
}

// LatencyContainer is one direction of one container.
type LatencyContainer struct {
	Container container.ID `json:"container,string" doc:"id of the container"`
	Name      string       `json:"name,omitempty" doc:"name of the container; absent where it is not known"`
	Direction string       `json:"direction" doc:"egress (from the container) or ingress"`
	LatencyTimes
	Protocols []LatencyProtocol `json:"protocols" doc:"the same for each protocol that has packets"`
	Uncovered []LatencyGap      `json:"uncovered,omitempty" doc:"stages and sums that cannot be measured of this container; absent where all can"`
	Meanwhile *LatencyMeanwhile `json:"meanwhile,omitempty" doc:"whose packets the same CPUs worked for; of ingress alone, and absent without a time to measure over, or where nobody knows"`
}

// LatencyGap is what is not measured of a container's packets.
type LatencyGap struct {
	Stages []string `json:"stages" doc:"names of stages and sums"`
	Why    string   `json:"why" doc:"the reason"`
}

// LatencyMeanwhile is whose packets were worked for on the CPUs where those of a
// container wait: in their backlogs, and in the threads that poll its devices.
type LatencyMeanwhile struct {
	CPUs []int              `json:"cpus" doc:"the CPUs that worked for the container's own packets"`
	Own  float64            `json:"own_share" doc:"part of the time of these CPUs that went into the container's own packets"`
	By   []LatencyNeighbour `json:"by" doc:"whose packets else they worked for, most first"`
}

// LatencyNeighbour is one whose packets kept a CPU from those of another.
type LatencyNeighbour struct {
	Container container.ID `json:"container,omitempty,string" doc:"id of the container whose packets they were; absent for the system"`
	Name      string       `json:"name,omitempty" doc:"name of the container; absent where it is not known"`
	Share     float64      `json:"share" doc:"part of the time of these CPUs"`
}

// LatencyProtocol is one protocol of one direction.
type LatencyProtocol struct {
	Protocol string `json:"protocol" doc:"tcp, udp, icmp or other"`
	LatencyTimes
}

// LatencyTimes is what some packets took.
type LatencyTimes struct {
	Coverage LatencyCoverage `json:"coverage" doc:"what became of the packets"`
	Added    *LatencyStage   `json:"added,omitempty" doc:"between the container's device and the uplink: the container's own expense; absent without packets"`
	Stack    *LatencyStage   `json:"stack,omitempty" doc:"between the container's socket and the uplink; absent without packets"`
	Local    *LatencyStage   `json:"local,omitempty" doc:"from this container's device to another's of this host, or the other way; absent without packets"`
	Stages   []LatencyStage  `json:"stages" doc:"the parts of the way, in the order in which packets pass them; those without packets are left out"`
}

// LatencyCoverage says what became of the packets of a container.
type LatencyCoverage struct {
	Seen       uint64 `json:"seen" doc:"packets that were looked at where they left or came to the container; a super-packet is one"`
	Matched    uint64 `json:"matched" doc:"measured between the container's device and the uplink"`
	Local      uint64 `json:"local" doc:"exchanged with a container of this host, or received from the host itself"`
	Unsampled  uint64 `json:"unsampled" doc:"arrived unmeasured while packets were passed over"`
	Unmatched  uint64 `json:"unmatched" doc:"not followed from one end to the other: dropped, for the host itself, or lost by the measurement"`
	Mismatched uint64 `json:"mismatched" doc:"the stamp turned out to be another packet's"`
	Evicted    uint64 `json:"evicted" doc:"the stamp had to make room for that of a newer packet"`
	Waiting    uint64 `json:"waiting" doc:"under way, or ended where nobody saw it"`
}

// Ratio is the part that was measured of all that were to be: those that were
// passed over by choice are not. ok is false without any.
func (c LatencyCoverage) Ratio() (ratio float64, ok bool) {
	of := c.Seen - min(c.Seen, c.Unsampled)
	if of == 0 {
		return 0, false
	}
	return float64(c.Matched+c.Local) / float64(of), true
}

// LatencyStage is how long packets took in one stage, or in a sum of stages.
type LatencyStage struct {
	Stage   string  `json:"stage" doc:"device, deliver, forward, qdisc, gro, socket; added, stack or local"`
	Packets uint64  `json:"packets" doc:"packets that were measured there"`
	Mean    float64 `json:"mean_seconds" doc:"their mean"`
	P50     float64 `json:"p50_seconds" doc:"half of them took no longer; to within 1/16 of its value, as the others"`
	P90     float64 `json:"p90_seconds" doc:"90 % of them took no longer"`
	P99     float64 `json:"p99_seconds" doc:"99 % of them took no longer"`
	Max     float64 `json:"max_seconds" doc:"the longest"`
}

// SelfLatency is what a container may know of its packets' latency: its own.
type SelfLatency struct {
	Taken      time.Time          `json:"taken" doc:"when the counters were read"`
	Directions []LatencyContainer `json:"directions" doc:"one element for each direction"`
}

// LatencyRecords are packets of one container.
type LatencyRecords struct {
	Next    uint64          `json:"next" doc:"what to ask for after next time"`
	Missed  uint64          `json:"missed" doc:"packets that were overwritten before they were asked for"`
	Lost    uint64          `json:"lost_records" doc:"records of all containers for which there was no room, since the agent began to measure"`
	Records []LatencyRecord `json:"records" doc:"the packets, as they came"`
}

// LatencyRecord is one packet. Times that are not known are absent.
type LatencyRecord struct {
	Time      time.Time     `json:"time" doc:"when it left by the uplink, or came to the container"`
	Direction string        `json:"direction" doc:"egress (from the container) or ingress"`
	Protocol  string        `json:"protocol" doc:"tcp, udp, icmp or other"`
	From      string        `json:"from" doc:"its source, as the container has it"`
	FromPort  int           `json:"from_port,omitempty" doc:"port of that; absent without one"`
	To        string        `json:"to" doc:"its destination, as the container has it"`
	ToPort    int           `json:"to_port,omitempty" doc:"port of that; absent without one"`
	Seq       uint64        `json:"seq,omitempty" doc:"sequence number of TCP or of an ICMP echo"`
	Type      int           `json:"icmp_type,omitempty" doc:"type of an ICMP message other than 0"`
	Syn       bool          `json:"tcp_syn,omitempty" doc:"it opens a TCP connection, or answers that"`
	Bytes     int           `json:"bytes" doc:"length of the IP packet"`
	Added     *float64      `json:"added_seconds,omitempty" doc:"between the container's device and the uplink"`
	Stack     *float64      `json:"stack_seconds,omitempty" doc:"between the container's socket and the uplink"`
	Stages    []LatencyPart `json:"stages" doc:"the parts of that, in the order in which it passed them"`
}

// Slide is the packet as a line in the form of MACE's device file, with the time
// between socket and uplink; "" where no such time is known.
func (r LatencyRecord) Slide() string {
	of := cmp.Or(r.Stack, r.Added)
	if of == nil {
		return ""
	}
	return fmt.Sprintf("[%d.%06d] (%d) %s: %.0f\n", r.Time.Unix(), r.Time.Nanosecond()/1000, r.Seq, r.Direction, *of*1e9)
}

// LatencyPart is the time of one packet in one stage.
type LatencyPart struct {
	Stage   string  `json:"stage" doc:"name of the stage"`
	Seconds float64 `json:"seconds" doc:"how long it took"`
}

// SortLatency puts containers into their order: by name, and egress first.
func SortLatency(list []LatencyContainer) {
	slices.SortFunc(list, func(a, b LatencyContainer) int {
		return cmp.Or(cmp.Compare(a.Name, b.Name), cmp.Compare(a.Container, b.Container), cmp.Compare(a.Direction, b.Direction))
	})
}

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

// LatencyTrips finds the reply to each packet: by the sequence number of ICMP echoes,
// by ports and order for UDP, and of TCP for handshakes alone. unpaired is how many
// packets of those kinds have no reply, or are none. It sorts records by time.
func LatencyTrips(records []LatencyRecord) (trips []LatencyTrip, unpaired int) {
	type flow struct {
		protocol, near, far string
		nearPort, farPort   int
		seq                 uint64 // of ICMP
	}
	trips = []LatencyTrip{}
	slices.SortStableFunc(records, func(a, b LatencyRecord) int { return a.Time.Compare(b.Time) })
	asked := make(map[flow]LatencyRecord) // what has no reply yet, but for repetitions
	for _, r := range records {
		if r.Protocol == LatencyTCP && !r.Syn {
			continue // what answers what is only known of the handshake
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
