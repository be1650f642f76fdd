package cgroup

import (
	"errors"
	"fmt"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/kernel/journal"
)

func TestStat(t *testing.T) {
	for _, c := range []struct {
		name, text       string
		usage, throttled time.Duration
		periods          uint64
		usageErr         error
	}{
		{"v2", "usage_usec 1500000\nuser_usec 1\nnr_periods 9\nnr_throttled 3\nthrottled_usec 250\n", 1500 * time.Millisecond, 250 * time.Microsecond, 3, nil},
		{"v2 without the controller", "usage_usec 7\nuser_usec 7\nsystem_usec 0\n", 7 * time.Microsecond, 0, 0, nil},
		{"v1", "nr_periods 9\nnr_throttled 3\nthrottled_time 1234\n", 0, 1234, 3, errors.ErrUnsupported},
		{"empty", "", 0, 0, 0, errors.ErrUnsupported},
		{"a very large one", "usage_usec 18446744073709551615\nthrottled_time 18446744073709551615\n", math.MaxInt64 / 1000 * 1000, math.MaxInt64, 0, nil},
	} {
		dir := tree(t, filepath.Join(t.TempDir(), "cg"), "cpu.stat", c.text)
		usage, err := Usage(dir)
		if usage != c.usage || !errors.Is(err, c.usageErr) {
			t.Errorf("%s: usage %v, %v", c.name, usage, err)
		}
		throttled, periods, err := Throttled(dir)
		if throttled != c.throttled || periods != c.periods || err != nil {
			t.Errorf("%s: throttled %v in %d periods, %v", c.name, throttled, periods, err)
		}
	}
	none := tree(t, filepath.Join(t.TempDir(), "cg"))
	testkit.Is(t, "usage without cpu.stat", testkit.Err(Usage(none)), errors.ErrUnsupported)
	if d, n, err := Throttled(none); d != 0 || n != 0 || err != nil {
		t.Errorf("throttled without cpu.stat: %v, %v, %v", d, n, err)
	}
	gone := filepath.Join(none, "gone")
	testkit.Is(t, "usage of a gone cgroup", testkit.Err(Usage(gone)), journal.ErrGone)
	if _, _, err := Throttled(gone); !errors.Is(err, journal.ErrGone) {
		t.Errorf("throttled of a gone cgroup: %v", err)
	}
}

func FuzzStat(f *testing.F) {
	testkit.Seeds(f, "usage_usec 1\n", "a 1\nb 2", "", "\n", "a", "a -1", "a 1 2", " 1", "a\x00 1", "a 99999999999999999999")
	f.Fuzz(func(t *testing.T, s string) {
		got, err := parseStat(s)
		if err != nil && got != nil {
			t.Errorf("%q: %v beside %v", s, got, err)
		}
		for key := range got {
			if key == "" {
				t.Errorf("%q: a number without a name", s)
			}
		}
		for _, n := range got {
			if span(n, time.Microsecond) < 0 {
				t.Errorf("%q: a negative time", s)
			}
		}
	})
}

// Usage and Throttled show the CPU time and the waits of a process that runs on a quota.
func TestStatInKernel(t *testing.T) {
	testkit.OnKernels(t)
	cg := testkit.Cgroup(t)
	if cg.V2 == "" || cg.CPU == "" {
		testkit.Skip(t, "no cgroup v2 tree, or no cpu controller")
	}
	quota, value := Quota(cg.CPU, cg.CPU == cg.V2, 10*time.Millisecond, 100*time.Millisecond)
	must(t, quota.Write(value))
	cg.Spinner(t)
	testkit.AwaitNone(t, func() string {
		usage, err1 := Usage(cg.V2)
		throttled, periods, err2 := Throttled(cg.CPU)
		must(t, errors.Join(err1, err2))
		if usage > 0 && throttled > 0 && periods > 0 {
			return ""
		}
		return fmt.Sprintf("usage %v, throttled %v in %d periods", usage, throttled, periods)
	})
}

