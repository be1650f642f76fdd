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
