package bench

import (
	"slices"

	"github.com/fairlead-project/fairlead/lab/report"
	"github.com/fairlead-project/fairlead/lab/rig"
)

// trafficBars are the bars for the figures of Traffic. The bounds of a rate are computed
// from frames, since the receiver's program counts payload: see docs/bench.md, which also
// has the measured figures.
func trafficBars() []report.Bar {
	var bars []report.Bar
	for _, mode := range []string{"bridge", "overlay", "macvlan", "host"} {
		bars = append(bars, uplinkBars(mode)...)
	}
	return slices.Concat(bars, elsewhereBars(), changeBars(), trafficServiceBars(), slowedAtUplinkBars())
}

// around is a bar for a figure with an expected value. It may deviate from that by the
// fraction off; beyond the fraction far noise is no explanation.
func around(c, metric string, due, off, far float64, why string) report.Bar {
	return within(c, metric, due*(1-off), due*(1+off), due*(1-far), due*(1+far), why)
}

// The fraction of a frame that is payload, for full frames of TCP and for datagrams of 1400
// bytes, and the fraction of that inside a tunnel.
const (
	ofTCP  = 1448. / 1514
	ofUDP  = 1400. / 1442
	tunnel = 0.966
)

// uplinkBars are the bars for traffic from containers of a network mode to the uplink.
func uplinkBars(mode string) []report.Bar {
	inside := 1.
	if mode == "overlay" {
		inside = tunnel
	}
	const full = "An uplink that is divided carries less than it can"
	bars := []report.Bar{
		around(mode+" 6 to 1", ShareOf+"one", 0.5, 0.05, 0.2, "Containers of equal weight share an uplink by their connections"),
		noMore(mode+" 6 to 1", ShareOf+"one", "off", 0.3, 0.4, "One connection beside six gets its share with nothing done, so that the case does not show what weights do"),
		around(mode+" 6 to 1", Total, gbit*ofTCP*inside, 0.04, 0.25, full),
		around(mode+" 6 to 1, weights 1 to 2", ShareOf+"one", 2./3, 0.05, 0.2, "An uplink is not shared by weight"),
		around(mode+" rate beside flood", ReceivedBy+"one", 300*mbit*ofTCP*inside, 0.05, 0.25, "A guaranteed rate is not kept beside a neighbour's flood"),
		around(mode+" UDP rate beside bulk", ReceivedBy+"one", 300*mbit*ofUDP*inside, 0.05, 0.25, "A container's flood gets another rate than its own"),
		within(mode+" ceil", WorstSecond, 0.95, 1.02, 0.7, 1.2, "A ceil lets another rate than its own leave by the NIC"),
		within(mode+" ceil", FirstSecond, 0.9, 1.02, 0.5, 1.2, "A ceil does not hold from the first packet on"),
		around(mode+" priority", ShareOf+"one", 0.9, 0.05, 0.25, "The first in order does not get what is idle"),
	}
	for _, beside := range []string{"bulk", "flood", "super-packets"} {
		bars = append(bars, atMost(mode+" requests beside "+beside, QueueP999, 0.002, 0.01, "A packet waits at the uplink for longer than the latency that it is due"))
	}
	return append(bars, atMost(mode+" requests beside bulk", P50, 0.002, 0.02, "Requests wait behind a neighbour's bulk TCP"))
}

