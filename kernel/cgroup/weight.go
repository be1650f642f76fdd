package cgroup

import (
	"fmt"
	"path/filepath"
	"strconv"

	"github.com/fairlead-project/fairlead/kernel/journal"
)

// Idled is the value of a weight's knob for a cgroup that runs only on otherwise idle CPUs
// (cpu.idle).
const Idled = "idle"

// WeightRange is the range of CPU weights that the kernel takes (kernel/sched/sched.h and
// kernel/sched/core.c).
type WeightRange struct{ Least, Usual, Most uint64 }

// WeightKnob returns the knob of the CPU weight of one cgroup directory, and the range of its
// weights: cpu.weight on v2, cpu.shares on v1. Its value is the weight, or [Idled].
//
// Weight and idle are one knob, because the kernel has one state for both. It resets the weight to
// the default when a cgroup stops being idle (kernel/sched/fair.c, sched_group_set_idle), and
// refuses a weight for an idle cgroup (EINVAL). Of several claims, Idled counts, or else the
// largest weight.
func WeightKnob(dir string, v2 bool) (journal.Knob, WeightRange) {
	if v2 {
		return weight{file(filepath.Join(dir, weightFile))}, WeightRange{1, 100, 10000}
	}
	return weight{file(filepath.Join(dir, sharesFile))}, WeightRange{2, 1024, 262144}
}

const (
	weightFile = "cpu.weight"
	sharesFile = "cpu.shares"
	idleFile   = "cpu.idle"
)

// weight is identified by the path of the file with the weight.
type weight struct{ file }

func (k weight) idle() journal.Knob {
	return File(filepath.Join(filepath.Dir(string(k.file)), idleFile))
}

func (k weight) Read() (string, error) {
	text, err := k.file.Read()
	if err != nil {
		return "", err
	}
	is, err := k.idle().Read()
	if err != nil {
		return "", err
	}
	if is != "0" {
		return Idled, nil
	}
	return text, nil
}

func (k weight) Write(to string) error {
	is, err := k.idle().Read()
	if err != nil {
		return err
	}
	if to == Idled {
		return k.idle().Write("1")
	}
	if _, err := strconv.ParseUint(to, 10, 63); err != nil {
		return fmt.Errorf("write %s: %q is neither %s nor a weight", k.file, to, Idled)
	}
	if is != "0" {
		if err := k.idle().Write("0"); err != nil {
			return err
		}
	}
	return k.file.Write(to)
}

// GivenWeight reads the CPU weight that the host's owner has set for one cgroup directory, whatever
// the journal's claims have put in force. claimed reports whether there is such a claim. The weight
// is 0 for a cgroup that its owner has made idle. Errors: journal.ErrGone.
func GivenWeight(j *journal.Journal, dir string, v2 bool) (w uint64, claimed bool, err error) {
	k, _ := WeightKnob(dir, v2)
	now, err := k.Read()
	if err != nil {
		return 0, false, fmt.Errorf("cpu weight: %w", err)
	}
	given := j.Given(k.Ref(), now)
	if given == Idled {
		return 0, given != now, nil
	}
	if w, err = strconv.ParseUint(given, 10, 63); err != nil || w == 0 {
		return 0, false, fmt.Errorf("cpu weight of %s: bad value %q", dir, given)
	}
	return w, given != now, nil
}

// Compose implements journal.Composed.
func (k weight) Compose(wants []string) string {
	most, of := uint64(0), wants[len(wants)-1]
	for _, want := range wants {
		if want == Idled {
			return Idled
		}
		if w, err := strconv.ParseUint(want, 10, 63); err == nil && w > most {
			most, of = w, want
		}
	}
	return of
}

// Unfinished implements journal.Stepwise: between the two steps that end being idle, the weight is
// the default.
func (k weight) Unfinished(now, from, target string) bool {
	return from == Idled && target != Idled && (now == "100" || now == "1024")
}
