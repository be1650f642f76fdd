package cgroup

import (
	"errors"
	"fmt"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/fairlead-project/fairlead/kernel/journal"
)

// KindLine is the journal kind of one device's line in a cgroup file.
const KindLine = "line"

// Limits are caps on the I/O of a cgroup at one disk, per second; 0 is none.
type Limits struct{ ReadIOPS, WriteIOPS, ReadBytes, WriteBytes uint64 }

// Throttle returns the lines that cap the I/O of a cgroup directory at a whole disk, given as
// MAJOR:MINOR: one of io.max on v2, four of blkio.throttle.* on v1; the value "" is no line. The caps
// apply to the requests that the kernel charges to the cgroup. It charges buffered writes only on v2,
// and only where the file system supports cgroup writeback.
func Throttle(dir string, v2 bool, device string, l Limits) []journal.Setting {
	if v2 {
		text := ""
		if l != (Limits{}) {
			text = fmt.Sprintf("rbps=%s wbps=%s riops=%s wiops=%s", most(l.ReadBytes), most(l.WriteBytes), most(l.ReadIOPS), most(l.WriteIOPS))
		}
		return []journal.Setting{{Knob: line{filepath.Join(dir, "io.max"), device}, Value: text}}
	}
	var lines []journal.Setting
	for _, f := range []struct {
		name string
		most uint64
	}{{"read_iops", l.ReadIOPS}, {"write_iops", l.WriteIOPS}, {"read_bps", l.ReadBytes}, {"write_bps", l.WriteBytes}} {
		text := ""
		if f.most != 0 {
			text = strconv.FormatUint(f.most, 10)
		}
		lines = append(lines, journal.Setting{Knob: line{filepath.Join(dir, throttlePrefix+f.name+"_device"), device}, Value: text})
	}
	return lines
}

// Stricter returns those lines that hold the cgroup to less than the host's owner does, whatever
// the journal's claims have put in force. v2 has one line with all figures: there, looser and
// missing figures stay the owner's. Error: journal.ErrGone.
func Stricter(j *journal.Journal, dir string, v2 bool, device string, l Limits) (lines []journal.Setting, err error) {
	for _, line := range Throttle(dir, v2, device, l) {
		now, err := line.Read()
		if err != nil {
			return nil, err
		}
		given := j.Given(line.Ref(), now)
		if strict := stricter(given, line.Value); strict != given {
			line.Value = strict
			lines = append(lines, line)
		}
	}
	return lines, nil
}

// stricter returns the lower of two limits, or of each "KEY=LIMIT" of two lines; "" and max are no
// limit.
func stricter(given, ours string) string {
	if given == "" || ours == "" {
		return given + ours
	}
	of := make(map[string]string)
	for _, f := range strings.Fields(given) {
		key, n, _ := strings.Cut(f, "=")
		of[key] = n
	}
	var out []string
	for _, f := range strings.Fields(ours) {
		key, n, keyed := strings.Cut(f, "=")
		if !keyed {
			return lower(given, ours)
		}
		out = append(out, key+"="+lower(of[key], n))
	}
	return strings.Join(out, " ")
}

func lower(given, ours string) string {
	a, aerr := strconv.ParseUint(given, 10, 64)
	b, berr := strconv.ParseUint(ours, 10, 64)
	if aerr == nil && (berr != nil || a <= b) {
		return given
	}
	return ours
}

const throttlePrefix = "blkio.throttle."

// IsThrottle reports whether a journal entry is for one of Throttle's lines.
func IsThrottle(ref journal.Ref) bool {
	path, _, _ := strings.Cut(ref.Object, " ")
	name := filepath.Base(path)
	return ref.Kind == KindLine && (name == "io.max" || strings.HasPrefix(name, throttlePrefix))
}

func most(n uint64) string {
	if n == 0 {
		return "max"
	}
	return strconv.FormatUint(n, 10)
}

var deviceNumber = regexp.MustCompile(`^[0-9]{1,9}:[0-9]{1,9}$`)

type line struct{ path, device string }

func (k line) Ref() journal.Ref {
	return journal.Ref{Kind: KindLine, Object: k.path + " " + k.device}
}

func (k line) Read() (string, error) {
	text, err := File(k.path).Read()
	if err != nil {
		return "", err
	}
	return lineOf(text, k.device), nil
}

// lineOf returns a device's line in a file, or "" if there is none.
func lineOf(text, device string) string {
	for l := range strings.Lines(text) {
		if rest, ok := strings.CutPrefix(strings.TrimSpace(l), device+" "); ok {
			return strings.TrimSpace(rest)
		}
	}
	return ""
}

func (k line) Write(to string) error {
	if to == "" {
		if to = "0"; filepath.Base(k.path) == "io.max" {
			to = "rbps=max wbps=max riops=max wiops=max"
		}
	}
	return File(k.path).Write(k.device + " " + to)
}

// usual is the prefix of a line for all devices (block/blk-cgroup.c).
const usual = "default"

// maxBFQ is the largest weight that BFQ takes; iocost takes up to 10000. The least weight of both
// is 1, and the default is 100 (block/bfq-iosched.h, include/linux/cgroup-defs.h).
const maxBFQ = 1000

// IOWeight returns the lines that set a cgroup directory's weight among its siblings at all disks
// that are shared by weight: io.weight (iocost, v2 only) and io.bfq.weight, or blkio.bfq.weight on
// v1. It leaves out a file that does not exist, because the kernel was built without it or its
// module is not loaded.
func IOWeight(dir string, v2 bool, weight uint32) (lines []journal.Setting) {
	text, bfq := strconv.Itoa(int(weight)), strconv.Itoa(int(min(weight, maxBFQ)))
	all := []journal.Setting{{Knob: File(filepath.Join(dir, "blkio.bfq.weight")), Value: bfq}}
	if v2 {
		all = []journal.Setting{
			{Knob: line{filepath.Join(dir, "io.weight"), usual}, Value: text},
			{Knob: line{filepath.Join(dir, "io.bfq.weight"), usual}, Value: bfq},
		}
	}
	for _, l := range all {
		path, _, _ := strings.Cut(l.Ref().Object, " ")
		if _, err := value(dir, filepath.Base(path)); !errors.Is(err, errNoFile) {
			lines = append(lines, l)
		}
	}
	return lines
}

// CostEnabled reports whether iocost shares a disk, given as MAJOR:MINOR, among the cgroups of the
// v2 tree mounted at root. An administrator enables it there, in io.cost.qos.
func CostEnabled(root, device string) bool {
	text, err := value(root, "io.cost.qos")
	return err == nil && slices.Contains(strings.Fields(lineOf(text, device)), "enable=1")
}
