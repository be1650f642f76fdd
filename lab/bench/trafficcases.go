package bench

import (
	"fmt"
	"slices"
	"time"

	"github.com/fairlead-project/fairlead/lab/load"
	"github.com/fairlead-project/fairlead/lab/rig"
)

const (
	mbit = 1_000_000
	gbit = 1000 * mbit
)

// sending is the traffic from one container to the outside, or from the outside to it.
type sending struct {
	name string
	args []string // arguments of its generator, for load.Main; nil: none
	rate uint64   // for load.Board.SetRate
	to   string   // the receiving container; "": the outside
	// service is a real server in place of a generator; "": none. It gives clients outside answers
	// of size bytes.
	service rig.Service
	size    int
}

func bulk(name string, conns int) sending {
	return sending{name: name, args: []string{"tcp-send", "--congestion", "cubic", "--conns", fmt.Sprint(conns)}, rate: load.Flood}
}

func flood(name string, more ...string) sending {
	return sending{name: name, args: append([]string{"udp-send", "--size", "1400", "--buffer", "8388608"}, more...), rate: load.Flood}
}

// superflood is a flood of super-packets, like those of QUIC servers. One CPU can send more of
// them than the link carries, and still has idle time.
func superflood(name string) sending {
	return flood(name, "--segments", "40")
}

// requests is one request after another over one connection, like ping.
func requests(name string) sending {
	return sending{name: name, args: []string{"rr-client", "--proto", "udp", "--size", fmt.Sprint(requestSize), "--conns", "1"}, rate: load.Flood}
}

// trafficSetup is a rig with its cases.
type trafficSetup struct {
	name  string
	path  rig.Path
	link  uint64   // rate of the NIC, bit/s; 0: unlimited
	boxes []string // the containers
	// quotas are percents of CPU 0, by container. Others have none.
	quotas map[string]float64
	// inward makes the outside send to the containers, over a wire of unlimited rate.
	inward bool
	cases  []trafficCase
}

// trafficCase is one case: the traffic and the policy of each container.
type trafficCase struct {
	name string
	send []sending
	// set is the policy while the protection is on, by container.
	set rules
	tc  []rig.Class // classes that an operator would create by hand instead; nil: not measured
	// phases follow one another in a measurement; nil is one phase in which all containers send.
	phases []phase
	probe  string // the container with the measured requests; "": bandwidth is measured
	fixed  string // the container with a rate that has to be met
	ceil   uint64 // upper bound on the NIC's rate, bit/s; 0: not measured
	timed  bool   // measure the delay of changes, not the shares: see enforced
	quick  bool
}

// phase defines which containers send for a while, and their due shares of the link.
type phase struct {
	name  string
	sends []string
	due   map[string]float64 // fraction of the link, by container
	set   rules              // a new policy at its start
	pause time.Duration      // a pause before it, in which no container sends
}

func (su trafficSetup) box(name string) int { return slices.Index(su.boxes, name) }

