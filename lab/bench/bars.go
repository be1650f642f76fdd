package bench

import (
	"fmt"
	"math"
	"slices"
	"strings"

	"github.com/fairlead-project/fairlead/lab/report"
	"github.com/fairlead-project/fairlead/lab/rig"
)

// netcpuBars bound three things: the penalty of a victim under isolate and charge, the loss
// of the receivers, and the agent's own cost. The limits leave room above the figures in
// docs/measured.md.
func netcpuBars() []report.Bar {
	const (
		receives = "An isolated receiver's packets take a victim's time"
		nothing  = "The packets cost an unprotected victim next to nothing, so that the case does not show what protection does"
		less     = "A receiver gets far fewer packets isolated than it does unprotected"
		charged  = "A victim does not get back what the packets of those that are charged took from it"
		calm     = "Isolation costs a container that nobody floods"
		idle     = "The agent takes too much for itself while nothing happens"
	)
	var bars []report.Bar
	for _, way := range []string{"hop", "nic"} {
		for _, quotas := range []string{" 50/50 ", " 80/20 "} {
			for _, rate := range []string{"200k", "400k", "flood"} {
				bars = append(bars, atMost(way+quotas+rate, Penalty, 1.15, 1.6, receives))
			}
			bars = append(bars,
				atMost(way+quotas+"100k", Penalty, 1.4, 1.8, receives), // wakeups, each an interrupt
				noLess(way+quotas+"flood", Penalty, "off", 1.5, 1.2, nothing),
				noLess(way+quotas+"100k", Received, "ratio", 0.8, 0.5, less))
		}
		bars = append(bars,
			noLess(way+" 50/50 tcp-rr", Requests, "ratio", 0.75, 0.4, "Requests to an isolated receiver take much longer"),
			noLess(way+" 50/50 udp-rr", Requests, "ratio", 0.75, 0.4, "Requests to an isolated receiver take much longer"))
	}
	for _, c := range []string{"1 of 8 400k", "4 of 8 400k", "7 of 8 400k", "7 of 8 flood"} {
		bars = append(bars, atMost("udp-recv "+c, Penalty, 1.2, 1.6, receives))
	}
	bars = append(bars, serviceBars()...)
	return append(bars,
		noLess("udp-recv 7 of 8 400k", Penalty, "off", 1.5, 1.2, nothing),
		atMost("cap 3x30 udp-recv", Penalty, 1.15, 1.6, receives),
		atMost("drop 400k fairlead", Penalty, 1.15, 1.6, "What an isolated receiver has no time for is not dropped before it takes a victim's"),
		atMost("drop 400k fairlead xdp", Penalty, 1.15, 1.6, "What an isolated receiver has no time for is not dropped in the driver"),
		noLess("heavy 35 udp", Received, "ratio", 0.9, 0.6, less),
		within("heavy 35 udp", CPUUsed, 0.3, 0.4, 0.2, 0.6, "A quota as large as what a receiver needs does not hold it to that"),

		atMost("charge udp-send 10 2G", Penalty, 1.15, 1.45, charged),
		noLess("charge udp-send 10 2G", Penalty, "off", 1.3, 1.1, nothing),
		atMost("charge cap 3x30 udp-recv", Penalty, 1.2, 2, charged),
		noMore("charge no quotas 100k", Penalty, "ratio", 0.75, 1, charged), // work in softirqs has no weight

		atMost("charge udp-send 4 300M", Penalty, 1.1, 1.5, charged),
		atMost("auto udp-send 4 300M", Penalty, 1.1, 1.6, charged),
		noLess("charge udp-send 4 300M", Penalty, "off", 1.3, 1.1, nothing),

		noLess("calm tcp", Received, "ratio", 0.95, 0.7, calm),
		noLess("calm tcp-rr", Requests, "ratio", 0.95, 0.7, calm),
		noLess("calm udp-rr", Requests, "ratio", 0.95, 0.7, calm),

		noMore("agent 100 idle", AgentCPU, "off", 0.1, 0.4, idle),
		noMore("agent 100 idle", AgentCPU, "on", 0.1, 0.4, idle),
		noMore("agent 100 idle", AgentMemory, "on", 120<<20, 240<<20, idle),
	)
}

