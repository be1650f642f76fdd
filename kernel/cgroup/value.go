package cgroup

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/fairlead-project/fairlead/kernel/journal"
)

// maxCPU is the highest CPU number in a list. The kernel's own bound (NR_CPUS) is 8192 at the most.
const maxCPU = 8191

// CPUQuota reads the CFS bandwidth of one cgroup directory, v1 or v2, in CPUs (1.5 is 150 ms in
// each 100 ms); limited is false without a quota. It reads this cgroup only: one above it may have
// a smaller quota. A cgroup without the file, such as the root of v2, has no quota. For a cgroup
// that has gone, the error matches journal.ErrGone.
func CPUQuota(dir string) (cpus float64, limited bool, err error) {
	return (*Files)(nil).CPUQuota(dir)
}

// CPUQuota is the function of that name, with kept files.
func (f *Files) CPUQuota(dir string) (cpus float64, limited bool, err error) {
	b, _, err := f.readQuota(dir)
	switch {
	case errors.Is(err, errNoFile):
		return 0, false, nil
	case err != nil:
		return 0, false, fmt.Errorf("cpu quota of %s: %w", dir, err)
	}
	return float64(b.Quota) / float64(b.Period), b.Limited, nil
}

// Weight reads the CPU weight of one cgroup directory among its siblings: cpu.weight on v2 (1 to
// 10000, by default 100), cpu.shares on v1 (2 to 262144, by default 1024). It is 0 for an idle
// cgroup (cpu.idle), which has no weight to change, whatever the file shows. For a cgroup with
// neither file, the error matches errors.ErrUnsupported, and for one that has gone,
// journal.ErrGone.
func Weight(dir string) (uint64, error) {
	text, err := value(dir, "cpu.weight")
	if errors.Is(err, errNoFile) {
		text, err = value(dir, "cpu.shares")
	}
	if errors.Is(err, errNoFile) {
		return 0, fmt.Errorf("cpu weight of %s: %w: no cpu controller", dir, errors.ErrUnsupported)
	}
	if err != nil {
		return 0, fmt.Errorf("cpu weight: %w", err)
	}
	w, err := strconv.ParseUint(text, 10, 63)
	if err != nil {
		return 0, fmt.Errorf("cpu weight of %s: bad value %q", dir, text)
	}
	if w > idleWeight {
		return w, nil
	}
	switch idle, err := value(dir, "cpu.idle"); {
	case err == nil && idle != "0":
		return 0, nil
	case err != nil:
		return 0, fmt.Errorf("cpu weight: %w", err)
	case w == 0:
		return 0, fmt.Errorf("cpu weight of %s: bad value %q", dir, text)
	}
	return w, nil
}

// idleWeight is the largest weight that the kernel shows for an idle cgroup, 3 of
// 1024: unchanged on v1, and in parts of 100 on v2, rounded to 0 or, by newer
// kernels, to 1 (WEIGHT_IDLEPRIO, kernel/sched/sched.h).
const idleWeight = 3

// CPUs returns the CPUs that the processes of a cgroup directory may use, in ascending order. Where
// the controller is not enabled in the cgroup, the nearest cgroup above it counts. Errors:
// journal.ErrGone, and errors.ErrUnsupported for a hierarchy without cpuset.
func CPUs(dir string) ([]int, error) {
	for at := dir; ; at = filepath.Dir(at) {
		text, err := value(at, "cpuset.cpus.effective")
		if errors.Is(err, errNoFile) {
			text, err = value(at, "cpuset.effective_cpus")
		}
		if errors.Is(err, errNoFile) {
			continue // ends at the mount: the directory above it is no cgroup
		}
		if at != dir && errors.Is(err, journal.ErrGone) {
			return nil, fmt.Errorf("cpus of %s: %w: no cpuset controller", dir, errors.ErrUnsupported)
		}
		if err != nil {
			return nil, fmt.Errorf("cpus: %w", err)
		}
		cpus, err := ParseCPUs(text)
		if err != nil {
			return nil, fmt.Errorf("cpus of %s: %w", at, err)
		}
		return cpus, nil
	}
}

// ParseCPUs parses a CPU list in the kernel's form, "0-3,8". The result is in ascending order
// without repetition. "" is no CPU.
func ParseCPUs(list string) ([]int, error) {
	if list == "" {
		return nil, nil
	}
	var in [maxCPU + 1]bool
	for part := range strings.SplitSeq(list, ",") {
		lo, hi, isRange := strings.Cut(part, "-")
		if !isRange {
			hi = lo
		}
		a, err1 := strconv.ParseUint(lo, 10, 16)
		b, err2 := strconv.ParseUint(hi, 10, 16)
		if err1 != nil || err2 != nil || a > b || b > maxCPU {
			return nil, fmt.Errorf("bad part %q in list of CPUs", part)
		}
		for i := a; i <= b; i++ {
			in[i] = true
		}
	}
	var cpus []int
	for i, is := range in {
		if is {
			cpus = append(cpus, i)
		}
	}
	return cpus, nil
}

// FormatCPUs formats a CPU list as the kernel does.
func FormatCPUs(cpus []int) string {
	cpus = slices.Compact(slices.Sorted(slices.Values(cpus)))
	var b strings.Builder
	for i := 0; i < len(cpus); {
		j := i
		for j+1 < len(cpus) && cpus[j+1] == cpus[j]+1 {
			j++
		}
		if b.Len() > 0 {
			b.WriteByte(',')
		}
		b.WriteString(strconv.Itoa(cpus[i]))
		if j > i {
			b.WriteString("-" + strconv.Itoa(cpus[j]))
		}
		i = j + 1
	}
	return b.String()
}

// errNoFile means that the cgroup exists but has no such file.
var errNoFile = errors.New("no such file in cgroup")

func value(dir, name string) (string, error) { return (*Files)(nil).value(dir, name) }

// value reads a file of a cgroup, and distinguishes a missing file from a missing
// cgroup: every cgroup has cgroup.procs.
func (f *Files) value(dir, name string) (string, error) {
	text, err := f.read(filepath.Join(dir, name))
	if errors.Is(err, journal.ErrGone) {
		if _, err := os.Stat(filepath.Join(dir, "cgroup.procs")); err == nil {
			return "", errNoFile
		}
	}
	return text, err
}
