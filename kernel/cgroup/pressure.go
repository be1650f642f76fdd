package cgroup

import (
	"fmt"
	"strconv"
	"strings"
	"time"
)

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
