package bench

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/fairlead-project/fairlead/lab/load"
	"github.com/fairlead-project/fairlead/lab/rig"
)

// setup is a rig with its cases.
type setup struct {
	name string
	cfg  rig.Config
	// compute makes all neighbours without packets compute, in the base and in the
	// cases (Iron, section 2). Otherwise they are idle.
	compute bool
	alone   bool // the victim is idle, so there is no penalty
	// accounts compares an agent that only keeps accounts (on) with no agent (off).
	accounts bool
	// mode overrides Options.Mode, unless it is "".
	mode string
	// timed adds a stopwatch that measures softirqs independently of the accounts.
	timed bool
	// service is a real server that runs as the victim, with clients in the container
	// serviceClient; "" is none. There is no penalty then, and no base.
	service rig.Service
	// settled is the time of load before a window; 0: as the mode needs.
	settled time.Duration
	// protect is the prefix of the names of the protected containers; "" protects all.
	protect string
	demands []demand
}

// demand is one case: the load of the neighbours, beside a victim that computes. The zero
// value is the base, without traffic.
type demand struct {
	name    string
	traffic rig.Traffic
	rate    uint64 // total packets per second, or load.Flood
	shape   uint64 // bit/s of an HTB at the NIC; 0: none
	long    int    // windows are this many times longer; 0 is 1
	quick   bool   // also with Options.Quick
	// busy, if not 0, replaces rate. The rate is then such that an unprotected receiver
	// with the whole CPU uses this fraction of it.
	busy float64
	// xdp makes the protection drop in the driver of the NIC, not by tc.
	xdp bool
	// lift removes the neighbours' quotas while the protection is off.
	lift bool
	// idle keeps the neighbours idle, although the setup makes them compute.
	idle bool
	// control makes off the control of a flood. Off is then protected, too, but the neighbours compute,
	// and all packets from outside are dropped before the host.
	control bool
}

// base is the case that the other cases of a setup are compared with.
func (su setup) base() demand {
	if su.compute {
		return demand{name: "cpu"}
	}
	return demand{name: "idle"}
}

// catalogue holds every case of the netcpu experiment.
func catalogue() []setup {
	all := pairs(rig.Hop, rig.NIC)
	for _, part := range [][]setup{udpSenders(), tcpSenders(), receivers(), caps(), {heavy(), drops()}, costs(), observed(), accuracy(), charged(), {idle(), calm(), watched(), watchedService()}, services()} {
		all = append(all, part...)
	}
	return all
}

var (
	floods = []demand{
		{name: "100k", traffic: rig.Traffic{Kind: rig.UDP}, rate: 100_000},
		{name: "200k", traffic: rig.Traffic{Kind: rig.UDP}, rate: 200_000},
		{name: "400k", traffic: rig.Traffic{Kind: rig.UDP}, rate: 400_000},
		{name: "flood", traffic: rig.Traffic{Kind: rig.UDP}, rate: load.Flood, quick: true},
		{name: "overrun", traffic: rig.Traffic{Kind: rig.Overrun}, rate: load.Flood},
	}
	others = []demand{
		{name: "tcp", traffic: rig.Traffic{Kind: rig.TCP}, rate: load.Flood, quick: true},
		{name: "udp-rr", traffic: rig.Traffic{Kind: rig.UDPRR}, rate: load.Flood},
		{name: "tcp-rr", traffic: rig.Traffic{Kind: rig.TCPRR}, rate: load.Flood, quick: true},
	}
)

// pairs are a victim and one receiver, on several paths: the basic cost of packets.
func pairs(paths ...rig.Path) []setup {
	var all []setup
	for _, path := range paths {
		uneven := slices.Clone(floods)
		for i := range uneven {
			uneven[i].quick = false
		}
		all = append(all,
			setup{name: string(path) + " 50/50", cfg: rig.Config{Path: path, Containers: rig.Pair(50, 50)}, demands: slices.Concat(floods, others)},
			setup{name: string(path) + " 80/20", cfg: rig.Config{Path: path, Containers: rig.Pair(80, 20)}, demands: uneven},
		)
	}
	return all
}

// level is a rate with its name: in packets, or bits, per second.
type level struct {
	name string
	rate uint64
}

// udpSenders are Iron's figures 1 and 7.
func udpSenders() (all []setup) {
	for _, n := range []int{2, 3, 6, 10} {
		su := setup{name: fmt.Sprintf("udp-send %d", n), cfg: rig.Config{Path: rig.NIC, Containers: rig.Equal(n)}, compute: true}
		for _, shape := range []level{{"500M", 500e6}, {"1G", 1e9}, {"2G", 2e9}, {"inf", 0}} {
			su.demands = append(su.demands, demand{
				name: shape.name, traffic: rig.Traffic{Kind: rig.UDP, Out: true}, rate: load.Flood, shape: shape.rate,
				quick: n == 10 && shape.name == "1G",
			})
		}
		all = append(all, su)
	}
	return all
}

