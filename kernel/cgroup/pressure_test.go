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
	if _, err := Waited(none); !errors.Is(err, errors.ErrUnsupported) {
		t.Errorf("without cpu.pressure: %v", err)
	}
	if _, err := Waited(filepath.Join(none, "gone")); !errors.Is(err, journal.ErrGone) {
		t.Errorf("of a gone cgroup: %v", err)
	}
}

func TestStalled(t *testing.T) {
	dir := tree(t, filepath.Join(t.TempDir(), "cg"), "io.pressure", "some avg10=1.00 total=1500\nfull avg10=0.00 total=900\n")
	if got, err := Stalled(dir, "io"); got != 1500*time.Microsecond || err != nil {
		t.Errorf("%v, %v", got, err)
	}
	if _, err := Stalled(dir, "cpu"); !errors.Is(err, errors.ErrUnsupported) {
		t.Errorf("without the file: %v", err)
	}
}

func FuzzPressure(f *testing.F) {
	testkit.Seeds(f, "some avg10=0.00 total=1\n", "some", "some total=", "some total=1 total=2", "full total=1", "\n", "some total=99999999999999999999")
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
