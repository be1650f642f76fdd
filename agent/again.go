package agent

import "github.com/fairlead-project/fairlead/container"

// again has a container's Target applied once more, as the feature would return
// something else now.
func (w *worker) again(id container.ID) {
	w.mu.Lock()
	defer w.mu.Unlock()
	r := w.rows[id]
	if r == nil || r.want == nil || r.tries > 0 { // a retry is due in any case
		return
	}
	if w.busy == r { // what that call returns may be old
		r.asked++
	}
	r.due = w.pace.now()
	w.nudge()
}
