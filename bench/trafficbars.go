package bench

import "github.com/fairlead-project/fairlead/bench/report"

// trafficBars are the shares and bounds that containers have to get.
func trafficBars() []report.Bar {
	return []report.Bar{
		{
			Case: "bridge 6 to 1", Metric: ShareOf + "one", Of: "on", Low: 0.48, High: 0.52, FarLow: 0.35, FarHigh: 0.65,
			Why: "Containers of equal weight share an uplink by their connections",
		},
		{
			Case: "overlay 6 to 1", Metric: ShareOf + "one", Of: "on", Low: 0.48, High: 0.52, FarLow: 0.35, FarHigh: 0.65,
			Why: "Containers of equal weight share an overlay's uplink by their connections",
		},
		{
			Case: "bridge rate beside flood", Metric: ReceivedBy + "one", Of: "on", Low: 275 * mbit, High: 295 * mbit, FarLow: 150 * mbit, FarHigh: 400 * mbit,
			Why: "A neighbour's flood takes a container's guaranteed rate",
		},
		{
			Case: "bridge ceil", Metric: WorstSecond, Of: "on", Low: 0.9, High: 1.05, FarLow: 0.5, FarHigh: 1.5,
			Why: "A ceil lets another rate than its own leave by the NIC",
		},
	}
}
