package cgroup

import (
	"errors"
	"fmt"
	"math"
	"path/filepath"
	"testing"
	"time"

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
	if _, err := Usage(none); !errors.Is(err, errors.ErrUnsupported) {
		t.Errorf("usage without cpu.stat: %v", err)
	}
	if d, n, err := Throttled(none); d != 0 || n != 0 || err != nil {
		t.Errorf("throttled without cpu.stat: %v, %v, %v", d, n, err)
	}
	gone := filepath.Join(none, "gone")
	if _, err := Usage(gone); !errors.Is(err, journal.ErrGone) {
		t.Errorf("usage of a gone cgroup: %v", err)
	}
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
