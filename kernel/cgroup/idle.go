package cgroup

import (
	"errors"
	"fmt"
	"path/filepath"
	"strconv"

	"github.com/fairlead-project/fairlead/kernel/journal"
)

// KindIdle is the journal kind of a cgroup that may be idle.
const KindIdle = "idle"

// Idled is the value of an idle knob for a cgroup whose tasks run only while nobody else
// wants the CPU (cpu.idle, since Linux 5.15).
const Idled = "idle"

// Idle returns the knob that makes one cgroup directory with the cpu controller, v1 or
// v2, idle: its value is [Idled], or else the cgroup's weight as [Weight] gives it. A
// knob of the file cpu.idle alone would lose that weight: the kernel gives a cgroup that
// is idle no more the default one (kernel/sched/fair.c, sched_group_set_idle). While the
// cgroup is idle, its weight cannot be written, which gives EINVAL.
func Idle(dir string) journal.Knob { return idle(dir) }

// OpenIdle opens the knob that an earlier process wrote into the journal. It refuses a
// path that does not lie below root.
func OpenIdle(root string, ref journal.Ref) (journal.Knob, error) {
	k, err := OpenFile(root, journal.Ref{Kind: KindFile, Object: ref.Object})
	if err != nil {
		return nil, err
	}
	if path := k.Ref().Object; filepath.Base(path) == idleFile {
		return idle(filepath.Dir(path)), nil
	}
	return nil, fmt.Errorf("open knob %s %q: not a file %s", ref.Kind, ref.Object, idleFile)
}

const idleFile = "cpu.idle"

type idle string

// Ref names the file, so that the place of the knob is that of the weight.
func (k idle) Ref() journal.Ref {
	return journal.Ref{Kind: KindIdle, Object: filepath.Join(string(k), idleFile)}
}

func (k idle) Read() (string, error) {
	switch is, err := value(string(k), idleFile); {
	case errors.Is(err, errNoFile):
		return "", fmt.Errorf("%s of %s: %w: it needs the cpu controller and Linux 5.15", idleFile, string(k), errors.ErrUnsupported)
	case err != nil:
		return "", err
	case is != "0":
		return Idled, nil
	}
	w, err := Weight(string(k))
	return strconv.FormatUint(w, 10), err
}

func (k idle) Write(to string) error {
	dir := string(k)
	if to == Idled {
		return File(filepath.Join(dir, idleFile)).Write("1")
	}
	if _, err := strconv.ParseUint(to, 10, 63); err != nil {
		return fmt.Errorf("write %s of %s: %q is neither %s nor a weight", idleFile, dir, to, Idled)
	}
	if err := File(filepath.Join(dir, idleFile)).Write("0"); err != nil {
		return err
	}
	name := "cpu.weight"
	if _, err := value(dir, name); errors.Is(err, errNoFile) {
		name = "cpu.shares"
	}
	return File(filepath.Join(dir, name)).Write(to)
}

// Unfinished implements journal.Stepwise: the default weight is what is there between
// the two steps of a Write.
func (k idle) Unfinished(now, target string) bool {
	return target != Idled && (now == "100" || now == "1024")
}
