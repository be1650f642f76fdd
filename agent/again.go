package agent

import (
	"time"

	"github.com/fairlead-project/fairlead/container"
)

// again requests another Apply of a container's Target, as the feature would return something else
// now. It is made at once or, where the last one failed, a second after that.
func (w *worker) again(id container.ID) {
	w.mu.Lock()
	defer w.mu.Unlock()
	r := w.rows[id]
	if r == nil || r.want == nil {
		return
	}
	due := w.pace.now()
	if r.tries > 0 {
		if due = r.tried.Add(time.Second); !due.Before(r.due) {
			return
		}
	}
	if w.busy == r { // that call's result may be out of date
		r.asked++
	}
	r.due = due
	poke(w.wake)
}
