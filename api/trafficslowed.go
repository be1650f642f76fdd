package api

// slowed returns a function that fills in what a container lost of its guaranteed bandwidth since an
// earlier report. Either report may be nil.
func (t *Traffic) slowed(before *Traffic) func(*OverviewRow) losses {
	if t == nil || before == nil {
		return func(*OverviewRow) losses { return nil }
	}
	classes := make(map[ID][]TrafficClass)
	for _, c := range t.After(*before).Classes {
		classes[c.Container] = append(classes[c.Container], c)
	}
	return func(row *OverviewRow) (l losses) {
		for _, c := range classes[row.Container] {
			rate := &row.Egress
			if c.Direction == "ingress" {
				rate = &row.Ingress
			}
			rate.Achieved += c.Achieved
			rate.Due += c.Guaranteed
			if c.Asked != nil && c.Asked.Ceil > 0 {
				rate.Ceil = c.Asked.Ceil
			}
			if missing := float64(c.Guaranteed) - c.Achieved; c.BacklogBytes > 0 && missing > 0 {
				l = append(l, Slowdown{Cause: SlowedByUplink, Slowed: missing / float64(c.Guaranteed)})
			}
		}
		return l
	}
}
