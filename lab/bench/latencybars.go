package bench

import "github.com/fairlead-project/fairlead/lab/report"

// LatencyBars are the bars for the figures of Latency.
func LatencyBars() []report.Bar {
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