// tcpSenders are figures 3 and 8.
func tcpSenders() (all []setup) {
	for _, n := range []int{2, 10} {
		su := setup{name: fmt.Sprintf("tcp-send %d", n), cfg: rig.Config{Path: rig.NIC, Containers: rig.Equal(n)}, compute: true}
		for _, by := range []struct {
			flows   int
			control string
		}{{10, ""}, {100, ""}, {100, "bbr"}} {
			for _, shape := range []level{{"1G", 1e9}, {"inf", 0}} {
				su.demands = append(su.demands, demand{
					name:    strings.TrimSpace(fmt.Sprintf("%d flows %s %s", by.flows, shape.name, by.control)),
					traffic: rig.Traffic{Kind: rig.TCP, Out: true, Conns: by.flows, Congestion: by.control}, rate: load.Flood, shape: shape.rate,
					quick: n == 10 && by.flows == 100 && shape.rate > 0 && by.control == "",
				})
			}
		}
		all = append(all, su)
	}
	return all
}

// receivers are figures 4 and 9 (UDP), 5 and 11 (TCP).
func receivers() []setup {
	const containers = 8
	udp := setup{name: "udp-recv", cfg: rig.Config{Path: rig.NIC, Containers: rig.Equal(containers)}, compute: true}
	tcp := udp
	tcp.name = "tcp-recv"
	for _, n := range []int{1, 4, 7} {
		for _, rate := range []level{{"100k", 100_000}, {"200k", 200_000}, {"400k", 400_000}, {"flood", load.Flood}} {
			udp.demands = append(udp.demands, demand{
				name:    fmt.Sprintf("%d of %d %s", n, containers, rate.name),
				traffic: rig.Traffic{Kind: rig.Overrun, Neighbours: n}, rate: rate.rate,
				quick: n == 7 && rate.rate >= 400_000,
			})
		}
		for _, flows := range []int{10, 100} {
			tcp.demands = append(tcp.demands, demand{
				name:    fmt.Sprintf("%d of %d %d flows", n, containers, flows),
				traffic: rig.Traffic{Kind: rig.TCP, Neighbours: n, Conns: flows}, rate: load.Flood,
				quick: n == 7 && flows == 100,
			})
		}
	}
	return []setup{udp, tcp}
}

// caps is figure 12: three containers of 30 % leave a tenth of the CPU.
func caps() []setup {
	return []setup{{
		name: "cap 3x30",
		cfg:  rig.Config{Path: rig.NIC, Containers: []rig.Container{{Name: "victim", Quota: 30}, {Name: "n1", Quota: 30}, {Name: "n2", Quota: 30}}}, compute: true,
		demands: []demand{
			{name: "udp-send", traffic: rig.Traffic{Kind: rig.UDP, Out: true}, rate: load.Flood, shape: 1e9, long: 3},
			{name: "udp-recv", traffic: rig.Traffic{Kind: rig.Overrun}, rate: 400_000, long: 3, quick: true},
		},
	}}
}

// heavy is section 4.2: a receiver that needs 35 % of a CPU loses nothing when it is
// limited to 35 %.
func heavy() setup {
	return setup{
		name: "heavy 35",
		cfg:  rig.Config{Path: rig.NIC, Containers: rig.Pair(50, 35)}, alone: true,
		demands: []demand{{name: "udp", traffic: rig.Traffic{Kind: rig.Overrun}, busy: 0.35, lift: true, long: 2, quick: true}},
	}
}

// drops is figure 13: the places to drop a packet to a receiver without CPU time, by tc or in the
// driver.
func drops() setup {
	su := setup{name: "drop", cfg: rig.Config{Path: rig.NIC, Containers: rig.Equal(8)}, compute: true}
	for _, rate := range []level{{"200k", 200_000}, {"400k", 400_000}} {
		d := demand{name: rate.name + " fairlead", traffic: rig.Traffic{Kind: rig.Overrun}, rate: rate.rate}
		su.demands = append(su.demands, d)
		d.name, d.xdp = d.name+" xdp", true
		su.demands = append(su.demands, d)
	}
	return su
}

