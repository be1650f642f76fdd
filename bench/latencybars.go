package bench

import (
	"math"

	"github.com/fairlead-project/fairlead/bench/report"
)

// LatencyBars are what the figures of Latency have to reach.
func LatencyBars() []report.Bar {
	const us = 1e-6
	var all []report.Bar
	for _, c := range latencyCatalogue() {
		if c.flood {
			all = append(all, report.Bar{
				Case: c.name, Metric: Rate, Of: "ratio", Low: 0.99, High: math.Inf(1), FarLow: 0.8, FarHigh: math.Inf(1),
				Why: "Histograms slow down packets from container to container",
			})
			continue
		}
		upTo := func(metric, of string, high, far float64, why string) report.Bar {
			return report.Bar{Case: c.name, Metric: metric, Of: of, Low: math.Inf(-1), High: high, FarLow: math.Inf(-1), FarHigh: far, Why: why}
		}
		all = append(all,
			upTo(Bias, withTruth, 5*us, 50*us, "A corrected round trip is not the one at the uplink"),
			upTo(WorstBias, withTruth, 20*us, 2000*us, "Some corrected round trip is far from the one at the uplink"),
			upTo(Perturbation, "on", 2*us, 20*us, "Histograms make round trips longer"),
			upTo(Perturbation, withRecords, 5*us, 50*us, "Records of single packets make round trips longer"),
			report.Bar{
				Case: c.name, Metric: Covered, Of: "on", Low: 0.999, High: 1, FarLow: 0.9, FarHigh: 1.01,
				Why: "Packets are not measured from end to end",
			})
	}
	return all
}
