package bench

import (
	"math"

	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/lab/report"
)

// The metrics that compare what the agent says with the victim's own count of its work
// (docs/slowed.md). Each is 1 minus the speed by the speed undisturbed.
const (
	Slowed     = "slowed"          // by the victim's own count
	SlowedSaid = "slowed, as said" // by the agent
	SlowedOff  = "slowed, off by"  // the distance between the two
	slowedBar  = 0.05
	slowedFar  = 0.2
)

// slowedBetween returns how much slower a container ran between two readings, as the API says it.
// NaN: there is no such container.
func slowedBetween(before, after *api.NetCPU, name string) float64 {
	b, a := api.Frame{Taken: before.Taken}, api.Frame{Taken: after.Taken}
	b.NetCPU, a.NetCPU = before, after
	for _, x := range after.Accounts {
		a.Containers = append(a.Containers, api.Container{ID: x.Container, Name: x.Name})
	}
	return said(b, a, name).Slowed
}

// said returns how a container stands between two frames. Slowed is NaN if it is not among them.
func said(before, after api.Frame, name string) api.OverviewRow {
	for _, row := range after.After(before).Rows {
		if row.Name == name {
			return row
		}
	}
	return api.OverviewRow{Slowed: math.NaN()}
}

// undisturbed is a victim without the neighbours of a case: its work per second, and how much slower
// it ran even then, as the agent says it, because of what runs in any case.
type undisturbed struct{ work, said float64 }

// slowedFigures are how much slower the victim runs than undisturbed, by its work per second, and by
// what the agent says. There are none where one is not known.
func (u undisturbed) slowedFigures(work, said float64) []figure {
	counted, relative := 1-work/u.work, 1-(1-said)/(1-u.said)
	if !(u.work > 0) || math.IsNaN(work) || math.IsNaN(relative) || u.said >= 1 {
		return nil
	}
	return []figure{{Slowed, "1", counted}, {SlowedSaid, "1", relative}, {SlowedOff, "1", math.Abs(relative - counted)}}
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