// costs is table 1: the cost of receiving a packet by UDP, by TCP and by UDP in a tunnel,
// at a rate without loss and with the whole CPU for the receiver.
func costs() []setup {
	const quota = 90
	cfg := func(p rig.Path) rig.Config {
		return rig.Config{Path: p, Containers: []rig.Container{{Name: "victim", Quota: 100 - quota}, {Name: "receiver", Quota: quota}}}
	}
	udp := demand{name: "udp", traffic: rig.Traffic{Kind: rig.Overrun}, rate: 50_000, quick: true}
	tcp := demand{name: "tcp", traffic: rig.Traffic{Kind: rig.TCP}, rate: load.Flood, quick: true}
	return []setup{
		{name: "cost nic", cfg: cfg(rig.NIC), alone: true, demands: []demand{udp, tcp}},
		{name: "cost vxlan", cfg: cfg(rig.VXLAN), alone: true, demands: []demand{udp, tcp}},
	}
}

// charged are some of the cases above in the mode charge, whatever the options say. In one case
// containers have no quotas, so that their weights change instead. Others show how soon charge and
// auto act.
func charged() []setup {
	all := []setup{{
		name: "charge udp-send 10",
		cfg:  rig.Config{Path: rig.NIC, Containers: rig.Equal(10)}, compute: true, mode: "charge",
		demands: []demand{{name: "2G", traffic: rig.Traffic{Kind: rig.UDP, Out: true}, rate: load.Flood, shape: 2e9}},
	}, {
		name: "charge cap 3x30",
		cfg:  caps()[0].cfg, compute: true, mode: "charge",
		demands: []demand{{name: "udp-recv", traffic: rig.Traffic{Kind: rig.Overrun}, rate: 400_000}},
	}, {
		name: "charge no quotas",
		cfg:  rig.Config{Path: rig.NIC, Containers: rig.Pair(0, 0)}, compute: true, mode: "charge",
		demands: []demand{{name: "100k", traffic: rig.Traffic{Kind: rig.Overrun}, rate: 100_000}},
	}}
	for _, mode := range []string{"charge", "auto"} {
		// Seconds 4 to 12 after the start of the senders.
		all = append(all, setup{
			name: mode + " udp-send 4",
			cfg:  rig.Config{Path: rig.NIC, Containers: rig.Equal(4)}, compute: true, mode: mode, settled: 4 * time.Second,
			demands: []demand{{name: "300M", traffic: rig.Traffic{Kind: rig.UDP, Out: true}, rate: load.Flood, shape: 300e6, long: 4}},
		})
	}
	return all
}

// idle is the agent's own cost beside containers that do nothing. Off is an agent that
// only observes them.
func idle() setup {
	all := rig.Equal(100)
	for i := range all {
		all[i].Quota = 0 // with a quota of 1 % a sandbox starts slowly
	}
	return setup{
		name: "agent",
		cfg:  rig.Config{Path: rig.NIC, Containers: all}, alone: true,
		demands: []demand{{name: fmt.Sprintf("%d idle", len(all)), long: 3}}, // the agent has just begun
	}
}

// calm is the cost of isolation for a container that is not flooded. Another container on its bridge,
// such as Docker's, sends it bulk, or one request after the other. Off is a container that is only
// observed.
func calm() setup {
	rr := func(kind rig.Kind) rig.Traffic { return rig.Traffic{Kind: kind, Within: true, Conns: 1} }
	return setup{
		name: "calm",
		cfg: rig.Config{Path: rig.NIC, Unsteered: true, Containers: []rig.Container{
			{Name: "client", CPU: rig.SenderCPU}, {Name: "at-server"},
		}},
		alone: true, protect: "at-", settled: 5 * time.Second,
		demands: []demand{
			{name: "tcp", traffic: rig.Traffic{Kind: rig.TCP, Within: true}, rate: load.Flood},
			{name: "tcp-rr", traffic: rr(rig.TCPRR), rate: load.Flood},
			{name: "udp-rr", traffic: rr(rig.UDPRR), rate: load.Flood},
			{name: "udp 10k", traffic: rig.Traffic{Kind: rig.UDP, Within: true}, rate: 10_000},
		},
	}
}