// elsewhereBars are the bars for received traffic, and for traffic within the host.
func elsewhereBars() []report.Bar {
	const unlike = "A ceil on what a container receives lets another rate than its own through"
	const near = "A ceil lets another rate than its own through to a neighbour"
	return []report.Bar{
		around("ingress 6 to 1", ShareOf+"one", 0.5, 0.1, 0.25, "Containers of equal weight share what an uplink receives by their connections"),
		around("ingress 6 to 1", Total, 950*mbit*ofTCP, 0.06, 0.3, "An uplink receives less than it can while that is divided"),
		around("ingress ceil", ReceivedBy+"one", 100*mbit*ofTCP, 0.05, 0.25, unlike),
		around("ingress UDP ceil", ReceivedBy+"one", 100*mbit*ofUDP, 0.05, 0.25, unlike),
		around("neighbour ceil", ReceivedBy+"one", 100*mbit*ofTCP, 0.05, 0.25, near),
		around("neighbour UDP ceil", ReceivedBy+"one", 100*mbit*ofUDP, 0.05, 0.25, near),
		around("bridge 80 to 20", ShareOf+"one", 0.2, 0.1, 0.5, "Guaranteed rates do not divide an uplink"),
		around("bridge 80 to 20", Total, gbit*ofTCP, 0.04, 0.25, "An uplink that is divided carries less than it can"),
		noLess("alone bulk", Total, "ratio", 0.85, 0.6, "One container alone pays more for being shaped than the one queue costs"),
		noMore("alone requests", P50, "ratio", 1.15, 1.5, "A request alone takes longer because its container is shaped"),
	}
}

// changeBars are the bars for the delay of a change, and for the shares after it.
func changeBars() []report.Bar {
	const late, wrong = "A change takes long to be in force while containers send", "After a change the shares are not those that are due"
	share := func(phase, of string, due float64) report.Bar {
		return around("changes start and stop", phase+": "+ShareOf+of, due, 0.1, 0.3, wrong)
	}
	order := func(metric string) report.Bar {
		return around("changes priority changes", metric, 0.9, 0.05, 0.25, "A change of the order does not count for a container that is sending")
	}
	return []report.Bar{
		share("w1 w2 r3", "w2", 0.4), share("w1 w2 r3", "r3", 0.4),
		share("r3 ends", "w1", 1./3), share("r3 ends", "w2", 2./3),
		share("r4 starts", "w1", 0.76/3), share("r4 starts", "w2", 0.76*2/3), share("r4 starts", "r4", 0.24),
		atMost("changes start and stop", Settling+"r3 ends", 0.6, 1.5, late),
		atMost("changes start and stop", Settling+"r4 starts", 0.6, 1.5, late),
		order("w2 first: " + ShareOf + "w2"), order("a pause: " + ShareOf + "w2"),
		atMost("changes priority changes", Settling+"w2 first", 0.8, 1.5, late),
		atMost("docker in force", InForce+"a policy file", 0.15, 1, late),
		atMost("docker in force", InForce+"fairlead set", 0.15, 1, late),
		atMost("docker in force", InForce+"docker start", 1.5, 4, late),
	}
}

// trafficServiceBars are the bars for real servers beside neighbours. They compare with the arm
// without protection in the same round, because the servers' own speed depends on the machine. They
// use the median, because a quota makes the slowest requests wait for the next period.
func trafficServiceBars() (bars []report.Bar) {
	const few, late = "A server with a rate is held up by a neighbour's traffic", "Answers of a server with a latency wait behind a neighbour's traffic"
	for _, su := range serving() {
		for _, s := range []rig.Service{rig.Redis, rig.Nginx} {
			name := su.name + " " + string(s)
			bars = append(bars,
				noLess(name+" alone", Requests, "ratio", 0.7, 0.4, "A server alone answers less because its container is shaped"),
				noLess(name+" beside bulk", Requests, "ratio", 10, 2, few),
				noMore(name+" beside bulk", P50, "ratio", 0.2, 0.8, late),
				noMore(name+" beside super-packets", P99, "ratio", 0.2, 0.8, late))
		}
	}
	// The NIC counts the headers of a super-packet once.
	return append(bars,
		within("service nginx ceil", WorstSecond, 0.9*ofTCP, 1.02, 0.7, 1.2, "A ceil lets another rate than its own leave by the NIC"),
		within("service nginx ceil", FirstSecond, 0.9*ofTCP, 1.02, 0.5, 1.2, "A ceil does not hold from the first packet on"))
}
