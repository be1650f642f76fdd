package agent

import (
	"fmt"
	"time"

	"github.com/fairlead-project/fairlead/feature"
)

// readTime limits the wait for a feature's measurements, which may need a mutex that a hanging call
// holds.
const readTime = 5 * time.Second

// reader calls one method of a feature, one call at a time, for all who read the feature's
// measurements.
type reader struct {
	turn chan struct{} // capacity 1
	call feature.Loop
}

func newReader() *reader { return &reader{turn: make(chan struct{}, 1)} }

// readBy calls fn. ok is false if that, or the wait for an earlier call, takes longer than
// readTime; while the call still hangs, later ones fail at once. So a method that hangs keeps one
// goroutine, and no answer about other features.
func readBy[T any](r *reader, fn func() T) (out T, ok bool) {
	if began := r.call.Busy(); !began.IsZero() && time.Since(began) > readTime {
		return out, false
	}
	late := time.NewTimer(readTime)
	defer late.Stop()
	select {
	case r.turn <- struct{}{}:
	case <-late.C:
		return out, false
	}
	got := make(chan T, 1)
	go func() {
		r.call.Begin()
		v := fn()
		r.call.End()
		<-r.turn
		got <- v
	}()
	select {
	case out = <-got:
		return out, true
	case <-late.C:
		return out, false
	}
}

// snapshot returns the feature's measurements: none if it does not answer.
func (w *worker) snapshot() feature.Snapshot {
	s, _ := readBy(w.snapshots, w.feature.Snapshot)
	return s
}

// hangs describes a call that has exceeded its time by far, and its start; "" if there is none. The
// feature does nothing else meanwhile.
func (w *worker) hangs() (what string, since time.Time) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.hang(), w.began
}

// hangs returns the hanging call of a feature; "" if there is none. Other calls may need a mutex
// that it holds.
func (a *Agent) hangs(f feature.Feature) string {
	if w := a.worker(f.Name()); w != nil {
		if what, _ := w.hangs(); what != "" {
			return f.Name() + " does not answer: " + what
		}
	}
	return ""
}

func (w *worker) hang() string {
	took := w.pace.now().Sub(w.began)
	if w.busy == nil || took <= 2*w.pace.call {
		return ""
	}
	return fmt.Sprintf("%s, which was given %v, has not returned for %v", w.doing, w.pace.call, took.Truncate(time.Second))
}