// serviceBars limit the cost of protection for a real server: alone with its client, and beside a
// neighbour's flood.
func serviceBars() []report.Bar {
	const (
		lost   = "TCP learns by a loss that a quota is used up"
		late   = "A request waits longer than its own quota makes it wait"
		idle   = "A mode acts although nobody else is there"
		beside = "A server does less beside a flood to its neighbour than beside one that computes"
	)
	var bars []report.Bar
	for _, service := range []rig.Service{rig.Redis, rig.Memcache, rig.Nginx} {
		for _, quota := range []float64{20, 50, 100} {
			for _, mode := range []string{"isolate", "auto"} {
				alone := fmt.Sprintf("%s %v %s alone", service, quota, mode)
				bars = append(bars, atMost(alone, Retransmitted, 0, 100, lost), atMost(alone, Longest, 0.15, 0.6, late),
					noLess(alone, Requests, "ratio", 0.97, 0.7, idle))
			}
		}
	}
	for _, rate := range []string{"150k", "400k", "flood"} {
		for _, mode := range []string{"isolate", "auto"} {
			bars = append(bars, noLess(fmt.Sprintf("redis 50 %s beside %s", mode, rate), Requests, "ratio", 0.95, 0.6, beside))
		}
	}
	return bars
}

// atMost returns a bar for a figure with the protection on for which less is better.
func atMost(name, metric string, high, far float64, why string) report.Bar {
	return noMore(name, metric, "on", high, far, why)
}

// within returns a bar for a figure with the protection on that has to be in a range.
func within(name, metric string, low, high, farLow, farHigh float64, why string) report.Bar {
	return report.Bar{Case: name, Metric: metric, Of: "on", Low: low, High: high, FarLow: farLow, FarHigh: farHigh, Why: why}
}

func noMore(name, metric, of string, high, far float64, why string) report.Bar {
	return report.Bar{Case: name, Metric: metric, Of: of, High: high, FarHigh: far, Why: why}
}

// upTo is like noMore for a figure that may be negative.
func upTo(name, metric, of string, high, far float64, why string) report.Bar {
	b := noMore(name, metric, of, high, far, why)
	b.Low, b.FarLow = math.Inf(-1), math.Inf(-1)
	return b
}

func noLess(name, metric, of string, low, far float64, why string) report.Bar {
	inf := math.Inf(1)
	return report.Bar{Case: name, Metric: metric, Of: of, Low: low, High: inf, FarLow: far, FarHigh: inf, Why: why}
}

// accountBars bound the errors of the accounts.
func accountBars() []report.Bar {
	all := []report.Bar{
		within("cost nic udp", Balance, 0.98, 1.02, 0.85, 1.15, "The accounts lose packet work that comes by NIC and bridge, or charge it twice"),
		within("cost vxlan udp", Balance, 0.98, 1.02, 0.85, 1.15, "The accounts lose packet work that comes by a tunnel, or charge it twice"),
	}
	for _, su := range accuracy() {
		for _, d := range su.demands {
			name := su.name + " " + d.name
			all = append(all,
				within(name, OfStopwatch, 0.95, 1.1, 0.8, 1.4, "The accounts measure another time than softirqs take"),
				within(name, SystemPart, 0, 0.15, 0, 0.4, "Packets of containers are charged to the system"))
			if len(su.cfg.Containers) > 2 {
				all = append(all, within(name, Price, 0.85, 1.15, 0.6, 1.6, "One container is charged for another's packets"))
			}
		}
	}
	const (
		metering = "Metering the packets of a robber costs more than it may"
		watching = "Watching slows a container although its packets take nobody's time"
	)
	for _, su := range observed() {
		all = append(all, atMost(su.name+" 20k", AccountsCost, 300e-9, 5e-6, metering))
	}
	for _, d := range watched().demands {
		metric := Received
		if strings.HasSuffix(string(d.traffic.Kind), "-rr") {
			metric = Requests
		}
		all = append(all, noLess("watched "+d.name, metric, "ratio", 0.99, 0.9, watching))
	}
	return append(all, noLess("watched nginx alone", Requests, "ratio", 0.99, 0.9, watching))
}

const slowedWrong = "The agent says another loss than the victim has by its own count"

// slowedBars demand that the agent's slowed is right within five points, with and without protection.
// They leave out one hop from a sender on the same host: docs/slowed.md.
func slowedBars(cases ...string) (bars []report.Bar) {
	for _, c := range cases {
		bars = append(bars, noMore(c, SlowedOff, "off", slowedBar, slowedFar, slowedWrong), noMore(c, SlowedOff, "on", slowedBar, slowedFar, slowedWrong))
	}
	return bars
}

