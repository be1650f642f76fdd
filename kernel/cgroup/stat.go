package cgroup

import (
	"errors"
	"fmt"
	"math"
	"strconv"
	"strings"
	"time"
)

// Usage returns the CPU time of one cgroup v2 directory from cpu.stat, which every v2 cgroup has,
// with or without the cpu controller. It includes softirqs that interrupted the cgroup's tasks,
// unless the kernel accounts them separately (IRQ_TIME_ACCOUNTING). Errors: journal.ErrGone, and
// errors.ErrUnsupported where there is no such count.
func Usage(dir string) (time.Duration, error) { return (*Files)(nil).Usage(dir) }

// Usage is the function of that name, with kept files.
func (f *Files) Usage(dir string) (time.Duration, error) {
	stat, err := f.cpuStat(dir)
	if err != nil {
		return 0, err
	}
	usec, ok := stat["usage_usec"]
	if !ok {
		return 0, fmt.Errorf("cpu usage of %s: %w", dir, errors.ErrUnsupported)
	}
	return span(usec, time.Microsecond), nil
}

// Throttled returns how long the quota of one directory with the cpu controller, v1 or v2, has
// throttled its tasks, and in how many of its periods. Quotas of cgroups above do not count. It
// returns zeros for a cgroup that can have no quota, and an error that matches journal.ErrGone for
// one that has gone.
func Throttled(dir string) (time.Duration, uint64, error) { return (*Files)(nil).Throttled(dir) }

// Throttled is the function of that name, with kept files.
func (f *Files) Throttled(dir string) (time.Duration, uint64, error) {
	stat, err := f.cpuStat(dir)
	if errors.Is(err, errors.ErrUnsupported) {
		return 0, 0, nil
	}
	if err != nil {
		return 0, 0, err
	}
	if usec, ok := stat["throttled_usec"]; ok {
		return span(usec, time.Microsecond), stat["nr_throttled"], nil
	}
	return span(stat["throttled_time"], time.Nanosecond), stat["nr_throttled"], nil
}

// span limits a kernel counter to the range of a Duration.
func span(n uint64, unit time.Duration) time.Duration {
	return time.Duration(min(n, uint64(math.MaxInt64/unit))) * unit
}

func (f *Files) cpuStat(dir string) (map[string]uint64, error) {
	return parsed(f, dir, "cpu.stat", parseStat)
}

// parsed returns what parse makes of a file of a cgroup.
func parsed[T any](f *Files, dir, file string, parse func(text string) (T, error)) (of T, err error) {
	text, err := f.value(dir, file)
	switch {
	case errors.Is(err, errNoFile):
		err = errors.ErrUnsupported
	case err != nil:
		return of, fmt.Errorf("%s: %w", file, err)
	default:
		of, err = parse(text)
	}
	if err != nil {
		return of, fmt.Errorf("%s of %s: %w", file, dir, err)
	}
	return of, nil
}

// parseStat parses a flat keyed file: "KEY NUMBER" in each line.
func parseStat(text string) (map[string]uint64, error) {
	f := make(map[string]uint64)
	for line := range strings.Lines(text) {
		key, number, _ := strings.Cut(strings.TrimSuffix(line, "\n"), " ")
		n, err := strconv.ParseUint(number, 10, 64)
		if err != nil || key == "" {
			return nil, fmt.Errorf("bad line %q", line)
		}
		f[key] = n
	}
	return f, nil
}
