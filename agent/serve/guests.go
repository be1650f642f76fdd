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
	maxOfOne  = 8                     // limits the concurrent connections of one container
	selfPause = 10 * time.Millisecond // between two answers to one container

	// Identifying a caller costs CPU time. So all containers together may connect at this rate;
	// further connections wait in the kernel's queue.
	guestPause = time.Millisecond // between two connections, on average
	guestBurst = 256              // connections that need not wait
)

// pace spreads events over time. The zero value has seen no event.
type pace struct{ next time.Time }

// wait returns how long an event has to wait from now, and counts it.
func (p *pace) wait(now time.Time) time.Duration {
	if earliest := now.Add(-guestBurst * guestPause); p.next.Before(earliest) {
		p.next = earliest
	}
	p.next = p.next.Add(guestPause)
	return max(0, p.next.Sub(now))
}

// guests are the containers that are connected to their socket. Each may have maxOfOne connections,
// from any number of processes. Further connections are closed before anything is read from them.
// Callers that belong to no known container count as one.
type guests struct {
	caller func(Peer) api.ID

	accepted pace // used only by Accept

	mu   sync.Mutex
	of   map[api.ID]*guest
	log  *slog.Logger
	told time.Time // when the log last had a warning
}

func newGuests(caller func(Peer) api.ID, log *slog.Logger) *guests {
	return &guests{caller: caller, of: make(map[api.ID]*guest), log: log}
}

// tellEvery limits how often the log warns that containers connect too often.
const tellEvery = time.Minute

// tell logs that connections wait or are refused. The caller holds mu.
func (g *guests) tell(now time.Time, what string, args ...any) {
	if g.told.IsZero() || now.Sub(g.told) >= tellEvery {
		g.told = now
		g.log.Warn("the socket for containers: "+what, args...)
	}
}

// wait returns how long the next connection has to wait to be accepted.
func (g *guests) wait(now time.Time) time.Duration {
	wait := g.accepted.wait(now)
	if wait > 0 {
		g.mu.Lock()
		defer g.mu.Unlock()
		g.tell(now, "connections wait, as there are more than it takes", "most per second", int(time.Second/guestPause))
	}
	return wait
}

// guest is one connected container; the mutex of all guards it.
type guest struct {
	all   *guests
	conns int
	next  time.Time // the earliest time of its next answer
}

// admit reports whether a visitor may come in, and counts it until it is closed.
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

// turn waits until the container that made ctx's request may have its next answer, and returns the
// process that made it.
func turn(ctx context.Context) (Peer, error) {
	v, ok := ctx.Value(peerKey{}).(*visitor)
	if !ok || v.guest == nil {
		return Peer{}, errors.New("read peer: unknown connection")
	}
	g := v.guest.all
	g.mu.Lock()
	wait := max(0, time.Until(v.guest.next))
	v.guest.next = time.Now().Add(wait + selfPause)
	g.mu.Unlock()
	select {
	case <-time.After(wait):
		return v.peer, v.err
	case <-ctx.Done():
		return Peer{}, ctx.Err()
	}
}
