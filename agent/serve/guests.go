package serve

import (
	"context"
	"errors"
	"log/slog"
	"maps"
	"sync"
	"time"

	"github.com/fairlead-project/fairlead/api"
)

const (
	maxOfOne  = 8                     // connections of one container at a time
	selfPause = 10 * time.Millisecond // between two answers to one container

	// Who connects is known only once that has cost something, so that all
	// together connect so often: more wait in the kernel's queue.
	guestPause = time.Millisecond // between two connections, on average
	guestBurst = 256              // that need not wait
)

// pace spreads events over time. Its zero value has had none.
type pace struct{ next time.Time }

// wait gives for how long an event now has to wait, and counts it.
func (p *pace) wait(now time.Time) time.Duration {
	if earliest := now.Add(-guestBurst * guestPause); p.next.Before(earliest) {
		p.next = earliest
	}
	p.next = p.next.Add(guestPause)
	return max(0, p.next.Sub(now))
}

// guests are the containers that are connected to their socket. Of each so many
// connections are let in, however many processes it makes them from: more are
// closed before anything is read of them. Those that are in no container that is
// known count as one.
type guests struct {
	caller func(Peer) api.ID

	accepted pace // belongs to who accepts

	mu   sync.Mutex
	of   map[api.ID]*guest
	log  *slog.Logger
	told time.Time // when the log was told last
}

func newGuests(caller func(Peer) api.ID, log *slog.Logger) *guests {
	return &guests{caller: caller, of: make(map[api.ID]*guest), log: log}
}

// tellEvery is how often the log may say that containers connect too often.
const tellEvery = time.Minute

// tell has the log say that connections wait or are refused. The caller holds mu.
func (g *guests) tell(now time.Time, what string, args ...any) {
	if g.told.IsZero() || now.Sub(g.told) >= tellEvery {
		g.told = now
		g.log.Warn("the socket for containers: "+what, args...)
	}
}

// wait gives for how long the next connection is not accepted.
func (g *guests) wait(now time.Time) time.Duration {
	wait := g.accepted.wait(now)
	if wait > 0 {
		g.mu.Lock()
		defer g.mu.Unlock()
		g.tell(now, "connections wait, as there are more than it takes", "most per second", int(time.Second/guestPause))
	}
	return wait
}

// guest is one of them; the mutex of all guards it.
type guest struct {
	all   *guests
	conns int
	next  time.Time // when it may have its next answer
}

// admit lets a visitor in, who leaves when it is closed, or says that it must not.
func (g *guests) admit(v *visitor) bool {
	id := api.ID(0)
	if v.err == nil {
		id = g.caller(v.peer)
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	now := time.Now()
	maps.DeleteFunc(g.of, func(_ api.ID, one *guest) bool { return one.conns == 0 && one.next.Before(now) })
	one := g.of[id]
	if one == nil {
		one = &guest{all: g}
		g.of[id] = one
	}
	if one.conns == maxOfOne {
		g.tell(now, "connections of a container are refused, as it has too many", "container", id, "most", maxOfOne)
		return false
	}
	one.conns++
	left := v.leave
	v.guest, v.leave = one, func() {
		g.mu.Lock()
		one.conns--
		g.mu.Unlock()
		left()
	}
	return true
}

// turn waits until the container that made the request that ctx belongs to may
// have its next answer.
func turn(ctx context.Context) error {
	v, ok := ctx.Value(peerKey{}).(*visitor)
	if !ok || v.guest == nil {
		return errors.New("read peer: unknown connection")
	}
	g := v.guest.all
	g.mu.Lock()
	wait := max(0, time.Until(v.guest.next))
	v.guest.next = time.Now().Add(wait + selfPause)
	g.mu.Unlock()
	timer := time.NewTimer(wait)
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}
