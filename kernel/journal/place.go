package journal

import (
	"errors"
	"fmt"
	"path"
	"strings"
	"sync"
	"time"
)

// hangs limits how long one call of a Knob or an Opener may block others, and how long all hanging
// calls may delay Restore. The kernel needs milliseconds for such a call, and seconds while it
// frees a large namespace.
const hangs = 5 * time.Second

// ErrStuck means that a call that reads or writes the host has not returned in time, either this one
// or an earlier one at the same place. Nothing can end a call inside the kernel. The entry stays.
var ErrStuck = errors.New("a call to the host does not return")

// place returns the part of the host in which knobs are turned one at a time; see Ref.
func (r Ref) place() string {
	if path.IsAbs(r.Object) {
		return path.Dir(r.Object)
	}
	before, _, _ := strings.Cut(r.Object, "/")
	return before
}

// device returns the device that a knob belongs to, as "NETNS/INDEX"; "" if it belongs to none.
func (r Ref) device() string {
	if at := strings.SplitN(r.Object, "/", 3); at[0] != "" && len(at) > 1 {
		return at[0] + "/" + at[1]
	}
	return ""
}

// places holds the places with a call in progress. The zero value is ready to use.
type places struct {
	mu   sync.Mutex
	busy map[string]*visit
}

// visit is one stay at a place.
type visit struct {
	since time.Time
	over  chan struct{} // closed at its end
}

// enter waits until the place is free, takes it, and returns a function that leaves it. It returns
// ErrStuck once the current visitor has been there for longer than limit.
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
