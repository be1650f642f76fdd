package bench

import "github.com/fairlead-project/fairlead/lab/report"

const blockioTakes = "The neighbours take nothing with nothing done, so that the case does not show what a reservation does"

// BlockIOBars are the bars for the figures of BlockIO.
func BlockIOBars() (bars []report.Bar) {
	for _, c := range blockioCatalogue() {
		switch {
		case c.rig.own > 0:
			bars = append(bars, detectionBars(c.name)...)
		case c.rig.oneKey:
			bars = append(bars, oneKeyBars(c)...)
		case c.rig.service != "":
			bars = append(bars, databaseBars(c.name)...)
		case c.rig.yield && c.rig.burners > 0:
			bars = append(bars, besideBars(c.name)...)
		case c.rig.three:
			bars = append(bars,
				noLess(c.name, MetShare, "on", 0.95, 0.5, "A reservation is not met beside others at the same disk"),
				atMost(c.name, SettledIn, 3, 10, "A change of reservations takes long to be in force"),
				noLess(c.name, Refused, "on", 1, 1, "More is reserved than the disk can do"))
		case c.rig.streams > 0:
			bars = append(bars,
				noLess(c.name, PartOfDue, "on", 1, 0.7, "A mail server gets less than it has reserved beside containers that decode and send"),
				noMore(c.name, PartOfDue, "off", 0.95, 1.2, blockioTakes))
		case len(c.rig.load) > 0 && c.rig.burners == 0:
			bars = append(bars,
				noLess(c.name, DiskIOPS, "ratio", 0.98, 0.8, "Measuring block I/O costs the load more than 2 % of its IOPS"),
				atMost(c.name, AgentPart, 0.01, 0.05, "The agent takes more than 1 % of a CPU to measure block I/O"))
		}
	}
	return bars
}

func detectionBars(c string) []report.Bar {
	return []report.Bar{
		noLess(c, Hits, "on", 1, 0.5, "A loss of 10 % through neighbours is not detected within 2 s"),
		atMost(c, FalseAlarms, 0, 0.5, "Interference is declared where there is none"),
		atMost(c, DetectedIn, 2, 5, "Interference is noticed late"),
		within(c, NamedRight, 0.95, 1, 0.5, 1, "Another than those in the way is named"),
	}
}

func besideBars(c string) []report.Bar {
	return append(keptBars(c, PartOfIOPS),
		noLess(c, PartOfIOPS, "on", 0.95, 0.7, "A reservation is not met beside neighbours that compute"),
		atMost(c, TimesP99, 1.5, 10, "Requests of a reservation take longer beside neighbours that compute"),
	)
}

// databaseBars are wider, since a transaction is several requests to the disk and much other work.
func databaseBars(c string) []report.Bar {
	return append(keptBars(c, PartOfTransactions),
		noLess(c, PartOfTransactions, "on", 0.8, 0.5, "A database with a reservation does less beside neighbours that compute"),
		noMore(c, TimesP99, "ratio", 0.6, 1, "A transaction takes as long with a reservation as without"),
	)
}

// oneKeyBars are the bars of a container beside neighbours without a label.
func oneKeyBars(c blockioCase) []report.Bar {
	bars := append(besideBars(c.name),
		atMost(c.name, LostBeyond, 0.1, 0.3, "The neighbours lose more CPU time than the container takes"),
		atMost(c.name, ReleasedIn, 30, 45, "What was done stays long after it was needed"))
	if c.rig.service == "" {
		return bars
	}
	bars = append(databaseBars(c.name), bars[len(bars)-2:]...)
	for i, b := range bars {
		switch {
		case b.Metric == PartOfTransactions && b.Of == "on":
			bars[i].Low = 0.9
		case b.Metric == RecoveredIn:
			bars[i].High = 10 // of 0.95, which a database that uses all CPUs may not reach
		}
	}
	return bars
}

// keptBars are the bars of a load beside burners. metric is the part of its work that is left.
func keptBars(c, metric string) []report.Bar {
	return []report.Bar{
		noMore(c, metric, "off", 0.9, 0.97, blockioTakes),
		atMost(c, DetectedIn, 2, 5, "Interference is noticed late"),
		atMost(c, RecoveredIn, 5, 10, "A reservation is met late"),
		within(c, NamedRight, 0.95, 1, 0.5, 1, "Another than those in the way is named"),
	}
}
