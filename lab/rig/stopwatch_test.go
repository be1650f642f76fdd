package rig

import (
	"testing"
	"time"

	"github.com/fairlead-project/fairlead/internal/testkit"
)

// TestStopwatch checks that a stopwatch measures softirqs from its start on, and separates them by
// their packets.
func TestStopwatch(t *testing.T) {
	testkit.NeedRoot(t)
	w, err := NewStopwatch(StopwatchConfig{Tells: true})
	must(t, err)
	t.Cleanup(func() { must(t, w.Close()) })
	r := build(t, Config{Path: NIC, Unsteered: true})
	run, err := r.Send(t.Context(), Traffic{Kind: UDP}) // to 10.111.0.3
	must(t, err)
	read := func() Elapsed {
		e, err := w.Read()
		must(t, err)
		return e
	}
	must(t, run.SetRate(1000))
	if !moves(run.Receivers[0]) {
		t.Fatal("nothing is received")
	}
	if e := read(); e != (Elapsed{}) {
		t.Errorf("before its start it has %v", e)
	}
	must(t, w.Start())
	for n := 0; ; n++ {
		e := read()
		if e[NetRx] > 0 && e[Second] > 0 {
			break
		}
		if n == 1000 {
			t.Fatalf("of NET_RX it has %v, of that the container's %v", e[NetRx], e[Second])
		}
		time.Sleep(10 * time.Millisecond)
	}
	// Under traffic, a softirq may end in the middle of a reading.
	if err := run.Stop(); err != nil {
		t.Error(err)
	}
	if e := read(); e[First] != 0 || e[Both] != 0 || e[Second] > e[NetRx] || e[LocalTimer] != 0 {
		t.Errorf("it has %v", e)
	}
}
