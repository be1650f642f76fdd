package feature

import (
	"testing"
	"time"
)

// Setting the clock does not change the length of a turn: Loop keeps its beginning by the monotonic
// clock.
func TestLoop(t *testing.T) {
	var l Loop
	before := time.Now()
	l.Begin()
	if since := l.Busy(); since.Before(before) || since == since.Round(0) {
		t.Errorf("busy since %v, begun after %v", since, before)
	}
	if l.End(); !l.Busy().IsZero() {
		t.Errorf("at the end it is busy since %v", l.Busy())
	}
}

// A Turn is made the way that Contain says.
func TestTurn(t *testing.T) {
	var l Loop
	made := 0
	l.Turn(func() { made++ })
	l.Contain(func(turn func()) { turn(); turn() })
	if l.Turn(func() { made++ }); made != 3 {
		t.Errorf("of one turn, and one that is made twice, %d were made", made)
	}
}
