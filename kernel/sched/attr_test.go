package sched

import (
	"errors"
	"fmt"
	"io/fs"
	"math"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/kernel/cgroup"
	"github.com/fairlead-project/fairlead/kernel/journal"
)

// turned turns a knob of a kernel thread, has it refuse what is no value, and restores it.
func turned(t *testing.T, knob journal.Knob, to string, bad ...string) {
	t.Helper()
	j := testkit.Journal(t, journal.Open)
	before, err := knob.Read()
	must(t, err)
	must(t, j.Turn(knob, to, journal.Owner{Feature: "test"}))
	if got, err := knob.Read(); err != nil || got != to || got == before {
		t.Errorf("%s is %q after %q was written over %q (%v)", knob.Ref().Kind, got, to, before, err)
	}
	open := func(ref journal.Ref) (journal.Knob, error) { return OpenKnob("/proc", cgroup.Layout{}, ref) }
	_, err = j.Restore(open, nil)
	must(t, err)
	testkit.Gives(t, knob.Ref().Kind, before)(knob.Read())
	for _, value := range bad {
		testkit.Fails(t, fmt.Sprintf("%s: %q", knob.Ref().Kind, value), knob.Write(value))
	}
}

// TestBeNice has a process go before others: alone, or with the session that it leads.
func TestBeNice(t *testing.T) {
	testkit.NeedRoot(t)
	const variable = "FAIRLEAD_TEST_NICE"
	session, err := os.ReadFile("/proc/self/autogroup") // "/autogroup-7 nice 0"
	grouped := err == nil
	if want := os.Getenv(variable); want != "" {
		must(t, BeNice(-3))
		now, _ := os.ReadFile("/proc/self/autogroup")
		n, err := unix.Getpriority(unix.PRIO_PROCESS, 0)
		if 20-n != -3 || err != nil || grouped && !strings.HasSuffix("no groups"+string(now), want) {
			t.Errorf("nice value %d (%v), %q, want %q", 20-n, err, now, want)
		}
		return
	}
	for want, leads := range map[string]bool{"no groups" + string(session): false, " nice -3\n": true} {
		cmd := exec.Command("/proc/self/exe", "-test.run=^TestBeNice$")
		cmd.Env = append(os.Environ(), variable+"="+want)
		cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: leads}
		out, err := cmd.CombinedOutput()
		testkit.Is(t, string(out), err, nil)
	}
}

func TestSlice(t *testing.T) {
	testkit.OnKernels(t)
	th, remove := napi(t)
	knob := Slice("/proc", th.Thread)
	if before, err := knob.Read(); err == nil && before == NoSlice {
		testkit.Skip(t, "kernel has no slices of a thread's own")
	}
	turned(t, knob, FormatSlice(300*time.Microsecond), "", "-1", "1ms", "99999999999999999999")
	remove()
	// The thread of a stopped kthread lives on for a moment.
	testkit.AwaitNone(t, func() string {
		if _, err := knob.Read(); !errors.Is(err, journal.ErrGone) {
			return fmt.Sprintf("slice of a thread that has ended: %v, want ErrGone", err)
		}
		return ""
	})
}

func TestNice(t *testing.T) {
	testkit.OnKernels(t)
	th, _ := napi(t)
	knob, slice := Nice("/proc", th.Thread), Slice("/proc", th.Thread)
	if before, err := knob.Read(); err != nil || before != "0" {
		t.Fatalf("nice value %q (%v)", before, err)
	}
	turned(t, knob, "15", "", "20", "-21", "1.5", NoNice)
	// One call of the kernel sets both, and turning one leaves the other unchanged.
	asked, err := slice.Read()
	must(t, err)
	must(t, knob.Write("15"))
	testkit.Gives(t, "slice", asked)(slice.Read())
	if err := unix.SchedSetAttr(th.TID, &unix.SchedAttr{Size: unix.SizeofSchedAttr, Policy: unix.SCHED_FIFO, Priority: 1}, 0); err != nil {
		t.Logf("no real time here: %v", err) // an operator could have set it
	} else {
		testkit.Gives(t, "nice value of a real-time thread", NoNice)(knob.Read())
	}
}

func TestUsage(t *testing.T) {
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
