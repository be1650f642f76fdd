package agent

import (
	"errors"
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

// reader returns the reader of a method, by the name in errors and the log.
func (f *fence) reader(method string) *reader {
	f.mu.Lock()
	defer f.mu.Unlock()
	r := f.readers[method]
	if r == nil {
		r = &reader{turn: make(chan struct{}, 1)}
		f.readers[method] = r
	}
	return r
}

// errSilent is returned by readBy in time, when the feature does not.
var errSilent = errors.New("does not answer")

// readBy calls fn, a method of the feature behind f. It returns errSilent if that, or the wait for an earlier
// call, takes longer than readTime; while the call still hangs, later ones fail at once. So a method
// that hangs keeps one goroutine, and no answer about other features. A panic is that call's error.
func readBy[T any](f *fence, method string, fn func() T) (out T, err error) {
	r := f.reader(method)
	if began := r.call.Busy(); !began.IsZero() && time.Since(began) > readTime {
		return out, errSilent
	}
	late := time.After(readTime)
	select {
	case r.turn <- struct{}{}:
	case <-late:
		return out, errSilent
	}
	var answer T // belongs to the call until got has its error
	got := make(chan error, 1)
	go func() {
		r.call.Begin()
		err := f.read(method, 0, func() { answer = fn() })
		r.call.End()
		<-r.turn
		got <- err
	}()
	select {
	case err := <-got:
		return answer, err
	case <-late:
		return out, errSilent
	}
}

// snapshot returns the feature's measurements: none if it does not answer.
func (w *worker) snapshot() feature.Snapshot {
	s, _ := readBy(w.fence, "snapshot", w.feature.Snapshot)
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