// trafficCatalogue holds every case of the traffic experiment (CNTC, figures 1
// and 7 to 11).
func trafficCatalogue() []trafficSetup {
	var all []trafficSetup
	// The classes of both in Mbit/s, in order. The class of "many" comes last if late is 1.
	tc := func(many, one, ceil uint64, late uint32) []rig.Class {
		return []rig.Class{{Container: 0, Rate: many * mbit, Ceil: gbit, Prio: late}, {Container: 1, Rate: one * mbit, Ceil: ceil * mbit}}
	}
	six := []sending{bulk("many", 6), bulk("one", 1)}
	fixed := rules{"many": "net.weight: 9", "one": "{net.rate: 300mbit, net.ceil: 300mbit}"}
	delay := func(beside string, quick bool, many sending) trafficCase {
		return trafficCase{
			name: "requests beside " + beside, send: []sending{many, requests("one")}, probe: "one",
			set: rules{"many": "net.weight: 1", "one": "{net.rate: 50mbit, net.latency: 2ms}"}, tc: tc(500, 50, 1000, 1), quick: quick,
		}
	}
	for _, p := range []struct {
		name string
		path rig.Path
	}{{"bridge", rig.NIC}, {"overlay", rig.VXLAN}, {"macvlan", rig.Macvlan}, {"host", rig.Host}} {
		su := trafficSetup{name: p.name, path: p.path, link: gbit, boxes: []string{"many", "one"}}
		su.cases = []trafficCase{
			{name: "6 to 1", send: six, set: rules{"many": "net.weight: 1", "one": "net.weight: 1"}, tc: tc(475, 475, 1000, 0), quick: true},
			{name: "6 to 1, weights 1 to 2", send: six, set: rules{"many": "net.weight: 1", "one": "net.weight: 2"}, tc: tc(317, 633, 1000, 0)},
			{name: "rate beside flood", send: []sending{superflood("many"), bulk("one", 1)}, fixed: "one", set: fixed, tc: tc(650, 300, 300, 0)},
			{name: "UDP rate beside bulk", send: []sending{bulk("many", 6), flood("one")}, fixed: "one", set: fixed, tc: tc(650, 300, 300, 0)},
			{name: "ceil", send: []sending{flood("one")}, ceil: 100 * mbit, set: rules{"one": "net.ceil: 100mbit"}, tc: []rig.Class{{Container: 1, Rate: 100 * mbit, Ceil: 100 * mbit}}},
			delay("bulk", true, bulk("many", 6)), delay("flood", false, flood("many")), delay("super-packets", true, superflood("many")),
			{name: "priority", send: six, tc: tc(100, 100, 1000, 1),
				set: rules{"many": "{net.rate: 100mbit, net.priority: 1}", "one": "{net.rate: 100mbit, net.priority: 0}"}},
		}
		if p.path == rig.NIC {
			su.cases = append(su.cases, trafficCase{
				name: "80 to 20", send: []sending{bulk("many", 1), bulk("one", 1)}, quick: true,
				set: rules{"many": "net.rate: 760mbit", "one": "net.rate: 190mbit"}, tc: tc(760, 190, 1000, 0),
			})
		}
		all = append(all, su)
	}
	all = append(all, inward(), neighbours(), changes(), soon(), byItself())
	return append(all, serving()...)
}

// inward is traffic that containers receive by the NIC.
func inward() trafficSetup {
	twice := flood("one")
	twice.rate = 20_000 // 224 Mbit/s, which leaves CPU 0 time to receive
	return trafficSetup{name: "ingress", path: rig.NIC, link: gbit, inward: true, boxes: []string{"many", "one"}, cases: []trafficCase{
		{
			name: "6 to 1", send: []sending{bulk("many", 6), bulk("one", 1)},
			set: rules{"many": "net.ingress.weight: 1", "one": "net.ingress.weight: 1"},
		},
		{
			name: "ceil", send: []sending{bulk("one", 1)}, fixed: "one",
			set: rules{"one": "net.ingress.ceil: 100mbit"},
		},
		{
			name: "UDP ceil", send: []sending{twice}, fixed: "one",
			set: rules{"one": "net.ingress.ceil: 100mbit"},
		},
	}}
}

// neighbours is traffic within the host.
func neighbours() trafficSetup {
	to := func(s sending, name string) []sending {
		s.to = name
		return []sending{s}
	}
	set := rules{"one": "net.ceil: 100mbit"}
	return trafficSetup{name: "neighbour", path: rig.NIC, link: gbit, boxes: []string{"many", "one"}, cases: []trafficCase{
		{name: "ceil", send: to(bulk("one", 1), "many"), fixed: "one", set: set},
		{name: "UDP ceil", send: to(flood("one"), "many"), fixed: "one", set: set},
	}}
}

// soon measures the delay between a change and the shares that are due after it, with
// containers of a Docker Engine.
func soon() trafficSetup {
	return trafficSetup{name: "docker", path: rig.Docker, link: gbit, boxes: []string{"w1", "w2"}, cases: []trafficCase{{
		name: "in force", timed: true,
		send: []sending{bulk("w1", 2), bulk("w2", 2)},
		set:  rules{"w1": "net.weight: 1", "w2": "net.weight: 1"},
	}}}
}

