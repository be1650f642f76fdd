package bench

import "github.com/fairlead-project/fairlead/bench/report"

// accountBars are how exact the accounts have to be.
func accountBars() []report.Bar {
	return []report.Bar{
		{
			Case: "cost nic udp", Metric: Balance, Of: "on", Low: 0.98, High: 1.02, FarLow: 0.85, FarHigh: 1.15,
			Why: "The accounts lose packet work that comes by NIC and bridge, or charge it twice",
		},
		{
			Case: "cost vxlan udp", Metric: Balance, Of: "on", Low: 0.98, High: 1.02, FarLow: 0.85, FarHigh: 1.15,
			Why: "The accounts lose packet work that comes by a tunnel, or charge it twice",
		},
	}
}
