package bench

import (
	"math"
	"sort"
	"sync"
	"time"
)

// worklog is what a victim has done by its own count, at moments close to one another. The agent's
// answers are as of moments that the bench learns only with them, under a flood seconds later; the
// log has the victim's work between any two of them. Close it.
type worklog struct {
	read func() uint64

	mu    sync.Mutex
	at    []time.Time
	done  []uint64
	close chan struct{}
	ended chan struct{}
}

// The time between two entries, and how many are kept at most: one to two minutes.
const (
	worklogEvery = 10 * time.Millisecond
	worklogKeep  = 12_000
)

func newWorklog(read func() uint64) *worklog {
	l := &worklog{read: read, close: make(chan struct{}), ended: make(chan struct{})}
	l.now()
	go func() {
		defer close(l.ended)
		tick := time.NewTicker(worklogEvery)
		defer tick.Stop()
		for {
			select {
			case <-l.close:
				return
			case <-tick.C:
				l.now()
			}
		}
	}()
	return l
}

// now adds an entry. It reads with the lock, so that the entries are in their order.
func (l *worklog) now() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.add(time.Now(), l.read())
}

func (l *worklog) add(at time.Time, done uint64) {
	if len(l.at) >= worklogKeep {
		half := worklogKeep / 2
		l.at, l.done = append(l.at[:0], l.at[half:]...), append(l.done[:0], l.done[half:]...)
	}
	l.at, l.done = append(l.at, at), append(l.done, done)
}

// Close ends the log.
func (l *worklog) Close() {
	close(l.close)
	<-l.ended
}

// rate returns the work per second from one moment to another. NaN: the log does not reach back so
// far, or they are the same.
func (l *worklog) rate(from, to time.Time) float64 {
	l.now()
	return (l.until(to) - l.until(from)) / to.Sub(from).Seconds()
}

// until returns the work done at a moment, as if it were steady between two entries.
func (l *worklog) until(t time.Time) float64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	i := sort.Search(len(l.at), func(i int) bool { return !l.at[i].Before(t) })
	switch {
	case i == len(l.at), i == 0 && l.at[0].After(t):
		return math.NaN()
	case i == 0:
		return float64(l.done[0])
	}
	part := t.Sub(l.at[i-1]).Seconds() / l.at[i].Sub(l.at[i-1]).Seconds()
	return float64(l.done[i-1]) + part*float64(l.done[i]-l.done[i-1])
}