func TestWaited(t *testing.T) {
	for _, c := range []struct {
		text string
		want time.Duration
		ok   bool
	}{
		{"some avg10=1.00 avg60=0.00 avg300=0.00 total=1500\nfull avg10=0.00 avg60=0.00 avg300=0.00 total=900\n", 900 * time.Microsecond, true},
		{"some avg10=0.00 avg60=0.00 avg300=0.00 total=0\n", 0, false},
		{"full total=18446744073709551615\n", math.MaxInt64 / 1000 * 1000, true},
		{"full avg10=0.00 avg60=0.00 avg300=0.00 total=9\n", 9 * time.Microsecond, true},
		{"some avg10=0.00 avg60=0.00 avg300=0.00 total=9\nfull total=-1\n", 0, false},
		{"full avg10=0.00\n", 0, false},
		{"", 0, false},
	} {
		got, err := Waited(tree(t, filepath.Join(t.TempDir(), "cg"), "cpu.pressure", c.text))
		if got != c.want || (err == nil) != c.ok {
			t.Errorf("%q: %v, %v", c.text, got, err)
		}
	}
	none := tree(t, filepath.Join(t.TempDir(), "cg"))
	testkit.Is(t, "without cpu.pressure", testkit.Err(Waited(none)), errors.ErrUnsupported)
	testkit.Is(t, "of a gone cgroup", testkit.Err(Waited(filepath.Join(none, "gone"))), journal.ErrGone)
}

func TestStalled(t *testing.T) {
	dir := tree(t, filepath.Join(t.TempDir(), "cg"), "io.pressure", "some avg10=1.00 total=1500\nfull avg10=0.00 total=900\n")
	testkit.Gives(t, "Stalled", time.Duration(1500*time.Microsecond))(Stalled(dir, "io"))
	testkit.Is(t, "without the file", testkit.Err(Stalled(dir, "cpu")), errors.ErrUnsupported)
}

func FuzzPressure(f *testing.F) {
	for _, s := range []string{"some avg10=0.00 total=1\n", "some", "some total=", "some total=1 total=2", "full total=1", "\n", "some total=99999999999999999999"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		if got, err := parsePressure(s, "full"); got < 0 || err != nil && got != 0 {
			t.Errorf("%q: %v, %v", s, got, err)
		}
	})
}

// Two groups that compute on one CPU wait for one another. Two tasks of one group with a CPU to
// themselves do not count as waiting, though each waits.
func TestWaitedInKernel(t *testing.T) {
	one, other := testkit.Cgroup(t), testkit.Cgroup(t)
	if one.V2 == "" || one.CPU == "" {
		testkit.Skip(t, "no cgroup v2 tree, or no cpu controller")
	}
	// Both groups together get nearly all of the CPU, whatever else runs there.
	for _, cg := range []testkit.CG{one, other} {
		weight, most := WeightKnob(cg.CPU, cg.CPU == cg.V2)
		must(t, weight.Write(fmt.Sprint(most.Most)))
	}
	begin, err := Waited(one.V2)
	if errors.Is(err, errors.ErrUnsupported) {
		testkit.Skip(t, "the kernel does not count who waits (psi)")
	}
	if err != nil || begin != 0 {
		t.Fatalf("an empty cgroup waited for %v, %v", begin, err)
	}
	// The processes inherit one CPU from this thread.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	var may, cpu unix.CPUSet
	must(t, unix.SchedGetaffinity(0, &may))
	for n := 0; cpu.Count() == 0; n++ {
		if may.IsSet(n) {
			cpu.Set(n)
		}
	}
	must(t, unix.SchedSetaffinity(0, &cpu))
	defer unix.SchedSetaffinity(0, &may)
	compute := func(cg testkit.CG, n int) {
		t.Helper()
		cmd := exec.Command("/bin/sh", "-c", "read x; "+strings.Repeat("while :; do :; done & ", n-1)+"while :; do :; done")
		in, err := cmd.StdinPipe()
		must(t, err)
		must(t, cmd.Start())
		t.Cleanup(func() { cmd.Process.Kill(); cmd.Wait() }) // the others go with the cgroup
		cg.Add(t, cmd.Process.Pid)
		in.Close()
	}
	// The waits of any task, from the line "some".
	some := func() time.Duration {
		text, err := os.ReadFile(filepath.Join(one.V2, "cpu.pressure"))
		must(t, err)
		line, _, _ := strings.Cut(string(text), "\n")
		d, err := parsePressure(line, "some")
		must(t, err)
		return d
	}
	waited := func() time.Duration {
		d, err := Waited(one.V2)
		must(t, err)
		return d
	}
	for _, tt := range []struct {
		name string
		cg   testkit.CG
		n    int
		own  bool // the tasks wait only for one another
	}{{"two of one group", one, 2, true}, {"and another group", other, 1, false}} {
		compute(tt.cg, tt.n)
		// Other load on the machine disturbs a measurement now and then.
		testkit.AwaitNone(t, func() string {
			s, w := some(), waited()
			time.Sleep(200 * time.Millisecond)
			s, w = some()-s, waited()-w
			if s > 50*time.Millisecond && (w < s/4) == tt.own {
				return ""
			}
			return fmt.Sprintf("%s: %v, and %v while none ran", tt.name, s, w)
		})
	}
}
