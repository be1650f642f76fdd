package cgroup

import (
	"errors"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/fairlead-project/fairlead/kernel/journal"
)

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
