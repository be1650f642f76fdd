package sched

import (
	"errors"
	"testing"
	"time"

	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/kernel/cgroup"
	"github.com/fairlead-project/fairlead/kernel/journal"
)

func TestSlice(t *testing.T) {
	testkit.Smoke(t, "knob:slice")
	testkit.NeedRoot(t)
	th, remove := napi(t)
	j := testkit.Journal(t, journal.Open)
	knob := Slice("/proc", th.Thread)
	before, err := knob.Read()
	if err != nil {
		t.Fatal(err)
	}
	if before == NoSlice {
		testkit.Skip(t, "kernel has no slices of a thread's own")
	}
	want := FormatSlice(300 * time.Microsecond)
	if err := j.Turn(knob, want, journal.Owner{Feature: "test"}); err != nil {
		t.Fatal(err)
	}
	if got, err := knob.Read(); err != nil || got != want || got == before {
		t.Errorf("slice is %q after %q was written over %q (%v)", got, want, before, err)
	}
	open := func(ref journal.Ref) (journal.Knob, error) { return OpenKnob("/proc", cgroup.Layout{}, ref) }
	if _, err := j.Restore(open, func(journal.Entry) bool { return true }); err != nil {
		t.Fatal(err)
	}
	if got, err := knob.Read(); err != nil || got != before {
		t.Errorf("slice is %q after restore, was %q before (%v)", got, before, err)
	}

	for _, bad := range []string{"", "-1", "1ms", "99999999999999999999"} {
		if err := knob.Write(bad); err == nil {
			t.Errorf("%q was accepted", bad)
		}
	}
	remove()
	// The kernel lets go of a thread a moment after it has stopped it.
	for end := time.Now().Add(20 * time.Second); ; time.Sleep(time.Millisecond) {
		if _, err := knob.Read(); errors.Is(err, journal.ErrGone) {
			break
		} else if err != nil || time.Now().After(end) {
			t.Fatalf("slice of a thread that has ended: %v, want ErrGone", err)
		}
	}
}
