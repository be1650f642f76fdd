package api

// slowed returns a function that fills in what a container lost of its bandwidth since an earlier
// report. Either report may be nil.
func (t *Traffic) slowed(before *Traffic) func(*OverviewRow) losses {
	if t == nil || before == nil {
		return func(*OverviewRow) losses { return nil }
	}
	type place struct {
		container         ID
		uplink, direction string
	}
	waited := make(map[place]bool) // at the earlier report, too
	for _, c := range before.Classes {
		waited[place{c.Container, c.Uplink, c.Direction}] = c.BacklogBytes > 0
	}
	classes := make(map[ID][]TrafficClass)
	carried := make(map[place]float64)    // of all classes, by uplink and direction
	worst := make(map[place]TrafficClass) // the class furthest beyond its guarantee, by uplink and direction
	now := t.After(*before)
	span := now.Taken.Sub(now.Since).Seconds()
	contended := make(map[ID][]TrafficContended)
	for _, c := range now.Contended {
		contended[c.Container] = append(contended[c.Container], c)
	}
	for _, c := range now.Classes {
		classes[c.Container] = append(classes[c.Container], c)
		at := place{0, c.Uplink, c.Direction}
		carried[at] += c.Achieved
		if w, known := worst[at]; !known || c.beyond() > w.beyond() {
			worst[at] = c
		}
	}
	return func(row *OverviewRow) (l losses) {
		if len(classes[row.Container]) > 0 {
			row.Egress.Achieved, row.Ingress.Achieved = 0, 0 // in frames, where the uplink is divided
		}
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
			// A queue that was empty at either end may have been so for most of the time.
			queued := c.BacklogBytes > 0 && waited[place{c.Container, c.Uplink, c.Direction}] || c.Drops > 0
			// Without the others it would have had no more than all have together.
			at := place{0, c.Uplink, c.Direction}
			due := min(float64(c.Guaranteed), carried[at])
			if missing := due - c.Achieved; queued && missing > 0 {
				x := Slowdown{Cause: SlowedByUplink, Slowed: missing / due}
				if w := worst[at]; w.beyond() > 0 {
					x.Culprit, x.Name = w.Container, w.Name
				}
				l = append(l, x)
			}
		}
		for _, c := range contended[row.Container] {
			if span > 0 {
				l = append(l, Slowdown{SlowedByUplink, min(c.Lost/span, 1), c.Culprit, c.CulpritName})
			}
		}
		return l
	}
}

// beyond is how much more than its guarantee a class has achieved, in bit/s; negative: less.
func (c TrafficClass) beyond() float64 { return c.Achieved - float64(c.Guaranteed) }
