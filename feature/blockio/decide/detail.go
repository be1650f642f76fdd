package decide

import "time"

// Details cost a load at the disk some of its IOPS, so that they are measured only while a
// reservation may be missed for want of a CPU, and else for a moment now and then.
const (
	detailEvery = 5 * time.Second // at the least: what a container usually waits, and whether help is still needed
	detailAfter = 5 * time.Second // a reservation was last missed
	stallShare  = 0.01            // of the time, that tasks are stalled: less costs no reservation a twentieth
)

// Lacks reports whether a window without details is to have some before it is judged.
func (c *Control) Lacks(w Window) bool {
	if w.Length <= 0 || w.Detailed {
		return false
	}
	due := w.Taken.Sub(c.detailed) >= detailEvery
	for _, d := range w.Demands {
		s := c.standing[Place{d.Container, d.Disk}]
		if d.starved(w) || d.total() >= least && (due || !s.known || s.reserved != d.Reserved) {
			return true
		}
	}
	return false
}

// Watches reports whether details are to be measured on, after the last window.
func (c *Control) Watches(now time.Time) bool { return now.Sub(c.starved) < detailAfter }

// starved reports whether it misses its reservation, and its tasks were stalled: for a CPU, by a
// quota, or by the hypervisor.
func (d Demand) starved(w Window) bool {
	reads, writes := d.missed(w)
	least := time.Duration(stallShare * float64(w.Length))
	return (reads || writes) && (!d.Stalls || d.Pressure >= least || w.Stolen >= least)
}

// noteDetails notes when a window had details, and when it needed them.
func (c *Control) noteDetails(w Window) {
	if w.Detailed {
		c.detailed = w.Taken
	}
	for _, d := range w.Demands {
		if d.starved(w) {
			c.starved = w.Taken
		}
	}
}
