package bench

import (
	"fmt"
	"math"

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
				bars = append(bars, penalty(way+quotas+rate, 1.15, 1.6, receives))
			}
			bars = append(bars,
				penalty(way+quotas+"100k", 1.4, 1.8, receives), // wakeups, each an interrupt
				noLess(way+quotas+"flood", Penalty, "off", 1.5, 1.2, nothing),
				noLess(way+quotas+"100k", Received, "ratio", 0.8, 0.5, less))
		}
		bars = append(bars,
			noLess(way+" 50/50 tcp-rr", Requests, "ratio", 0.75, 0.4, "Requests to an isolated receiver take much longer"),
			noLess(way+" 50/50 udp-rr", Requests, "ratio", 0.75, 0.4, "Requests to an isolated receiver take much longer"))
	}
	for _, c := range []string{"1 of 8 400k", "4 of 8 400k", "7 of 8 400k", "7 of 8 flood"} {
		bars = append(bars, penalty("udp-recv "+c, 1.2, 1.6, receives))
	}
	bars = append(bars, serviceBars()...)
	return append(bars,
		noLess("udp-recv 7 of 8 400k", Penalty, "off", 1.5, 1.2, nothing),
		penalty("cap 3x30 udp-recv", 1.15, 1.6, receives),
		penalty("drop 400k fairlead", 1.15, 1.6, "What an isolated receiver has no time for is not dropped before it takes a victim's"),
		penalty("drop 400k fairlead xdp", 1.15, 1.6, "What an isolated receiver has no time for is not dropped in the driver"),
		noLess("heavy 35 udp", Received, "ratio", 0.9, 0.6, less),
		within("heavy 35 udp", CPUUsed, 0.3, 0.4, 0.2, 0.6, "A quota as large as what a receiver needs does not hold it to that"),

		penalty("charge udp-send 10 2G", 1.15, 1.45, charged),
		noLess("charge udp-send 10 2G", Penalty, "off", 1.3, 1.1, nothing),
		penalty("charge cap 3x30 udp-recv", 1.2, 2, charged),
		noMore("charge no quotas 100k", Penalty, "ratio", 0.75, 1, charged), // work in softirqs has no weight

		penalty("charge udp-send 4 300M", 1.1, 1.5, charged),
		penalty("auto udp-send 4 300M", 1.1, 1.6, charged),
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

// penalty is a bar for the penalty of a protected victim.
func penalty(name string, high, far float64, why string) report.Bar {
	return atMost(name, Penalty, high, far, why)
}

// atMost is a bar for a figure with the protection on that is good if it is small.
func atMost(name, metric string, high, far float64, why string) report.Bar {
	return noMore(name, metric, "on", high, far, why)
}

// within is a bar for a figure with the protection on that has to be in a range.
func within(name, metric string, low, high, farLow, farHigh float64, why string) report.Bar {
	return report.Bar{Case: name, Metric: metric, Of: "on", Low: low, High: high, FarLow: farLow, FarHigh: farHigh, Why: why}
}

func noMore(name, metric, of string, high, far float64, why string) report.Bar {
	return report.Bar{Case: name, Metric: metric, Of: of, High: high, FarHigh: far, Why: why}
}

// upTo is noMore for a figure that may be negative.
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
		all = append(all, noLess("watched "+d.name, d.metric(), "ratio", 0.99, 0.9, watching))
	}
	return append(all, noLess("watched nginx alone", Requests, "ratio", 0.99, 0.9, watching))
}

const slowedWrong = "The agent says another loss than the victim has by its own count"

// slowedBars demand that what the agent says is right within five points, unprotected and protected.
// One hop from a sender on the same host is not among them: docs/slowed.md.
func slowedBars() (bars []report.Bar) {
	for _, c := range []string{
		"hop 50/50 tcp", "hop 50/50 tcp-rr", "nic 50/50 flood", "nic 50/50 tcp", "nic 50/50 tcp-rr",
		"udp-send 10 1G", "tcp-send 10 100 flows 1G", "udp-recv 7 of 8 400k", "udp-recv 7 of 8 flood",
		"tcp-recv 7 of 8 100 flows", "cap 3x30 udp-recv",
	} {
		bars = append(bars, noMore(c, SlowedOff, "off", slowedBar, slowedFar, slowedWrong), noMore(c, SlowedOff, "on", slowedBar, slowedFar, slowedWrong))
	}
	return bars
}

// slowedAtUplinkBars demand the same of containers that share an uplink by policy, and of bulk that
// shares one without.
func slowedAtUplinkBars() []report.Bar {
	bars := []report.Bar{
		noMore("bridge 6 to 1", SlowedOff, "off", slowedBar, slowedFar, slowedWrong),
		noMore("bridge 6 to 1", SlowedOff, "on", slowedBar, slowedFar, slowedWrong),
		noMore("host 6 to 1", SlowedOff, "off", slowedBar, slowedFar, slowedWrong),
		noMore("host 6 to 1", SlowedOff, "on", slowedBar, slowedFar, slowedWrong),
	}
	for _, phase := range []string{"w1 w2 r3", "r3 ends", "r4 starts"} {
		bars = append(bars, noMore("changes start and stop", phase+": "+SlowedOff, "on", slowedBar, slowedFar, slowedWrong))
	}
	return bars
}
