// Package contend decides which containers send less than they would alone at an uplink without
// classes. It works on counters of the uplink's qdisc and of the containers' TCP sockets. It is pure:
// package traffic reads the counters, and calls it.
//
// It would rather miss a loss than report a false one. A container loses nothing at the uplink if it
// sends little because it has little to send, because its peer takes no more, because its program paces
// it or because the path beyond the host is narrow.
package contend

import (
	"time"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/kernel/netdev"
	"github.com/fairlead-project/fairlead/kernel/qdisc"
)

// Conditions on an uplink, and on a socket there, for a loss.
const (
	leastDelay = 100 * time.Microsecond // of the queue: a shorter delay is no queue
	fullEnough = 0.8                    // of the uplink's rate, if known
	busyEnough = 0.9                    // of the time, the socket has data in flight, and its peer has room
	bufferFull = 0.5                    // of the time, its send buffer is full, if all data has been sent at either moment
	// If the packets of a socket wait at this uplink and nowhere else, its round trip exceeds its shortest
	// one by the queue's delay. That delay is known at two moments only.
	leastOfDelay, mostOfDelay = 0.4, 2.5
	// Such a socket loses packets about as often as others at this uplink, if at all.
	mostOfDrops, alwaysLost = 3, 0.001
)

// Uplink is a look at an uplink while packets wait there.
type Uplink struct {
	Taken time.Time
	Rate  uint64 // bit/s; 0: not known
	qdisc.Stats
	Senders map[uint64]Sender       // by cookie
	Sent    map[container.ID]uint64 // bytes, by all devices of a container with a network of its own
}

// Sender is a socket of a container.
type Sender struct {
	Container container.ID
	netdev.Sender
}

// Loss is a container's loss at an uplink.
type Loss struct {
	Part    float64      // of what it would send alone
	Culprit container.ID // the other container that sent the most there
}

// Losses returns what containers lost between two looks at one uplink. A container alone would send as
// much as all do together, or as much as its peers have room for.
func Losses(was, now Uplink) map[container.ID]Loss {
	took := now.Taken.Sub(was.Taken)
	if took <= 0 || now.Bytes <= was.Bytes || was.Backlog == 0 || now.Backlog == 0 {
		return nil
	}
	carried := float64(now.Bytes-was.Bytes) / took.Seconds() // bytes/s
	delay := time.Duration(float64(was.Backlog+now.Backlog) / 2 / carried * float64(time.Second))
	if delay < leastDelay || now.Rate > 0 && 8*carried < fullEnough*float64(now.Rate) {
		return nil
	}
	dropped := ratio(now.Drops-min(was.Drops, now.Drops), now.Packets-min(was.Packets, now.Packets))
	sent, room := make(map[container.ID]float64), make(map[container.ID]float64)
	held := make(map[container.ID]bool) // one of its sockets is slowed elsewhere
	for cookie, s := range now.Senders {
		before, there := was.Senders[cookie]
		if !there || before.Container != s.Container || !s.wants(before.Sender, took) {
			continue
		}
		if !s.here(before.Sender, took, delay, dropped) {
			held[s.Container] = true
			continue
		}
		sent[s.Container] += float64(s.Acked-before.Acked) / took.Seconds()
		window := s.Room
		if s.Unsent == 0 {
			window = min(window, s.InFlight) // its buffer holds no more
		}
		room[s.Container] += float64(window) / max(s.Least, time.Microsecond).Seconds()
	}
	out := make(map[container.ID]Loss)
	for id, got := range sent {
		// It may also send on sockets that are not waiting here.
		if all, before := now.Sent[id], was.Sent[id]; all > before && before > 0 {
			got = max(got, float64(all-before)/took.Seconds())
		}
		if due := min(carried, room[id]); due > got && !held[id] {
			out[id] = Loss{Part: 1 - got/due, Culprit: most(sent, id)}
		}
	}
	return out
}

// wants reports whether the program always had more to send than the socket could.
func (s Sender) wants(before netdev.Sender, took time.Duration) bool {
	return before.Unsent > 0 && s.Unsent > 0 || float64(s.Buffer-before.Buffer) >= bufferFull*float64(took)
}

// here reports whether a socket was always slowed, and at this uplink.
func (s Sender) here(before netdev.Sender, took, delay time.Duration, dropped float64) bool {
	busy := s.Busy - before.Busy - (s.Window - before.Window)
	waits := float64(s.RTT - s.Least)
	again := ratio(s.Retransmits-min(before.Retransmits, s.Retransmits), s.Segments-min(before.Segments, s.Segments))
	return !s.Paced && s.Acked >= before.Acked &&
		float64(busy) >= busyEnough*float64(took) &&
		waits >= leastOfDelay*float64(delay) && waits <= mostOfDelay*float64(delay) &&
		again <= mostOfDrops*dropped+alwaysLost
}

func ratio(part, all uint64) float64 {
	if all == 0 {
		return 0
	}
	return float64(part) / float64(all)
}

// most returns the other container that sent the most, the lowest id first; 0: none.
func most(sent map[container.ID]float64, but container.ID) (who container.ID) {
	for id, n := range sent {
		if id != but && (who == 0 || n > sent[who] || n == sent[who] && id < who) {
			who = id
		}
	}
	return who
}
