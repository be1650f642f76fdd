package bench

import "github.com/fairlead-project/fairlead/lab/report"

// accountBars bound the errors of the accounts.
func accountBars() []report.Bar {
	all := []report.Bar{
		within("cost nic udp", Balance, 0.98, 1.02, 0.85, 1.15, "The accounts lose packet work that comes by NIC and bridge, or charge it twice"),
		within("cost vxlan udp", Balance, 0.98, 1.02, 0.85, 1.15, "The accounts lose packet work that comes by a tunnel, or charge it twice"),
	}
	for _, su := range accuracy() {
		for _, d := range su.demands {
			name := su.name + " " + d.name
			all = append(all,
				within(name, OfStopwatch, 0.95, 1.1, 0.8, 1.4, "The accounts measure another time than softirqs take"),
				within(name, SystemPart, 0, 0.15, 0, 0.4, "Packets of containers are charged to the system"))
			if len(su.cfg.Containers) > 2 {
				all = append(all, within(name, Price, 0.85, 1.15, 0.6, 1.6, "One container is charged for another's packets"))
			}
		}
	}
	const (
		metering = "Metering the packets of a robber costs more than it may"
		watching = "Watching slows a container although its packets take nobody's time"
	)
	for _, su := range observed() {
		all = append(all, atMost(su.name+" 20k", AccountsCost, 300e-9, 5e-6, metering))
	}
	for _, d := range watched().demands {
		all = append(all, noLess("watched "+d.name, d.metric(), "ratio", 0.99, 0.9, watching))
	}
	return append(all, noLess("watched nginx alone", Requests, "ratio", 0.99, 0.9, watching))
}
