package api

// slowed returns a function that fills in what a container lost of its CPU time to packets of
// others since an earlier report. Either report may be nil.
func (n *NetCPU) slowed(before *NetCPU) func(*OverviewRow) losses {
	if n == nil || before == nil {
		return func(*OverviewRow) losses { return nil }
	}
	d := n.After(*before)
	span := d.Taken.Sub(d.Since).Seconds()
	accounts := make(map[ID]NetCPUAccount, len(d.Accounts))
	for _, a := range d.Accounts {
		accounts[a.Container] = a
	}
	return func(row *OverviewRow) (l losses) {
		a, known := accounts[row.Container]
		if !known || span <= 0 {
			return nil
		}
		row.CPU, row.NetworkCPU = a.Tasks/span, a.Network()/span
		if a.Tasks <= 0 {
			return nil
		}
		for _, c := range a.StolenBy {
			l = append(l, Slowdown{Cause: SlowedByPackets, Slowed: c.Seconds / max(a.Tasks, a.Stolen), Culprit: c.Container, Name: c.Name})
		}
		return l
	}
}