// slowedAtUplinkBars demand the same for containers that share an uplink by policy, and for bulk that
// shares an uplink without policy.
func slowedAtUplinkBars() []report.Bar {
	bars := slowedBars("bridge 6 to 1", "host 6 to 1")
	for _, phase := range []string{"w1 w2 r3", "r3 ends", "r4 starts"} {
		bars = append(bars, noMore("changes start and stop", phase+": "+SlowedOff, "on", slowedBar, slowedFar, slowedWrong))
	}
	return bars
}

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

// around returns a bar for a figure with an expected value. The figure may deviate by the
// fraction off. Noise does not explain a deviation above the fraction far.
func around(c, metric string, due, off, far float64, why string) report.Bar {
	return within(c, metric, due*(1-off), due*(1+off), due*(1-far), due*(1+far), why)
}

// The fraction of payload in a frame, for full frames of TCP and for datagrams of 1400 bytes,
// and the fraction of that in a tunnel.
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

// latencyBars are the bars for the figures of Latency.
func latencyBars() []report.Bar {
	const us = 1e-6
	var all []report.Bar
	covered := func(in string, low float64) report.Bar {
		return within(in, Covered, low, 1, 0.9, 1.01, "Packets are not measured from end to end")
	}
	for _, c := range latencyCatalogue() {
		switch {
		case c.flood:
			all = append(all, noLess(c.name, Rate, "ratio", 0.99, 0.8, "Histograms slow down packets from container to container"))
		case c.covers == bulkTCP:
			all = append(all, covered(c.name, 0.99))
		case c.covers != "":
			all = append(all, covered(c.name, 0.999))
		case c.crowd:
			all = append(all,
				upTo(c.name, medianStep, "on", 5*us, 50*us, "A corrected round trip is not the one at the uplink"),
				upTo(c.name, worstStep, "on", 20*us, 2000*us, "Beside some number of neighbours a corrected round trip is far from the one at the uplink"))
		default:
			all = append(all,
				upTo(c.name, Bias, "checked", 5*us, 50*us, "A corrected round trip is not the one at the uplink"),
				upTo(c.name, WorstBias, "checked", 20*us, 2000*us, "Some corrected round trip is far from the one at the uplink"),
				upTo(c.name, Perturbation, "on", 2*us, 20*us, "Histograms make round trips longer"),
				upTo(c.name, Perturbation, "records", 5*us, 50*us, "Records of single packets make round trips longer"),
				upTo(c.name, AgainstFtrace, "on", 0, 20*us, "Histograms make round trips longer than the kernel's own tracer does"),
				upTo(c.name, AgainstFtrace, "records", 0, 50*us, "Records of single packets make round trips longer than the kernel's own tracer does"),
				covered(c.name, 0.999))
		}
	}
	return all
}

const blockioTakes = "The neighbours take nothing with nothing done, so that the case does not show what a reservation does"

// blockioBars are the bars for the figures of BlockIO.
func blockioBars() (bars []report.Bar) {
	for _, c := range blockioCatalogue() {
		switch {
		case c.rig.own > 0:
			bars = append(bars, detectionBars(c.name)...)
		case c.rig.oneKey:
			bars = append(bars, oneKeyBars(c)...)
		case c.rig.service != "":
			bars = append(bars, databaseBars(c.name, PartOfTransactions, 0.8, 5)...)
		case c.rig.yield && c.rig.burners > 0:
			bars = append(bars, besideBars(c.name)...)
		case len(c.rig.tenants) > 1:
			bars = append(bars,
				noLess(c.name, MetShare, "on", 0.95, 0.5, "A reservation is not met beside others at the same disk"),
				atMost(c.name, SettledIn, 3, 10, "A change of reservations takes long to be in force"),
				noLess(c.name, Refused, "on", 1, 1, "More is reserved than the disk can do"))
		case c.rig.streams > 0:
			bars = append(bars,
				noLess(c.name, PartOfDue, "on", 1, 0.7, "A mail server gets less than it has reserved beside containers that decode and send"),
				noMore(c.name, PartOfDue, "off", 0.95, 1.2, blockioTakes))
		case len(c.rig.load) > 0 && c.rig.burners == 0:
			bars = append(bars,
				noLess(c.name, DiskIOPS, "ratio", 0.98, 0.8, "Measuring block I/O costs the load more than 2 % of its IOPS"),
				atMost(c.name, AgentPart, 0.01, 0.05, "The agent takes more than 1 % of a CPU to measure block I/O"))
		}
	}
	return bars
}

