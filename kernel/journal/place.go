package journal

import (
	"errors"
	"fmt"
	"path"
	"strings"
	"sync"
	"time"
)

// hangs is for how long a call of a Knob or an Opener may keep others waiting,
// and Restore in all by those that do not return. What the kernel does in such a
// call takes milliseconds; seconds, while it frees a large namespace.
const hangs = 5 * time.Second

// ErrStuck means that a call which reads or writes the host has not returned in
// time, now or earlier at the same place: in the kernel's hands there is no way
// to end it. The entry is kept.
var ErrStuck = errors.New("a call to the host does not return")

// place is what knobs share that are turned one at a time; see Ref.
func (r Ref) place() string {
	if path.IsAbs(r.Object) {
		return path.Dir(r.Object)
	}
	before, _, _ := strings.Cut(r.Object, "/")
	return before
}

// places are those at which something is being done. The zero value is ready.
type places struct {
	mu   sync.Mutex
	busy map[string]*visit
}

// visit is one stay at a place.
type visit struct {
	since time.Time
	over  chan struct{} // closed at its end
}

// enter waits until nobody else is at the place, and gives what leaves it. It
// gives up with ErrStuck once whoever is there has been for longer than limit.
func (p *places) enter(place string, limit time.Duration) (leave func(), err error) {
	for {
		p.mu.Lock()
		there := p.busy[place]
		if there == nil {
			if p.busy == nil {
				p.busy = make(map[string]*visit)
			}
			v := &visit{since: time.Now(), over: make(chan struct{})}
			p.busy[place] = v
			p.mu.Unlock()
			return func() {
				p.mu.Lock()
				delete(p.busy, place)
				p.mu.Unlock()
				close(v.over)
			}, nil
		}
		p.mu.Unlock()
		timer := time.NewTimer(limit - time.Since(there.since))
		select {
		case <-there.over:
			timer.Stop()
		case <-timer.C:
			return nil, fmt.Errorf("%w: one at the same place was made %v ago", ErrStuck, time.Since(there.since).Round(time.Second))
		}
	}
}
