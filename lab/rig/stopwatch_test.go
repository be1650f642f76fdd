package rig

import (
	"testing"

	"github.com/fairlead-project/fairlead/internal/testkit"
)

// TestStopwatch checks that a stopwatch measures the softirqs of traffic from its start on.
func TestStopwatch(t *testing.T) {
	testkit.NeedRoot(t)
	w, err := NewStopwatch()
	must(t, err)
	t.Cleanup(func() { must(t, w.Close()) })
	r := build(t, Config{Path: NIC, Unsteered: true})
	run, err := r.Send(t.Context(), Traffic{Kind: UDP})
	must(t, err)
	must(t, run.SetRate(1000))
	if !moves(run.Receivers[0]) {
		t.Fatal("nothing is received")
	}
	if sum, err := w.Read(); err != nil || sum != 0 {
		t.Errorf("before its start it has %v, %v", sum, err)
	}
	must(t, w.Start())
	testkit.AwaitNone(t, func() string {
		sum, err := w.Read()
		must(t, err)
		if sum == 0 {
			return "it measures no softirq"
		}
		return ""
	})
	must(t, run.Stop())
}
