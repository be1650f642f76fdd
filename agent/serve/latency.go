package serve

import (
	"fmt"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"time"

	"github.com/fairlead-project/fairlead/api"
)

// maxSelfOver is the longest wait of a container's request for records. It is below the write
// timeout of the self socket.
const maxSelfOver = 5 * time.Second

// maxSelfRecords bounds what an answer costs the agent: a container may send a hundred requests per
// second.
const maxSelfRecords = 256

func latencyRoutes() []route {
	query := map[string]string{
		"after":    "next from the last answer; absent: packets from now on",
		"over":     "how long to wait for the first packet, such as 2s, at most 30s (5s on the self socket); absent: no wait",
		"peer":     "only packets to or from this address or prefix, such as 10.0.0.0/8",
		"port":     "only packets to or from this port",
		"protocol": "only packets of tcp, udp, icmp or other",
		"sample":   "a number N: only one flow in N, with all its packets in both directions",
	}
	return append(report("latency", api.Latency{},
		"how long to measure, such as 2s, at most 30s: the agent answers after that time, with the packets of that time only",
		"Show the latency that this host has added to the packets of the measured containers, by stage, since the measurement of each began.",
		"The same for one container. The list is empty if the container is not measured."),
		route{
			method: "GET", path: "/v1/containers/{ref}/latency/records", query: query, out: api.LatencyRecords{},
			summary: "List the packets of one container. The agent records packets from the first request until ten seconds after the last one.",
			call: func(b Backend, r *http.Request) (any, error) {
				in, over, err := recordsAsk(r.URL.Query(), api.MaxOver)
				if err != nil {
					return nil, err
				}
				return b.Command(r.Context(), api.Ask{Feature: "latency", Container: r.PathValue("ref"), Over: over, Body: in})
			},
		},
		route{
			method: "POST", path: "/v1/containers/{ref}/latency/measured", in: api.LatencyMeasured{}, out: api.LatencyMeasured{},
			summary: "Measure the packets of one container for 15 seconds, whatever policy says, on behalf of the calling process: it asks again to go on, and with on=false to end. The answer comes when the measurement has begun.",
			call:    taking(measured),
		},
		route{
			method: "GET", path: "/v1/self/latency/records", query: query, out: api.LatencyRecords{}, self: true,
			summary: "List the packets of the calling container. Served on the self socket only.",
			call:    selfRecords,
		},
		route{
			method: "POST", path: "/v1/self/latency/tracing", in: api.LatencyTracing{}, out: api.LatencyTracing{}, self: true,
			summary: "Start or stop recording the packets of the calling container. Served on the self socket only. Ask for records with after=1 to get all packets since the start.",
			call:    taking(selfTracing),
		})
}

func selfRecords(b Backend, r *http.Request) (any, error) {
	in, over, err := recordsAsk(r.URL.Query(), maxSelfOver)
	if err != nil {
		return nil, err
	}
	in.Most = maxSelfRecords
	out, err := selfAsk(b, r, api.Ask{Feature: "latency", Over: over, Body: in})
	if got, ok := out.(api.LatencyRecords); ok {
		for _, r := range got.Records {
			for i, w := range r.Waits {
				r.Waits[i] = alone(w) // a container must not learn who its neighbours are
			}
		}
	}
	return out, err
}

func selfTracing(b Backend, r *http.Request, in api.LatencyTracing) (any, error) {
	return selfAsk(b, r, api.Ask{Feature: "latency", Body: in})
}

func measured(b Backend, r *http.Request, in api.LatencyMeasured) (any, error) {
	p, err := peer(r.Context())
	if err != nil {
		return nil, err
	}
	return b.Command(r.Context(), api.Ask{Feature: "latency", Container: r.PathValue("ref"), Body: api.LatencyMeasure{On: in.On, PID: p.PID, UID: p.UID}})
}

// recordsAsk parses the parameters of a request for records.
func recordsAsk(q url.Values, most time.Duration) (f api.LatencyFilter, over time.Duration, err error) {
	bad := func(name, want string) error {
		return &api.Error{Status: http.StatusBadRequest, Code: "bad_request", Text: fmt.Sprintf("%s=%q: want %s", name, q.Get(name), want)}
	}
	number := func(name string, least uint64, bits int, want string) (n uint64) {
		v := q.Get(name)
		if v == "" || err != nil {
			return 0
		}
		if n, err = strconv.ParseUint(v, 10, bits); err != nil || n < least {
			err = bad(name, want)
		}
		return n
	}
	f.After = number("after", 0, 64, "a whole number")
	f.Port = uint16(number("port", 1, 16, "a number from 1 to 65535"))
	f.Sample = uint32(number("sample", 1, 32, "a whole number from 1"))
	if err != nil {
		return f, 0, err
	}
	if v := q.Get("over"); v != "" {
		if over, err = time.ParseDuration(v); err != nil || over <= 0 || over > most {
			return f, 0, bad("over", fmt.Sprintf("a time of at most %v, as 2s", most))
		}
	}
	if v := q.Get("peer"); v != "" {
		if f.Peer, err = api.ParsePeer(v); err != nil {
			return f, 0, bad("peer", "an address, or a prefix, as 10.0.0.0/8")
		}
	}
	if f.Protocol = q.Get("protocol"); f.Protocol != "" && !slices.Contains([]string{api.LatencyTCP, api.LatencyUDP, api.LatencyICMP, api.LatencyOther}, f.Protocol) {
		return f, 0, bad("protocol", "tcp, udp, icmp or other")
	}
	return f, over, nil
}

// alone returns the wait without the parts of other containers.
func alone(w api.LatencyWait) api.LatencyWait {
	own, others := []api.LatencyCulprit{}, api.LatencyCulprit{Work: api.LatencyOthers}
	for _, c := range w.By {
		if c.Own {
			own = append(own, c)
		} else {
			others.Seconds += c.Seconds
		}
	}
	if others.Seconds > 0 {
		own = append(own, others)
	}
	w.By = own
	return w
}
