package report

// Bar is what one figure of an experiment has to reach.
type Bar struct {
	Case   string // as Case.Case
	Metric string // as Case.Metric
	// Of is the figure that is held against the bar: "on", "off", the name of a
	// peer, or "ratio", which is on over off of each round.
	Of string
	// The figure reaches the bar from Low to High, both included. Either may be
	// infinite.
	Low, High float64
	// Outside of FarLow to FarHigh a figure misses the bar by far: no noise of
	// a shared machine explains it.
	FarLow, FarHigh float64
	// Why says in one sentence what is broken if the bar is missed.
	Why string
}
