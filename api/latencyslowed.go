package api

// slowed returns a function that fills in the latency that the host adds to a container's packets,
// of the worse direction. The report may be nil.
func (l *Latency) slowed() func(*OverviewRow) losses {
	if l == nil {
		return func(*OverviewRow) losses { return nil }
	}
	added := make(map[ID]float64)
	for _, c := range l.Containers {
		if c.Added != nil {
			added[c.Container] = max(added[c.Container], c.Added.P99)
		}
	}
	return func(row *OverviewRow) losses {
		row.Added = added[row.Container]
		return nil
	}
}
