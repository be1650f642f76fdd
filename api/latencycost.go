package api

import "slices"

// LatencyCost is what the measurement itself costs a packet at one kind of hook: what MACE
// calls perturbation. It has the time in the program there, and not what calling it costs.
type LatencyCost struct {
	Hook   string  `json:"hook" doc:"poll, receive, queue or xmit"`
	Stamps uint64  `json:"stamps" doc:"stamps that were timed, while records were asked for"`
	P50    float64 `json:"p50_seconds" doc:"median time of one stamp"`
}

// The kinds of hooks.
const (
	LatencyPoll    = "poll"
	LatencyReceive = "receive"
	LatencyQueue   = "queue"
	LatencyXmit    = "xmit"
)

// begins has the hook at which a stage begins, by direction. A stage lasts from reading the
// clock in one program to reading it in the next: it has about one program in it.
var begins = map[string]map[string]string{
	"egress":  {"device": LatencyQueue, "deliver": LatencyXmit, "forward": LatencyReceive, "qdisc": LatencyQueue},
	"ingress": {"gro": LatencyPoll, "forward": LatencyReceive, "qdisc": LatencyQueue, "deliver": LatencyXmit, "socket": LatencyReceive},
}

// LatencyCosts are the costs of all hooks. Without any, nothing is known to cost something.
type LatencyCosts []LatencyCost

func (c LatencyCosts) at(hook string) float64 {
	i := slices.IndexFunc(c, func(of LatencyCost) bool { return of.Hook == hook })
	if i < 0 {
		return 0
	}
	return c[i].P50
}

// Of is the part of a packet's Stack that the measurement itself took, in seconds.
func (c LatencyCosts) Of(r LatencyRecord) (sum float64) {
	for _, p := range r.Stages {
		sum += c.at(begins[r.Direction][p.Stage])
	}
	return sum
}

// Less returns the packet without what the measurement took. No time becomes less than 0.
func (c LatencyCosts) Less(r LatencyRecord) LatencyRecord {
	less := func(of *float64, cost float64) *float64 {
		if of == nil {
			return nil
		}
		left := max(*of-cost, 0)
		return &left
	}
	all := c.Of(r)
	beyond := 0.0 // the stages of Stack that Added does not have
	r.Stages = slices.Clone(r.Stages)
	for i, p := range r.Stages {
		cost := c.at(begins[r.Direction][p.Stage])
		if p.Stage == "device" || p.Stage == "socket" {
			beyond += cost
		}
		r.Stages[i].Seconds = max(p.Seconds-cost, 0)
	}
	r.Added, r.Stack, r.Mace = less(r.Added, all-beyond), less(r.Stack, all), less(r.Mace, all)
	return r
}

// lessTrip returns a round trip of two packets without what the measurement took: of both
// ways through this host, and of the stamp at the uplink, behind which the packet leaves.
func (c LatencyCosts) lessTrip(t LatencyTrip, request, reply LatencyRecord) LatencyTrip {
	t.Egress = max(t.Egress-c.Of(request), 0)
	t.Ingress = max(t.Ingress-c.Of(reply), 0)
	t.Corrected = max(t.Corrected-c.at(LatencyXmit), 0)
	t.Raw = t.Egress + t.Ingress + t.Corrected
	return t
}
