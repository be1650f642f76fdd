package sched

import (
	"errors"
	"fmt"
	"io/fs"
	"math"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/kernel/cgroup"
	"github.com/fairlead-project/fairlead/kernel/journal"
)

func TestSlice(t *testing.T) {
	testkit.OnKernels(t)
	testkit.NeedRoot(t)
	th, remove := napi(t)
	j := testkit.Journal(t, journal.Open)
	knob := Slice("/proc", th.Thread)
	before, err := knob.Read()
	must(t, err)
	if before == NoSlice {
		testkit.Skip(t, "kernel has no slices of a thread's own")
	}
	want := FormatSlice(300 * time.Microsecond)
	must(t, j.Turn(knob, want, journal.Owner{Feature: "test"}))
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
	// The thread of a stopped kthread lives on for a moment.
	testkit.Await(t, func() string {
		if _, err := knob.Read(); !errors.Is(err, journal.ErrGone) {
			return fmt.Sprintf("slice of a thread that has ended: %v, want ErrGone", err)
		}
		return ""
	})
}

func TestNice(t *testing.T) {
	testkit.OnKernels(t)
	testkit.NeedRoot(t)
	th, _ := napi(t)
	j := testkit.Journal(t, journal.Open)
	knob, slice := Nice("/proc", th.Thread), Slice("/proc", th.Thread)
	before, err := knob.Read()
	if err != nil || before != "0" {
		t.Fatalf("nice value %q (%v)", before, err)
	}
	asked, err := slice.Read()
	must(t, err)
	must(t, j.Turn(knob, "15", journal.Owner{Feature: "test"}))
	if got, err := knob.Read(); err != nil || got != "15" {
		t.Errorf("nice value %q after 15 was written (%v)", got, err)
	}
	// One call of the kernel sets both, and turning one leaves the other unchanged.
	if got, err := slice.Read(); err != nil || got != asked {
		t.Errorf("slice %q, was %q before the nice value was set (%v)", got, asked, err)
	}
	open := func(ref journal.Ref) (journal.Knob, error) { return OpenKnob("/proc", cgroup.Layout{}, ref) }
	if _, err := j.Restore(open, func(journal.Entry) bool { return true }); err != nil {
		t.Fatal(err)
	}
	if got, err := knob.Read(); err != nil || got != before {
		t.Errorf("nice value %q after restore, was %q before (%v)", got, before, err)
	}
	for _, bad := range []string{"", "20", "-21", "1.5", NoNice} {
		if err := knob.Write(bad); err == nil {
			t.Errorf("%q was accepted", bad)
		}
	}
	if err := unix.SchedSetAttr(th.TID, &unix.SchedAttr{Size: unix.SizeofSchedAttr, Policy: unix.SCHED_FIFO, Priority: 1}, 0); err != nil {
		t.Logf("no real time here: %v", err) // an operator could have set it
	} else if got, err := knob.Read(); err != nil || got != NoNice {
		t.Errorf("nice value of a real-time thread: %q (%v), want %q", got, err, NoNice)
	}
}

func TestUsage(t *testing.T) {
	testkit.NeedRoot(t)
	th, _ := napi(t)
	u, err := UsageOf("/proc", th.Thread)
	if errors.Is(err, fs.ErrNotExist) {
		testkit.Skip(t, "kernel does not count the turns of threads")
	}
	if err != nil || u.Turns == 0 || u.Ran <= 0 {
		t.Errorf("a thread that has begun: %+v, %v", u, err)
	}
	if _, err := UsageOf("/proc", Thread{TID: math.MaxInt32, Start: 1}); !errors.Is(err, journal.ErrGone) {
		t.Errorf("of a thread that has ended: %v, want ErrGone", err)
	}
	if _, err := UsageOf("/proc", Thread{TID: th.TID, Start: th.Start + 1}); !errors.Is(err, journal.ErrGone) {
		t.Errorf("another thread by its number: %v, want ErrGone", err)
	}
}
