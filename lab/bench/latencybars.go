package bench

import (
	"math"

	"github.com/fairlead-project/fairlead/lab/report"
)

// LatencyBars are the bars for the figures of Latency.
func LatencyBars() []report.Bar {
	const us = 1e-6
	var all []report.Bar
	upTo := func(in, metric string, of arm, high, far float64, why string) report.Bar {
		return report.Bar{Case: in, Metric: metric, Of: string(of), Low: math.Inf(-1), High: high, FarLow: math.Inf(-1), FarHigh: far, Why: why}
	}
	covered := func(in string, low float64) report.Bar {
		return report.Bar{Case: in, Metric: Covered, Of: "on", Low: low, High: 1, FarLow: 0.9, FarHigh: 1.01, Why: "Packets are not measured from end to end"}
	}
	for _, c := range latencyCatalogue() {
		switch {
		case c.flood:
			all = append(all, report.Bar{
				Case: c.name, Metric: Rate, Of: "ratio", Low: 0.99, High: math.Inf(1), FarLow: 0.8, FarHigh: math.Inf(1),
				Why: "Histograms slow down packets from container to container",
			})
		case c.covers == bulkTCP:
			all = append(all, covered(c.name, 0.99))
		case c.covers != "":
			all = append(all, covered(c.name, 0.999))
		case c.crowd:
			all = append(all,
				upTo(c.name, medianStep, armOn, 5*us, 50*us, "A corrected round trip is not the one at the uplink"),
				upTo(c.name, worstStep, armOn, 20*us, 2000*us, "Beside some number of neighbours a corrected round trip is far from the one at the uplink"))
		default:
			all = append(all,
				upTo(c.name, Bias, withTruth, 5*us, 50*us, "A corrected round trip is not the one at the uplink"),
				upTo(c.name, WorstBias, withTruth, 20*us, 2000*us, "Some corrected round trip is far from the one at the uplink"),
				upTo(c.name, Perturbation, armOn, 2*us, 20*us, "Histograms make round trips longer"),
				upTo(c.name, Perturbation, withRecords, 5*us, 50*us, "Records of single packets make round trips longer"),
				upTo(c.name, AgainstFtrace, armOn, 0, 20*us, "Histograms make round trips longer than the kernel's own tracer does"),
				upTo(c.name, AgainstFtrace, withRecords, 0, 50*us, "Records of single packets make round trips longer than the kernel's own tracer does"),
				covered(c.name, 0.999))
		}
	}
	return all
}
