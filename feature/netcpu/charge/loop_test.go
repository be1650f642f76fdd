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
		"none":  func(ch *Charger) error { ch.none(); return nil },
		"round": func(ch *Charger) error { return ch.round(time.Now()) },
		"write": func(ch *Charger) error { _, err := ch.write(); return err },
	} {
		ch := idle(Config{})
		ch.mu.Lock()
		done := make(chan error)
		go func() { done <- turn(ch) }()
		for ch.Loop.Busy().IsZero() {
			runtime.Gosched()
		}
		ch.mu.Unlock()
		if err := <-done; err != nil || !ch.Loop.Busy().IsZero() {
			t.Errorf("%s: %v, busy since %v", name, err, ch.Loop.Busy())
		}
	}
}

// The loop does not wake up while nothing is charged.
func TestLoopSleeps(t *testing.T) {
	r := newChargeRig(t, true, "cpu.max", "max 100000\n")
	r.charge() // would go on for ever
	must(t, r.Add(r.container(), 0))
	select {
	case <-r.first:
	default:
		t.Error("the first container does not wake the loop")
	}
	done := make(chan struct{})
	r.mu.Lock()
	go func() { r.charge(); close(done) }()
	for r.Loop.Busy().IsZero() { // it is at work, and waits for the lock
		runtime.Gosched()
	}
	r.mu.Unlock()
	must(t, r.Remove(webID))
	<-done
}
