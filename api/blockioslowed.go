package api

import "slices"

// slowed returns a function that fills in what a container lost of its reserved I/O, and who ran
// while it waited for CPUs, both over the last window of the report. The report may be nil.
func (b *BlockIO) slowed() func(*OverviewRow) losses {
	if b == nil {
		return func(*OverviewRow) losses { return nil }
	}
	rows, waits := make(map[ID][]BlockIORow), make(map[ID][]BlockIOWait)
	for _, r := range b.Rows {
		rows[r.Container] = append(rows[r.Container], r)
	}
	for _, w := range b.Waits {
		// A quota or a hypervisor in the way is no neighbour; it has a name in brackets.
		if w.Victim != w.Culprit && (w.Culprit != 0 || w.Name == "(host)") {
			waits[w.Victim] = append(waits[w.Victim], w)
		}
	}
	return func(row *OverviewRow) (l losses) {
		name(row, waits[row.Container])
		for _, r := range rows[row.Container] {
			row.IOPS += float64(r.Achieved.ReadIOPS + r.Achieved.WriteIOPS)
			if r.Reserved == nil {
				continue
			}
			row.Reserved += float64(r.Reserved.ReadIOPS + r.Reserved.WriteIOPS)
			if r.State != "interference" {
				continue
			}
			x := Slowdown{Cause: SlowedByDisk, Slowed: r.missing(), Culprit: r.Culprit, Name: r.By}
			if slices.ContainsFunc(waits[row.Container], func(w BlockIOWait) bool { return w.Culprit == r.Culprit && w.Share >= waitedEnough }) {
				x.Cause = SlowedByCPU
			}
			if len(l) == 0 || x.Slowed > l[0].Slowed {
				l = losses{x} // one disk after the other is slowed as by the worst
			}
		}
		return l
	}
}

// waitedEnough is the time that a container with a reservation waits for a CPU on which another
// runs, in seconds per second, from which the other is to blame there and not at the disk.
const waitedEnough = 0.05

// name names those who ran while a container waited for CPUs, where they are known.
func name(row *OverviewRow, waits []BlockIOWait) {
	all := 0.0
	for _, w := range waits {
		all += w.Share
	}
	i := slices.IndexFunc(row.By, func(x Slowdown) bool { return x.Cause == SlowedByCPU })
	if i < 0 || all <= 0 {
		return
	}
	loss := row.By[i].Slowed
	row.By = slices.Delete(row.By, i, i+1)
	for _, w := range waits {
		row.By = append(row.By, Slowdown{SlowedByCPU, loss * w.Share / all, w.Culprit, w.Name})
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