// changes are figures 9 and 10: containers come and go, and their policy changes, while
// they send.
func changes() trafficSetup {
	// Two by weight, 1 to 2, and two of a fixed rate, as 50 and 30 MB/s are to the paper's gigabit.
	adjust := trafficCase{
		name: "start and stop",
		send: []sending{bulk("w1", 2), bulk("w2", 2), bulk("r3", 2), bulk("r4", 2)},
		set: rules{
			"w1": "net.weight: 1", "w2": "net.weight: 2", "r3": "{net.rate: 400mbit, net.ceil: 400mbit}", "r4": "{net.rate: 240mbit, net.ceil: 240mbit}",
		},
		tc: []rig.Class{
			{Container: 0, Rate: 103 * mbit, Ceil: gbit}, {Container: 1, Rate: 207 * mbit, Ceil: gbit},
			{Container: 2, Rate: 400 * mbit, Ceil: 400 * mbit}, {Container: 3, Rate: 240 * mbit, Ceil: 240 * mbit},
		},
		phases: []phase{
			{name: "w1 w2 r3", sends: []string{"w1", "w2", "r3"}, due: map[string]float64{"w1": 0.2, "w2": 0.4, "r3": 0.4}},
			{name: "r3 ends", sends: []string{"w1", "w2"}, due: map[string]float64{"w1": 1. / 3, "w2": 2. / 3}},
			{name: "r4 starts", sends: []string{"w1", "w2", "r4"}, due: map[string]float64{"w1": 0.76 / 3, "w2": 0.76 * 2 / 3, "r4": 0.24}},
		},
		quick: true,
	}
	both := rules{"w1": "net.rate: 100mbit", "w2": "net.rate: 100mbit"}
	order := trafficCase{
		name: "priority changes",
		send: []sending{bulk("w1", 2), bulk("w2", 2)}, set: both,
		phases: []phase{
			{name: "equal", sends: []string{"w1", "w2"}, due: map[string]float64{"w1": 0.5, "w2": 0.5}},
			{name: "w2 first", sends: []string{"w1", "w2"}, due: map[string]float64{"w1": 0.1, "w2": 0.9},
				set: rules{"w1": "{net.rate: 100mbit, net.priority: 2}", "w2": "{net.rate: 100mbit, net.priority: 1}"}},
			// HTB uses the old priority of a class until its queue has been empty once.
			{name: "a pause", sends: []string{"w1", "w2"}, due: map[string]float64{"w1": 0.1, "w2": 0.9}, pause: 200 * time.Millisecond},
		},
	}
	return trafficSetup{name: "changes", path: rig.NIC, link: gbit, boxes: []string{"w1", "w2", "r3", "r4"}, cases: []trafficCase{adjust, order}}
}

// byItself is figure 11(a): the cost of shaping, with bounds that are never reached.
func byItself() trafficSetup {
	tc := []rig.Class{{Container: 0, Rate: 90 * gbit, Ceil: 100 * gbit}}
	set := rules{"only": "net.rate: 90gbit"}
	return trafficSetup{name: "alone", path: rig.NIC, boxes: []string{"only"}, cases: []trafficCase{
		{name: "bulk", send: []sending{bulk("only", 1)}, set: set, tc: tc, quick: true},
		{name: "flood of 64 bytes", send: []sending{flood("only", "--size", "64")}, set: set, tc: tc},
		{name: "requests", send: []sending{requests("only")}, set: set, tc: tc, probe: "only", quick: true},
	}}
}

// serving is real servers that answer clients outside by the NIC: alone, and beside a
// neighbour that sends as much as it can. All containers are on CPU 0, the clients on CPU 1.
func serving() []trafficSetup {
	set := rules{"many": "{net.weight: 1, net.priority: 1}", "server": "{net.rate: 400mbit, net.priority: 0, net.latency: 2ms}"}
	tc := []rig.Class{{Container: 0, Rate: 500 * mbit, Ceil: gbit, Prio: 1}, {Container: 1, Rate: 400 * mbit, Ceil: gbit}}
	neighbours := []struct {
		name string
		send []sending
	}{{"alone", nil}, {"beside bulk", []sending{bulk("many", 6)}}, {"beside super-packets", []sending{superflood("many")}}}
	var all []trafficSetup
	for _, quota := range []float64{0, 50} {
		su := trafficSetup{name: "service", path: rig.NIC, link: gbit, boxes: []string{"many", "server"}}
		if quota > 0 {
			su.name, su.quotas = fmt.Sprintf("service %v", quota), map[string]float64{"server": quota}
		}
		for _, s := range []rig.Service{rig.Redis, rig.Nginx} {
			for _, n := range neighbours {
				server := sending{name: "server", rate: load.Flood, service: s, size: rig.PageSize}
				su.cases = append(su.cases, trafficCase{
					name: string(s) + " " + n.name, send: append(n.send, server), probe: "server", set: set, tc: tc,
				})
			}
		}
		if quota == 0 {
			su.cases = append(su.cases, trafficCase{
				name: "nginx ceil", ceil: 100 * mbit,
				send: []sending{{name: "server", rate: load.Flood, service: rig.Nginx, size: rig.LargePage}},
				set:  rules{"server": "net.ceil: 100mbit"}, tc: []rig.Class{{Container: 1, Rate: 100 * mbit, Ceil: 100 * mbit}},
			})
		}
		all = append(all, su)
	}
	return all
}
