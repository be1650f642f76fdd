package api

// slowed returns a function that fills in what a container lost of its reserved I/O. The report may
// be nil.
func (b *BlockIO) slowed() func(*OverviewRow) losses {
	if b == nil {
		return func(*OverviewRow) losses { return nil }
	}
	rows := make(map[ID][]BlockIORow)
	for _, r := range b.Rows {
		rows[r.Container] = append(rows[r.Container], r)
	}
	return func(row *OverviewRow) (l losses) {
		for _, r := range rows[row.Container] {
			row.IOPS += float64(r.Achieved.ReadIOPS + r.Achieved.WriteIOPS)
			if r.Reserved == nil {
				continue
			}
			row.Reserved += float64(r.Reserved.ReadIOPS + r.Reserved.WriteIOPS)
			if r.State != "interference" {
				continue
			}
			cause := SlowedByDisk
			if r.WaitForeign > 0 {
				cause = SlowedByCPU
			}
			if s := r.missing(); s > 0 {
				l = append(l, Slowdown{Cause: cause, Slowed: s, Culprit: r.Culprit, Name: r.By})
			}
		}
		return l
	}
}

// missing is the largest part of a reservation's figures that is not achieved.
func (r BlockIORow) missing() (part float64) {
	for _, x := range [][2]uint64{
		{r.Achieved.ReadIOPS, r.Reserved.ReadIOPS}, {r.Achieved.WriteIOPS, r.Reserved.WriteIOPS},
		{r.Achieved.ReadBytes, r.Reserved.ReadBytes}, {r.Achieved.WriteBytes, r.Reserved.WriteBytes},
	} {
		if got, due := x[0], x[1]; due > got {
			part = max(part, 1-float64(got)/float64(due))
		}
	}
	return part
}