func detectionBars(c string) []report.Bar {
	return []report.Bar{
		noLess(c, Hits, "on", 1, 0.5, "A loss of 10 % through neighbours is not detected within 2 s"),
		atMost(c, FalseAlarms, 0, 0.5, "Interference is declared where there is none"),
		atMost(c, DetectedIn, 2, 5, "Interference is noticed late"),
		within(c, NamedRight, 0.95, 1, 0.5, 1, "Another than those in the way is named"),
	}
}

func besideBars(c string) []report.Bar {
	return append(keptBars(c, PartOfIOPS, 0.95, 0.7, 5),
		atMost(c, TimesP99, 1.5, 10, "Requests of a reservation take longer beside neighbours that compute"),
	)
}

// databaseBars are wider, since a transaction is several requests to the disk and much other work.
func databaseBars(c, metric string, low, back float64) []report.Bar {
	return append(keptBars(c, metric, low, 0.5, back),
		noMore(c, TimesP99, "ratio", 0.6, 1, "A transaction takes as long with a reservation as without"))
}

// oneKeyBars are the bars for a container beside neighbours without a label.
func oneKeyBars(c blockioCase) []report.Bar {
	bars := besideBars(c.name)
	if part := c.rig.part(); c.rig.service != "" || c.needs != "" {
		bars = append(databaseBars(c.name, part, 0.92, 3),
			atMost(c.name, TimesP99, 1.5, 10, "A transaction takes longer beside neighbours that compute"))
	}
	if c.rig.bound != "" {
		bars = append(bars, noLess(c.name, OfLabel, "on", 1, 0.5, "A bound of its real time leaves a container less than the one label does"))
	}
	if len(c.rig.tenants) > 0 { // the two reservations disturb each other, even without neighbours
		return append(bars, noLess(c.name, PartOfDue, "on", 0.92, 0.3, "A second reservation is not met beside the first"))
	}
	return append(bars,
		atMost(c.name, LostBeyond, 0.1, 0.3, "The neighbours lose more CPU time than the container takes"),
		atMost(c.name, ReleasedIn, 30, 45, "What was done stays long after it was needed"))
}

// keptBars are the bars for a load beside burners. metric is the part of its work that remains: at
// least low, and 0.95 after back seconds.
func keptBars(c, metric string, low, far, back float64) []report.Bar {
	return []report.Bar{
		noMore(c, metric, "off", 0.9, 0.97, blockioTakes),
		atMost(c, DetectedIn, 2, 5, "Interference is noticed late"),
		atMost(c, RecoveredIn, back, 10, "A reservation is met late"),
		within(c, NamedRight, 0.95, 1, 0.5, 1, "Another than those in the way is named"),
		noLess(c, metric, "on", low, far, "A reservation is not met beside neighbours that compute"),
	}
}

// overlayBars are the bars for the figures of Overlay.
func overlayBars() (bars []report.Bar) {
	for _, su := range overlayCatalogue() {
		for _, c := range su.cases {
			bars = append(bars, c.bars(su.caseName(c), su.path)...)
		}
	}
	return bars
}

func (c overlayCase) bars(name string, path rig.Path) (bars []report.Bar) {
	const slower = "The short path is slower than the kernel's"
	switch {
	case c.bulk:
		return []report.Bar{noLess(name, Received, "ratio", 1, 0.8, slower)}
	case c.service != "":
		return nil // aims, no bars
	}
	stalled := atMost(name, StalledFlows, 0, 0, "Flows that take the short path get stuck")
	if c.short {
		return []report.Bar{noLess(name, Requests, "ratio", 1, 0.8, slower), stalled}
	}
	bars = append(bars, stalled)
	// The possible gain depends on how much longer the kernel's path is than the host's: the path
	// of a bridge alone is shorter than the path of two routers.
	least := map[rig.Path]map[int]float64{rig.Routed: {1: 1.45, 8: 1.36, 32: 1.36}, rig.Bridged: {1: 1.30}, rig.Swarm: {1: 1.30}}[path][c.flows]
	if c.named {
		least = 1.30
	}
	if least > 0 {
		bars = append(bars, noLess(name, Requests, "ratio", least, 1.05, "The short path saves too little of what the overlay network costs"))
	}
	if path == rig.Routed {
		bars = append(bars,
			noLess(name, OfHost, "on", 0.90, 0.7, "Containers are slower than their hosts in spite of the short path"),
			upTo(name, RequestCPU, "ratio", 0.70, 0.95, "The short path saves too little CPU time"))
	}
	return bars
}
