package cgroup

import (
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"
)

// Waited reads for how long some task of one cgroup v2 directory, or of those
// below, would have run and did not: it waited for its turn, or for the next
// period of a quota. It is the total of cpu.pressure, an average over the CPUs
// that the tasks are on, so that it grows by no more than the time that passes.
// Errors: journal.ErrGone, and errors.ErrUnsupported where the kernel does not
// count (CONFIG_PSI, psi=, cgroup.pressure).
func Waited(dir string) (time.Duration, error) {
	text, err := value(dir, "cpu.pressure")
	if errors.Is(err, errNoFile) {
		return 0, fmt.Errorf("cpu.pressure of %s: %w", dir, errors.ErrUnsupported)
	}
	if err != nil {
		return 0, fmt.Errorf("cpu.pressure: %w", err)
	}
	d, err := parsePressure(text)
	if err != nil {
		return 0, fmt.Errorf("cpu.pressure of %s: %w", dir, err)
	}
	return d, nil
}

// parsePressure reads the total, in microseconds, of the line "some avg10=N … total=N".
func parsePressure(text string) (time.Duration, error) {
	for line := range strings.Lines(text) {
		fields := strings.Fields(line)
		if len(fields) == 0 || fields[0] != "some" {
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
