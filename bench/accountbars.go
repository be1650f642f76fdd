package bench

import "github.com/fairlead-project/fairlead/bench/report"

// accountBars are how exact the accounts have to be.
func accountBars() []report.Bar {
	all := []report.Bar{
		{
			Case: "cost nic udp", Metric: Balance, Of: "on", Low: 0.98, High: 1.02, FarLow: 0.85, FarHigh: 1.15,
			Why: "The accounts lose packet work that comes by NIC and bridge, or charge it twice",
		},
		{
			Case: "cost vxlan udp", Metric: Balance, Of: "on", Low: 0.98, High: 1.02, FarLow: 0.85, FarHigh: 1.15,
			Why: "The accounts lose packet work that comes by a tunnel, or charge it twice",
		},
	}
	for _, su := range accuracy() {
		for _, d := range su.demands {
			name := su.name + " " + d.name
			all = append(all,
				report.Bar{
					Case: name, Metric: OfStopwatch, Of: "on", Low: 0.95, High: 1.1, FarLow: 0.8, FarHigh: 1.4,
					Why: "The accounts measure another time than softirqs take",
				},
				report.Bar{
					Case: name, Metric: SystemPart, Of: "on", Low: 0, High: 0.15, FarLow: 0, FarHigh: 0.4,
					Why: "Packets of containers are charged to the system",
				})
			if len(su.cfg.Containers) > 2 {
				all = append(all, report.Bar{
					Case: name, Metric: Price, Of: "on", Low: 0.85, High: 1.15, FarLow: 0.6, FarHigh: 1.6,
					Why: "One container is charged for another's packets",
				})
			}
		}
	}
	return all
}
