package bench

import (
	"math"

	"github.com/fairlead-project/fairlead/bench/report"
)

// BlockIOBars are what the figures of BlockIO have to reach.
func BlockIOBars() []report.Bar {
	var bars []report.Bar
	for _, c := range blockioCatalogue() {
		if c.monitor {
			bars = append(bars, report.Bar{
				Case: c.name, Metric: DiskIOPS, Of: "ratio", Low: 0.98, High: math.Inf(1), FarLow: 0.8, FarHigh: math.Inf(1),
				Why: "Measuring block I/O costs the load more than 2 % of its IOPS",
			})
			continue
		}
		bars = append(bars,
			report.Bar{
				Case: c.name, Metric: PartOfIOPS, Of: "on", Low: 0.95, High: math.Inf(1), FarLow: 0.7, FarHigh: math.Inf(1),
				Why: "A reservation is not met beside neighbours that compute",
			},
			report.Bar{
				Case: c.name, Metric: PartOfIOPS, Of: "off", High: 0.9, FarHigh: 0.97,
				Why: "The neighbours take nothing with nothing done, so that the case does not show what a reservation does",
			},
			atMost(c.name, TimesP99, 1.5, 10, "Requests of a reservation take longer beside neighbours that compute"),
			atMost(c.name, DetectedIn, 2, 5, "Interference is noticed late"),
			atMost(c.name, RecoveredIn, 5, 10, "A reservation is met late"),
			report.Bar{
				Case: c.name, Metric: NamedRight, Of: "on", Low: 0.95, High: 1, FarLow: 0.5, FarHigh: 1,
				Why: "Another than those in the way is named",
			})
	}
	return bars
}
