package cgroup

import (
	"errors"
	"fmt"
	"math"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/fairlead-project/fairlead/kernel/journal"
)

// Bandwidth is the CFS bandwidth of one cgroup: Quota of CPU time in each Period, and up to Burst
// of unused quota.
type Bandwidth struct {
	Quota   time.Duration
	Limited bool // whether there is a Quota
	Period  time.Duration
	Burst   time.Duration
}

// ReadBandwidth reads the bandwidth of one cgroup directory, v1 or v2. Errors:
// errors.ErrUnsupported without a cpu controller or at the root of v2, and
// journal.ErrGone.
func ReadBandwidth(dir string) (Bandwidth, error) {
	b, err := readBandwidth(dir)
	if errors.Is(err, errNoFile) {
		err = fmt.Errorf("%w: no cpu controller", errors.ErrUnsupported)
	}
	if err != nil {
		return Bandwidth{}, fmt.Errorf("cpu bandwidth of %s: %w", dir, err)
	}
	return b, nil
}

func readBandwidth(dir string) (Bandwidth, error) {
	b, v2, err := (*Files)(nil).readQuota(dir)
	if err != nil {
		return Bandwidth{}, err
	}
	burst := "cpu.cfs_burst_us"
	if v2 {
		burst = "cpu.max.burst"
	}
	text, err := value(dir, burst)
	switch {
	case errors.Is(err, errNoFile):
		return b, nil
	case err != nil:
		return Bandwidth{}, err
	}
	if b.Burst, err = parseMicros(text); err != nil {
		return Bandwidth{}, fmt.Errorf("%s: %w", burst, err)
	}
	return b, nil
}

// readQuota reads a bandwidth without its burst, and whether it is that of a v2 directory.
func (f *Files) readQuota(dir string) (b Bandwidth, v2 bool, err error) {
	text := ""
	if v2 = !f.has(filepath.Join(dir, quotaFile)); v2 {
		text, err = f.value(dir, bandFile)
		v2 = !errors.Is(err, errNoFile)
	}
	if !v2 {
		var period string
		if text, err = f.value(dir, quotaFile); err == nil {
			period, err = f.value(dir, "cpu.cfs_period_us")
			text += " " + period
		}
	}
	if err != nil {
		return Bandwidth{}, v2, err
	}
	b, err = parseBandwidth(text)
	return b, v2, err
}

// parseBandwidth parses "QUOTA PERIOD" in microseconds; "max" and -1 are no quota.
func parseBandwidth(text string) (b Bandwidth, err error) {
	quota, period, ok := strings.Cut(text, " ")
	if !ok {
		return Bandwidth{}, fmt.Errorf("%q is not a quota and a period", text)
	}
	if b.Period, err = parseMicros(period); err != nil || b.Period == 0 {
		return Bandwidth{}, fmt.Errorf("bad period in %q", text)
	}
	if quota == "max" || quota == "-1" {
		return b, nil
	}
	b.Limited = true
	if b.Quota, err = parseMicros(quota); err != nil || b.Quota == 0 {
		return Bandwidth{}, fmt.Errorf("bad quota in %q", text)
	}
	return b, nil
}

// parseMicros parses a number of microseconds.
func parseMicros(text string) (time.Duration, error) {
	n, err := strconv.ParseUint(text, 10, 63)
	if err != nil || n > math.MaxInt64/uint64(time.Microsecond) {
		return 0, fmt.Errorf("bad number of microseconds %q", text)
	}
	return time.Duration(n) * time.Microsecond, nil
}

// Quota returns the knob of a cgroup's quota, and the value to write for a quota, which is rounded
// to microseconds. On v1 the period has a file of its own; on v2 it is written along with the
// quota. A write also refills the quota of the running period and unthrottles the cgroup's tasks.
// Of several claims, the strictest counts.
func Quota(dir string, v2 bool, quota, period time.Duration) (journal.Knob, string) {
	k := quotaKnob(dir, v2)
	return k, k.text(Bandwidth{Quota: quota, Limited: true, Period: period})
}

const (
	bandFile  = "cpu.max"
	quotaFile = "cpu.cfs_quota_us"
)

type quota struct{ file }

func quotaKnob(dir string, v2 bool) quota {
	if v2 {
		return quota{file(filepath.Join(dir, bandFile))}
	}
	return quota{file(filepath.Join(dir, quotaFile))}
}

// text returns the knob's value for a bandwidth.
func (k quota) text(b Bandwidth) string {
	text := strconv.FormatInt(b.Quota.Round(time.Microsecond).Microseconds(), 10)
	if filepath.Base(string(k.file)) == quotaFile {
		if !b.Limited {
			return "-1"
		}
		return text
	}
	if !b.Limited {
		text = "max"
	}
	return text + " " + strconv.FormatInt(b.Period.Microseconds(), 10)
}

// parse is the reverse of text. On v1, where the value has no period, it uses the given one.
func (k quota) parse(text string, period time.Duration) (Bandwidth, error) {
	if filepath.Base(string(k.file)) == quotaFile {
		text += " " + strconv.FormatInt(period.Microseconds(), 10)
	}
	return parseBandwidth(text)
}

// Compose implements journal.Composed: the strictest of several quotas counts.
func (k quota) Compose(wants []string) string {
	of, least := wants[len(wants)-1], math.Inf(1)
	for _, want := range wants {
		b, err := k.parse(want, time.Second)
		if part := float64(b.Quota) / float64(b.Period); err == nil && b.Limited && part < least {
			of, least = want, part
		}
	}
	return of
}

// GivenBandwidth reads the bandwidth that the host's owner has set for one cgroup directory,
// whatever quota the journal's claims have put in force. claimed reports whether there is such a
// claim. Errors as for ReadBandwidth.
func GivenBandwidth(j *journal.Journal, dir string, v2 bool) (b Bandwidth, claimed bool, err error) {
	b, err = ReadBandwidth(dir)
	if err != nil {
		return b, false, err
	}
	k := quotaKnob(dir, v2)
	now := k.text(b)
	text := j.Given(k.Ref(), now)
	if text == now {
		return b, false, nil
	}
	given, err := k.parse(text, b.Period)
	if err != nil {
		return b, false, fmt.Errorf("cpu bandwidth of %s: %w", dir, err)
	}
	given.Burst = b.Burst
	return given, true, nil
}

// Periods counts the bandwidth periods of a cgroup. The phase of the periods stays the same for as
// long as the cgroup lives and Period is not changed. Periods in which nothing runs in the cgroup
// are not counted.
type Periods struct {
	Count     uint64
	Throttled uint64 // those at the end of which tasks were throttled
}

// ReadPeriods reads Periods from cpu.stat of one cgroup directory, v1 or v2. Errors as for
// ReadBandwidth.
func ReadPeriods(dir string) (Periods, error) {
	f, err := (*Files)(nil).cpuStat(dir)
	if err != nil {
		return Periods{}, err
	}
	count, ok := f["nr_periods"]
	if !ok {
		return Periods{}, fmt.Errorf("cpu periods of %s: %w: no cpu controller", dir, errors.ErrUnsupported)
	}
	return Periods{count, f["nr_throttled"]}, nil
}