// accuracy checks the accounts. The agent only keeps them, and two neighbours receive packets of
// one size, the first neighbour three times as many. No CPU sends another an IPI, so softirqs are
// the whole cost of a packet.
func accuracy() []setup {
	at := func(name string, rate uint64) demand {
		return demand{name: name, traffic: rig.Traffic{Kind: rig.UDP, Uneven: true}, rate: rate}
	}
	// At 2,000 packets per second the accounts sample every run, at the other rates only
	// some. Behind a tunnel they sample all.
	few, many, flood := at("2k", 2_000), at("20k", 20_000), at("flood", load.Flood)
	rates := map[rig.Path][]demand{
		rig.Hop: {many}, rig.NIC: {few, many, flood}, rig.VXLAN: {many, flood}, rig.Macvlan: {many},
	}
	var all []setup
	for _, path := range []rig.Path{rig.Hop, rig.NIC, rig.VXLAN, rig.Macvlan} {
		cfg := rig.Config{Path: path, Unsteered: true, Containers: []rig.Container{{Name: "victim"}, {Name: "first"}}}
		if path != rig.Hop {
			cfg.Containers = append(cfg.Containers, rig.Container{Name: "second"})
		}
		all = append(all, setup{
			name: "charges " + string(path),
			cfg:  cfg, alone: true, accounts: true, timed: true,
			demands: rates[path],
		})
	}
	return all
}

// observed measures the cost of the accounts. On is an agent that only keeps accounts, off is
// no agent. The victim and the receiver share the CPU without quotas. At the two rates most
// softirqs handle one packet; in a flood a poll handles several. Packets take the victim's time, so
// the programs stay attached.
func observed() []setup {
	flood := demand{name: "flood", traffic: rig.Traffic{Kind: rig.UDP}, rate: load.Flood}
	at := func(rate uint64) demand {
		return demand{name: fmt.Sprintf("%dk", rate/1000), traffic: rig.Traffic{Kind: rig.UDP}, rate: rate}
	}
	var all []setup
	for _, path := range []rig.Path{rig.Hop, rig.NIC, rig.VXLAN} {
		all = append(all, setup{
			name: "accounts " + string(path),
			cfg:  rig.Config{Path: path, Containers: rig.Pair(100, 100)}, accounts: true,
			demands: []demand{at(2_000), at(20_000), flood},
		})
	}
	return all
}

// watched is the cost of the accounts for a container that takes no time from others, so that accounts
// are kept by windows. Another container on its bridge, such as Docker's, sends it packets.
func watched() setup {
	su := calm()
	su.name = "watched"
	su.accounts, su.protect, su.settled = true, "", 3*time.Second
	su.demands = append(su.demands, demand{name: "flood", traffic: rig.Traffic{Kind: rig.Overrun, Within: true}, rate: load.Flood})
	return su
}

// watchedService is like watched for a real server with a client in a container on its bridge.
func watchedService() setup {
	return setup{
		name: "watched nginx",
		cfg: rig.Config{Path: rig.NIC, Unsteered: true, Containers: []rig.Container{
			{Name: "server"}, {Name: "idle"}, {Name: "client", CPU: rig.SenderCPU},
		}},
		service: rig.Nginx, settled: serviceSettled, alone: true, accounts: true,
		demands: []demand{{name: "alone", idle: true}},
	}
}

// serviceConns is the number of requests in flight. serviceSettled is the time until the nice value of
// a server's NAPI threads has settled.
const (
	serviceConns   = 16
	serviceSettled = 4 * time.Second
)

// services are real servers on CPU 0, with a client in a container on CPU 1, on a bridge like
// Docker's. RPS is off, so the CPU that sends packets also receives them. A neighbour on CPU 0 is
// idle, computes, or is flooded from CPU 1. Only the server and the neighbour are protected.
//
// The flood takes time from the client's CPU, whatever the host does. Therefore the control (off) has
// the same flood and the same protection, but the flood is dropped before the host, and the neighbour
// computes.
func services() []setup {
	flooded := func(name string, rate uint64) demand {
		return demand{name: "beside " + name, traffic: rig.Traffic{Kind: rig.UDP, Neighbours: 1, Fair: true}, rate: rate, control: true}
	}
	var all []setup
	for _, service := range []rig.Service{rig.Redis, rig.Memcache, rig.Nginx, rig.Postgres} {
		for _, quota := range []float64{20, 50, 100} {
			for _, mode := range []string{"isolate", "auto"} {
				all = append(all, setup{
					name: fmt.Sprintf("%s %v %s", service, quota, mode),
					cfg: rig.Config{Path: rig.NIC, Unsteered: true, Containers: []rig.Container{
						{Name: "at-server", Quota: quota}, {Name: "at-neighbour", Quota: 50}, {Name: "client", CPU: rig.SenderCPU},
					}},
					service: service, settled: max(serviceSettled, settle(mode)), protect: "at-", mode: mode, compute: true, alone: true,
					demands: []demand{
						{name: "alone", idle: true},
						{name: "beside cpu"},
						flooded("150k", 150_000), flooded("400k", 400_000), flooded("flood", load.Flood),
					},
				})
			}
		}
	}
	return all
}

// serviceClient is the index of the client among the containers of services.
const serviceClient = 2
