package blockio

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/fairlead-project/fairlead/feature"
	"github.com/fairlead-project/fairlead/kernel/block"
	"github.com/fairlead-project/fairlead/kernel/mountinfo"
	"github.com/fairlead-project/fairlead/policy"
)

// cover does what is left to do for a Target, and reports what of it does not hold on this
// host: the error is then a feature.ErrPartly with all of that.
func (f *BlockIO) cover(m *managed) error {
	var errs []error
	for _, step := range []func(*managed) error{f.unverified, f.interrupts, f.unweighed, f.unthrottled, f.unpromoted, f.unmet} {
		errs = append(errs, step(m))
	}
	return joined(errs)
}

// unweighed returns why the weight of policy has no effect, or not on all writes. It returns nil
// if a disk divides by weight.
func (f *BlockIO) unweighed(m *managed) error {
	t := m.target
	if t.Settings.IOWeight == 0 {
		return nil
	}
	disks, err := block.Disks(f.cfg.Roots.Sys)
	if err != nil {
		return err
	}
	switch {
	case !slices.ContainsFunc(disks, func(d block.Disk) bool { return f.divides(d) != "" }):
		return fmt.Errorf("%w: io.weight %d: no disk divides by weight; choose bfq in /sys/block/DISK/queue/scheduler, or enable iocost in io.cost.qos (cgroup v2)",
			feature.ErrPartly, t.Settings.IOWeight)
	case t.Container.Cgroup.IO != t.Container.Cgroup.V2:
		return fmt.Errorf("%w: io.weight %d: buffered writes have no weight, because %s; reads and direct writes have", feature.ErrPartly, t.Settings.IOWeight, onV1)
	}
	return nil
}

const onV1 = "cgroup v1 counts them for nobody (boot with cgroup v2, and use ext4, XFS or Btrfs)"

// unthrottled returns which I/O passes the caps of a container, or nil.
func (f *BlockIO) unthrottled(m *managed) error {
	t := m.target
	c := t.Container.Cgroup
	var reasons, capped, writes []string
	for _, io := range t.Settings.IO {
		if io.Max == (policy.Figures{}) {
			continue
		}
		capped = append(capped, io.Device)
		if io.Max.WriteIOPS+io.Max.WriteBytes == 0 {
			continue
		}
		writes = append(writes, io.Device)
		if c.IO != c.V2 {
			continue
		}
		d, err := block.Open(f.cfg.Roots.Sys, io.Device)
		if err != nil {
			return err
		}
		mounts, err := d.Mounts(f.cfg.Roots.Proc, f.cfg.Roots.Sys, strconv.Itoa(t.Container.PID))
		if err != nil && !errors.Is(err, fs.ErrNotExist) { // the container has ended
			return err
		}
		for _, m := range mounts {
			if !writeback(m) {
				reasons = append(reasons, fmt.Sprintf("buffered writes to %s (%s) pass at %s, because this file system counts them for nobody; use ext4, XFS or Btrfs there", m.Dir, m.Type, io.Device))
			}
		}
	}
	if c.IO != c.V2 {
		if len(writes) > 0 {
			reasons = append(reasons, fmt.Sprintf("buffered writes pass at %s, because %s; reads and direct writes are capped", strings.Join(writes, ", "), onV1))
		}
		if below := populated(c.IO); len(capped) > 0 && below != "" {
			reasons = append(reasons, fmt.Sprintf("processes in cgroups below the container's (%s) pass, because cgroup v1 caps each cgroup alone; boot with cgroup v2, or let them stay in the container's", strconv.Quote(below)))
		}
	}
	if reasons == nil {
		return nil
	}
	return fmt.Errorf("%w: io.max: %s", feature.ErrPartly, strings.Join(reasons, "; "))
}

// writeback reports whether buffered writes to a mount count for the writer: with data=journal
// those of ext4 do not.
func writeback(m mountinfo.Mount) bool {
	options := strings.Split(m.Super, ",")
	return slices.Contains(options, "ro") ||
		slices.Contains([]string{"ext2", "ext3", "ext4", "xfs", "btrfs", "f2fs"}, m.Type) && !slices.Contains(options, "data=journal")
}

// maxBelow bounds how many cgroups of a container are looked at.
const maxBelow = 256

// populated finds a cgroup below dir that has processes, by its path there; "" if none has.
func populated(dir string) (found string) {
	seen := 0
	filepath.WalkDir(dir, func(path string, e fs.DirEntry, err error) error {
		if err != nil || !e.IsDir() || path == dir {
			return nil // it has vanished
		}
		if seen++; seen > maxBelow {
			return filepath.SkipAll
		}
		f, err := os.Open(filepath.Join(path, "cgroup.procs"))
		if err != nil {
			return nil
		}
		defer f.Close()
		if n, _ := f.Read(make([]byte, 1)); n > 0 { // all of it would be as long as the container likes
			found, _ = filepath.Rel(dir, path)
			return filepath.SkipAll
		}
		return nil
	})
	return found
}
