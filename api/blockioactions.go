package api

// actions lists what is done to a container, or for it, about disks. The report may be nil.
func (b *BlockIO) actions(id ID) (list []Evidence) {
	if b == nil {
		return nil
	}
	for _, r := range b.Rows {
		if r.Container == id && r.Action != "" {
			list = append(list, Evidence{"blockio", r.Since, r.Action + " on " + r.Disk + ": " + r.Evidence})
		}
	}
	for _, e := range b.Events {
		switch id {
		case e.Victim:
			list = append(list, Evidence{"blockio", e.Time, e.What + " on " + e.Disk + ": " + e.Text})
		case e.Culprit:
			list = append(list, Evidence{"blockio", e.Time, e.What + " on " + e.Disk + ", for " + e.Name + ": " + e.Text})
		}
	}
	return list
}
