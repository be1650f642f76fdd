package bench

import (
	"math"

	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/lab/report"
)

// The metrics that compare what the agent says with the victim's own count of its work
// (docs/slowed.md). Each is 1 minus the speed by the speed beside neighbours without packets.
const (
	Slowed     = "slowed"          // by the victim's own count
	SlowedSaid = "slowed, as said" // by the agent
	SlowedOff  = "slowed, off by"  // the distance between the two
	slowedBar  = 0.05
	slowedFar  = 0.2
)

// slowedBetween returns how much slower a container ran between two readings, as the API says it.
func slowedBetween(before, after *api.NetCPU, name string) float64 {
	for _, a := range after.Accounts {
		if a.Name == name {
			f := api.Frame{Taken: after.Taken, Containers: []api.Container{{ID: a.Container}}, Reports: api.Reports{NetCPU: after}}
			return f.After(api.Frame{Taken: before.Taken, Reports: api.Reports{NetCPU: before}}).Rows[0].Slowed
		}
	}
	return math.NaN()
}

// addSlowed adds both figures of a window and their distance.
func addSlowed(add func(metric, unit string, value float64), base, work, said float64) {
	if base <= 0 || math.IsNaN(said) {
		return
	}
	counted := 1 - work/base
	add(Slowed, "1", counted)
	add(SlowedSaid, "1", said)
	add(SlowedOff, "1", math.Abs(said-counted))
}

// slowedBars demand that what the agent says is right within five points, unprotected and protected.
// One hop from a sender on the same host is not among them: there the accounts take more for stolen
// than was, beside a flood.
func slowedBars() (bars []report.Bar) {
	const wrong = "The agent says another loss than the victim has by its own count"
	for _, c := range []string{
		"hop 50/50 tcp", "hop 50/50 tcp-rr", "nic 50/50 flood", "nic 50/50 tcp", "nic 50/50 tcp-rr",
		"udp-send 10 1G", "udp-recv 7 of 8 400k", "tcp-recv 7 of 8 100 flows", "cap 3x30 udp-recv",
	} {
		bars = append(bars, noMore(c, SlowedOff, "off", slowedBar, slowedFar, wrong), noMore(c, SlowedOff, "on", slowedBar, slowedFar, wrong))
	}
	return bars
}
