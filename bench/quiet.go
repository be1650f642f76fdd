package bench

import "fmt"

// disturbed is the part of a window that the hypervisor may let the CPUs wait.
const disturbed = 0.02

// quiet sees to it that a figure is not of the machine's own neighbours: on a
// virtual machine others may have the CPU that a container seems to have. A
// window that they disturb is measured again.
type quiet struct {
	takes          int // how often to measure at most; 0 is once
	windows, again int
	worst          float64 // of what was kept
}

// take measures until it is not disturbed, or often enough, and gives the sample
// that was disturbed least.
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

// add takes in what another one has seen.
func (q *quiet) add(o quiet) {
	q.windows, q.again, q.worst = q.windows+o.windows, q.again+o.again, max(q.worst, o.worst)
}

// note is what a reader of the report must know; "" if that is nothing.
func (q quiet) note() string {
	if q.again == 0 && q.worst <= disturbed {
		return ""
	}
	return fmt.Sprintf("the hypervisor took CPU time: of %d windows %d were measured again, and of those that count it took up to %.0f %%", q.windows, q.again, q.worst*100)
}
