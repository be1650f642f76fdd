package bench

import (
	"fmt"
	"slices"

	"github.com/fairlead-project/fairlead/lab/rig"
)

// overlaySetup is a rig and the cases that are measured in it.
type overlaySetup struct {
	path  rig.Path
	cases []overlayCase
}

// overlayPaths are the forms of overlay networks. Swarm is the form of Bridged, built by two Docker
// Engines.
var overlayPaths = []rig.Path{rig.Routed, rig.Bridged, rig.Swarm}

func (su overlaySetup) caseName(c overlayCase) string { return string(su.path) + " " + c.name }

// overlayCase is one load from a client on the first host to a server on the second.
type overlayCase struct {
	name   string
	client []string // arguments of its generator, for load.Main
	server []string // likewise; nil: service
	// service is a real server in place of a generator; "" is none.
	service rig.Service
	flows   int
	// ports is the number of ports on which the server listens, one after the other; 0 is one.
	ports int
	bulk  bool // the measure is what the server receives, not the answers
	short bool // each request is on a new connection
	named bool // the destination is a service's address
	quick bool
}

// overlayCatalogue holds every case of the overlay experiment (ONCache, figures of
// throughput, request-response, connect-request-response and applications).
func overlayCatalogue() []overlaySetup {
	var cases []overlayCase
	for _, proto := range []string{"udp", "tcp"} {
		for _, flows := range []int{1, 8, 32} {
			c := requestsOf(proto, flows)
			if proto == "udp" {
				c.ports = flows // each server process of netperf has a socket of its own
			}
			cases = append(cases, c)
		}
	}
	short := requestsOf("tcp", 1)
	short.name, short.client, short.short, short.quick = "tcp crr", append(short.client, "--connect"), true, true
	cases = append(cases, short,
		overlayCase{name: "udp bulk", flows: 1, bulk: true, client: []string{"udp-send", "--greet", "--size", "1400"}, server: []string{"udp-recv", "--greet"}, quick: true},
		overlayCase{name: "tcp bulk", flows: 1, bulk: true, client: []string{"tcp-send", "--congestion", "cubic"}, server: []string{"tcp-recv"}, quick: true})
	for _, s := range []rig.Service{rig.Memcache, rig.Nginx, rig.Redis, rig.Postgres} {
		cases = append(cases, overlayCase{
			name: string(s), service: s, flows: serviceConns, quick: s == rig.Memcache,
			client: []string{"rr-client", "--proto", s.Proto(), "--size", fmt.Sprint(rig.PageSize), "--conns", fmt.Sprint(serviceConns)},
		})
	}
	var all []overlaySetup
	for _, path := range overlayPaths {
		su := overlaySetup{path: path, cases: slices.Clone(cases)}
		if path == rig.Swarm {
			su.cases = slices.DeleteFunc(su.cases, func(c overlayCase) bool { return c.server == nil && c.service != rig.Memcache })
		}
		for i, c := range su.cases { // the other forms have the same programs in front of them
			su.cases[i].quick = c.quick && (path == rig.Routed || path == rig.Bridged && c.name == "tcp rr 1")
		}
		for _, c := range slices.Clone(su.cases) {
			if path == rig.Routed && (c.flows == 8 && c.server != nil || c.short) {
				c.name, c.named, c.quick = "service "+c.name, true, false
				su.cases = append(su.cases, c)
			}
		}
		all = append(all, su)
	}
	return all
}

// requestsOf sends one byte and receives one, on each of so many flows at once, as TCP_RR and
// UDP_RR of netperf do.
func requestsOf(proto string, flows int) overlayCase {
	common := []string{"--proto", proto, "--conns", fmt.Sprint(flows)}
	return overlayCase{
		name: fmt.Sprintf("%s rr %d", proto, flows), flows: flows, quick: flows != 8,
		client: append([]string{"rr-client", "--size", "1"}, common...), server: append([]string{"rr-server"}, common...),
	}
}
