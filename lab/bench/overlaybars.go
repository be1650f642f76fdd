package bench

import (
	"github.com/fairlead-project/fairlead/lab/report"
	"github.com/fairlead-project/fairlead/lab/rig"
)

// OverlayBars are the bars for the figures of Overlay.
func OverlayBars() (bars []report.Bar) {
	for _, su := range overlayCatalogue() {
		for _, c := range su.cases {
			bars = append(bars, overlayBars(su.caseName(c), su.path, c)...)
		}
	}
	return bars
}

func overlayBars(name string, path rig.Path, c overlayCase) (bars []report.Bar) {
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
