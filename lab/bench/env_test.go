package bench

import (
	"io"
	"math"
	"os"
	"strings"
	"testing"
	"time"
)

// TestQuiet expects disturbed windows to be measured again, but no more often than allowed.
func TestQuiet(t *testing.T) {
	for _, tt := range []struct {
		name     string
		takes    int
		steal    []float64
		measured int
		kept     float64
		foreign  float64
		note     string
	}{
		{"quiet", 3, []float64{0.01}, 1, 0.01, 0.01, ""},
		{"beside other work", 3, []float64{0.01}, 1, 0.01, 0.5, "other work took up to 50 % of a CPU"},
		{"once disturbed", 3, []float64{0.3, 0.01}, 2, 0.01, 0, "1 were measured again, and of those that count it took up to 1 %"},
		{"always disturbed", 3, []float64{0.3, 0.1, 0.2}, 3, 0.1, 0, "2 were measured again, and of those that count it took up to 10 %"},
		{"may not", 0, []float64{0.3}, 1, 0.3, 0, "0 were measured again, and of those that count it took up to 30 %"},
	} {
		q := quiet{takes: tt.takes}
		measured := 0
		m, err := q.take(func() (sample, error) {
			measured++
			return sample{steal: tt.steal[measured-1]}, nil
		})
		if err != nil || measured != tt.measured || m.steal != tt.kept {
			t.Errorf("%s: measured %d times, kept %v (%v)", tt.name, measured, m.steal, err)
		}
		if notes := q.notes(tt.foreign); (notes == nil) != (tt.note == "") || notes != nil && (len(notes) > 1 || !strings.Contains(notes[0], tt.note)) {
			t.Errorf("%s: notes %q", tt.name, notes)
		}
	}
	if _, err := (&quiet{}).take(func() (sample, error) { return sample{}, io.EOF }); err != io.EOF {
		t.Errorf("a measurement that fails: %v", err)
	}
}

func TestFindRate(t *testing.T) {
	// The higher the cost of a packet, the fewer packets there are.
	for _, each := range []float64{2e-6, 8e-6, 60e-6} {
		used := func(rate uint64) float64 { return min(0.03+math.Sqrt(float64(rate)*each)*0.7, 1) }
		rate, err := findRate(0.35, func(rate uint64) (float64, error) { return used(rate), nil })
		if err != nil || math.Abs(used(rate)-0.35) > 0.02 {
			t.Errorf("packets of %v s: %d/s, which keep it busy by %v (%v)", each, rate, used(rate), err)
		}
	}
	if _, err := findRate(0.35, func(uint64) (float64, error) { return 0.5, nil }); err == nil || !strings.Contains(err.Error(), "50000/s: 0.50") {
		t.Errorf("a CPU that is busy by other things: %v", err)
	}
	if _, err := findRate(0.35, func(uint64) (float64, error) { return 0, nil }); err == nil {
		t.Error("an idle CPU has a rate")
	}
}

func TestCPUTimes(t *testing.T) {
	a, b := cpuTimes{idle: 850, all: 1000}, cpuTimes{idle: 850, steal: 40, all: 1240}
	if steal := b.stealSince(a); math.Abs(steal-40.0/240) > 1e-9 {
		t.Errorf("40 of 240 ticks are stolen: %v", steal)
	}
	if steal := a.stealSince(a); steal != 0 {
		t.Errorf("of no time at all %v is stolen", steal)
	}
	if busy := (cpuTimes{idle: 50, all: 200}).busySince(cpuTimes{idle: 0, all: 100}); busy <= 0 {
		t.Errorf("half busy is %v CPUs", busy)
	}
	if busy := a.busySince(a); busy != 0 {
		t.Errorf("no time at all is %v CPUs", busy)
	}
	if used := (cpuTimes{idle: 1.1, all: 3}).usedSince(cpuTimes{idle: 1, all: 2}, time.Second); math.Abs(used-0.9) > 1e-9 {
		t.Errorf("100 ms of idle time in a second: used %v", used)
	}
	if all := readCPU(allCPUs); all.all <= 0 || all.idle > all.all || readCPU(0).all > all.all || readCPU(1<<20) != (cpuTimes{}) {
		t.Errorf("this machine: %+v", all)
	}
}

func TestCPUTime(t *testing.T) {
	// The test has used some CPU time, and continues to run.
	first := cpuTime(os.Getpid())
	for range 1000 {
		if cpuTime(os.Getpid()) > first {
			break
		}
	}
	if first <= 0 || cpuTime(os.Getpid()) <= first {
		t.Errorf("this process has used %v, then %v", first, cpuTime(os.Getpid()))
	}
	if got := cpuTime(1 << 23); got != 0 {
		t.Errorf("a process that there cannot be has used %v", got)
	}
}
