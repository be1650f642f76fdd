package bench

import (
	"math"

	"github.com/fairlead-project/fairlead/bench/report"
)

// netcpuBars are what isolate has to keep from a victim.
func netcpuBars() []report.Bar {
	return []report.Bar{
		{
			Case: "hop 50/50 flood", Metric: Penalty, Of: "on", Low: 0.9, High: 1.15, FarLow: 0.5, FarHigh: 1.6,
			Why: "With isolate a victim pays for a neighbour's packets that come by one veth",
		},
		{
			Case: "nic 50/50 flood", Metric: Penalty, Of: "on", Low: 0.9, High: 1.15, FarLow: 0.5, FarHigh: 1.6,
			Why: "With isolate a victim pays for a neighbour's packets that come by NIC and bridge",
		},
		{
			Case: "hop 50/50 flood", Metric: Penalty, Of: "off", Low: 1.5, High: math.Inf(1), FarLow: 1.2, FarHigh: math.Inf(1),
			Why: "The flood costs an unprotected victim little, so the case cannot show what isolate does",
		},
	}
}
