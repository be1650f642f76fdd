package bench

import "fmt"

// disturbed is the fraction of a window that the hypervisor may take from the CPUs.
const disturbed = 0.02

// quiet keeps the neighbours of a virtual machine out of the figures: the hypervisor may
// give them the CPU that a container seems to use. A window that they disturb is measured
// again.
type quiet struct {
	takes          int // most tries for a window; 0 is one
	windows, again int
	worst          float64 // most disturbed window that was kept
}

// take measures until a sample is not disturbed, at most takes times, and returns the
// sample that was disturbed least.
func (q *quiet) take(measure func() (sample, error)) (best sample, err error) {
	for i := range max(q.takes, 1) {
		m, err := measure()
		if err != nil {
			return sample{}, err
		}
		if i == 0 {
			q.windows++
		} else {
			q.again++
		}
		if i == 0 || m.steal < best.steal {
			best = m
		}
		if best.steal <= disturbed {
			break
		}
	}
	q.worst = max(q.worst, best.steal)
	return best, nil
}

// note returns a note for the reader of the report, or "".
func (q quiet) note() string {
	if q.again == 0 && q.worst <= disturbed {
		return ""
	}
	return fmt.Sprintf("the hypervisor took CPU time: of %d windows %d were measured again, and of those that count it took up to %.0f %%", q.windows, q.again, q.worst*100)
}
