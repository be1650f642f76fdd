package charge

import (
	"runtime"
	"testing"
	"time"
)

// A call that hangs with the lock held keeps the loop from all charged containers: the loop's state
// shows that outside.
func TestLoopBehindACall(t *testing.T) {
	for name, turn := range map[string]func(*Charger) error{
		"round": func(ch *Charger) error { return ch.round(time.Now()) },
		"write": func(ch *Charger) error { _, err := ch.write(); return err },
	} {
		ch := idle(Config{})
		ch.mu.Lock()
		done := make(chan error)
		go func() { done <- turn(ch) }()
		for ch.turn.Busy().IsZero() {
			runtime.Gosched()
		}
		ch.mu.Unlock()
		if err := <-done; err != nil || !ch.turn.Busy().IsZero() {
			t.Errorf("%s: %v, busy since %v", name, err, ch.turn.Busy())
		}
	}
}
