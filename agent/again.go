package agent

import "github.com/fairlead-project/fairlead/container"

// again requests another Apply of a container's Target, as the feature would return something else
// now.
func (w *worker) again(id container.ID) {
	w.mu.Lock()
	defer w.mu.Unlock()
	r := w.rows[id]
	if r == nil || r.want == nil || r.tries > 0 { // a retry is due in any case
		return
	}
	if w.busy == r { // that call's result may be out of date
		r.asked++
	}
	r.due = w.pace.now()
	w.nudge()
}
