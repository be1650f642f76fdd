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

// Waited returns how long runnable tasks of one cgroup v2 directory, or of those below, waited for
// a CPU while none of them ran there: for their turn, or for the next period of a quota. It is the
// total of "full" in cpu.pressure, an average over the CPUs of the tasks, so it grows no faster
// than time passes. Errors: journal.ErrGone, and errors.ErrUnsupported where the kernel does not
// count (CONFIG_PSI, psi=, cgroup.pressure).
func Waited(dir string) (time.Duration, error) { return (*Files)(nil).Waited(dir) }

// Waited is the function of that name, with kept files.
func (f *Files) Waited(dir string) (time.Duration, error) {
	return f.pressure(dir, "cpu.pressure", "full")
}

// Stalled returns how long at least one task of a cgroup v2 directory, or of those below, was
// stalled on a resource, "cpu" or "io": the total of "some" in its pressure file. It includes the
// waits of the cgroup's tasks for one another, and for its own quota. Errors as for Waited.
func Stalled(dir, resource string) (time.Duration, error) {
	return (*Files)(nil).pressure(dir, resource+".pressure", "some")
}

func (f *Files) pressure(dir, file, kind string) (time.Duration, error) {
	return parsed(f, dir, file, func(text string) (time.Duration, error) { return parsePressure(text, kind) })
}

// parsePressure returns the total, in microseconds, of the line "KIND avg10=N … total=N".
func parsePressure(text, kind string) (time.Duration, error) {
	for line := range strings.Lines(text) {
		fields := strings.Fields(line)
		if len(fields) == 0 || fields[0] != kind {
			continue
		}
		for _, f := range fields[1:] {
			if number, ok := strings.CutPrefix(f, "total="); ok {
				n, err := strconv.ParseUint(number, 10, 64)
				if err != nil {
					return 0, fmt.Errorf("bad line %q", line)
				}
				return span(n, time.Microsecond), nil
			}
		}
	}
	return 0, fmt.Errorf("no total in %q", text)
}
