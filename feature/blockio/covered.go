package blockio

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/feature"
	"github.com/fairlead-project/fairlead/feature/blockio/decide"
	"github.com/fairlead-project/fairlead/kernel"
	"github.com/fairlead-project/fairlead/kernel/block"
	"github.com/fairlead-project/fairlead/kernel/cgroup"
	"github.com/fairlead-project/fairlead/kernel/journal"
	"github.com/fairlead-project/fairlead/kernel/mountinfo"
	"github.com/fairlead-project/fairlead/kernel/sched"
	"github.com/fairlead-project/fairlead/policy"
)

// cover takes the remaining steps for a Target. Its error is a feature.ErrPartly that lists everything
// that does not hold on this host.
func (f *BlockIO) cover(m *managed) error {
	var errs []error
	for _, step := range []func(*managed) error{f.unverified, f.interrupts, f.unweighed, f.unthrottled, f.unpromoted, f.unmet} {
		errs = append(errs, step(m))
	}
	return joined(errs)
}

// unweighed returns why the weight of policy has no effect, or misses some writes. It returns nil if a
// disk divides by weight.
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

// unthrottled returns which I/O escapes the caps of a container, or nil.
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
		if err != nil && !errors.Is(err, fs.ErrNotExist) { // else the container has ended
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

// writeback reports whether the kernel charges buffered writes on a mount to the writer. ext4 with
// data=journal does not.
func writeback(m mountinfo.Mount) bool {
	options := strings.Split(m.Super, ",")
	return slices.Contains(options, "ro") ||
		slices.Contains([]string{"ext2", "ext3", "ext4", "xfs", "btrfs", "f2fs"}, m.Type) && !slices.Contains(options, "data=journal")
}

// maxBelow bounds the number of cgroups below a container's that populated examines.
const maxBelow = 256

// populated returns the relative path of a cgroup below dir that has processes, or "".
func populated(dir string) (found string) {
	seen := 0
	filepath.WalkDir(dir, func(path string, e fs.DirEntry, err error) error {
		if err != nil || !e.IsDir() || path == dir {
			return nil // the cgroup has vanished
		}
		if seen++; seen > maxBelow {
			return filepath.SkipAll
		}
		f, err := os.Open(filepath.Join(path, "cgroup.procs"))
		if err != nil {
			return nil
		}
		defer f.Close()
		if n, _ := f.Read(make([]byte, 1)); n > 0 { // the container controls the length of the whole file
			found, _ = filepath.Rel(dir, path)
			return filepath.SkipAll
		}
		return nil
	})
	return found
}

// standing returns how a reservation stands. The caller holds f.mu.
func (f *BlockIO) standing(id container.ID, r reservation) decide.Standing {
	if f.lost(r) {
		return decide.Standing{
			State: decide.StateLost, Evidence: fmt.Sprintf("%s is not the disk any more that it was, or has none in it", r.device),
			Mend: "bring the disk back, or reserve of the one that is there",
		}
	}
	s := f.standings[decide.Place{Container: id, Disk: r.at()}]
	s.State = cmp.Or(s.State, decide.StateIdle)
	return s
}

// lost reports whether the disk of a reservation has gone or was replaced.
func (f *BlockIO) lost(r reservation) bool {
	now, err := block.Find(f.cfg.Roots.Sys, r.disk.Major, r.disk.Minor)
	return err != nil || now.Identity() != r.disk.Identity() || now.Sequence != r.disk.Sequence
}

// unmet returns a feature.ErrPartly that lists the missed reservations of a container, with the
// reason and the remedy, or nil.
func (f *BlockIO) unmet(m *managed) error {
	_, reasons := f.missed(m)
	if reasons == nil {
		return nil
	}
	return fmt.Errorf("%w: %s", feature.ErrPartly, strings.Join(reasons, "; "))
}

// told is the list of missed reservations in a container's last status, and when it was reported.
type told struct {
	what string
	at   time.Time
}

// tellAgain is the shortest time between two reports of missed reservations.
const tellAgain = 5 * time.Second

// tellChanged asks for another Apply of each container whose status is out of date. That is so if a
// name in its policy leads to another disk, to none, or to a disk again (the kernel drops limits
// together with a disk); if others have overwritten a setting that kept work off the CPUs of disks; if
// a reservation is newly missed, met again, or missed for another reason; or, once the last window has
// been judged, if the admission of a reservation has changed. The caller holds f.mu.
func (f *BlockIO) tellChanged(now time.Time, judged bool) {
	same := func(a, b block.Disk) bool { return a.Number() == b.Number() && a.Sequence == b.Sequence }
	by, _, err := f.cfg.Journal.Overwritten(kernel.Opener(f.cfg.Roots), places)
	moved := err == nil && len(by) != f.moved
	if moved {
		f.moved = len(by)
	}
	for id, m := range f.managed {
		changed := moved && m.apart || judged && slices.ContainsFunc(m.reserved, func(r reservation) bool { return f.admission(r).How != r.told })
		if at := f.disks(m.target.Settings); !maps.EqualFunc(at, m.at, same) {
			m.at, changed = at, true // Apply may take long to come
		}
		if what, _ := f.missed(m); what != m.told.what && now.Sub(m.told.at) >= tellAgain {
			m.told, changed = told{what, now}, true
		}
		if changed {
			f.changed(id)
		}
	}
}

// missed lists the missed reservations of a container with their reasons. what does not change when
// only figures do.
func (f *BlockIO) missed(m *managed) (what string, reasons []string) {
	for _, r := range m.reserved {
		if s := f.standing(m.target.Container.ID, r); s.Missed() {
			what += fmt.Sprintln(r.device, s.State, s.Culprit, s.Mend)
			reasons = append(reasons, fmt.Sprintf("io.reserve of %s is %s: %s; %s", r.device, s.State, s.Evidence, s.Mend))
		}
	}
	if len(m.reserved) > 0 && f.failed != "" {
		what += f.failed
		reasons = append(reasons, "whether io.reserve is met is not known: "+f.failed)
	}
	return what, reasons
}

// quotaPart divides one CPU: YieldQuota leaves a container one part.
const quotaPart = 5

// setting is a knob that a Target asks for, its value, and when that lapses.
type setting struct {
	journal.Setting
	until time.Time
}

// knobs returns the knobs that a Target asks for. If a part is impossible, the error says so, and keep
// matches the knobs of that part, which stay as they are.
func (f *BlockIO) knobs(m *managed) (all []setting, keep func(journal.Ref) bool, err error) {
	t := m.target
	mayRaise := unweighable(t) == ""
	add := func(key string, lines ...journal.Setting) {
		for _, l := range lines {
			all = append(all, setting{l, t.Until(key)})
		}
	}
	caps, capErr := f.maxima(m)
	add(maxKey, caps...)
	var quota journal.Ref // of the quota that could not be read
	keep = func(r journal.Ref) bool { return capErr != nil && cgroup.IsThrottle(r) || r == quota }
	c := t.Container.Cgroup
	if w := t.Settings.IOWeight; w != 0 && c.IO != "" {
		add(weightKey, cgroup.IOWeight(c.IO, c.IO == c.V2, w)...)
	}
	h, y := t.Settings.IOHelp, t.Settings.IOYield
	weight, r := cgroup.WeightKnob(c.CPU, c.CPU == c.V2)
	if mayRaise && slices.Contains([]policy.Help{policy.HelpWeight, policy.HelpRealtime, policy.HelpTurns}, h) {
		add(helpKey, journal.Setting{Knob: weight, Value: strconv.FormatUint(r.Most, 10)})
	}
	if mayRaise && h == policy.HelpWeight {
		add(helpKey, journal.Setting{Knob: cgroup.Slices(c.V2), Value: cgroup.ShortSlices})
	}
	if y != policy.YieldIdle && y != policy.YieldQuota {
		return all, keep, capErr
	}
	if c.CPU == "" {
		return all, keep, errors.Join(capErr, errors.New("io.yield: the container has no cgroup with the cpu controller"))
	}
	add(yieldKey, journal.Setting{Knob: weight, Value: cgroup.Idled})
	if y == policy.YieldQuota {
		var b cgroup.Bandwidth
		b, _, err = cgroup.GivenBandwidth(f.cfg.Journal, c.CPU, c.CPU == c.V2)
		k, value := cgroup.Quota(c.CPU, c.CPU == c.V2, b.Period/quotaPart, b.Period)
		if err != nil {
			quota, err = k.Ref(), fmt.Errorf("io.yield: %w", err)
		} else if !b.Limited || b.Quota > b.Period/quotaPart { // our quota must never be looser than the owner's
			add(yieldKey, journal.Setting{Knob: k, Value: value})
		}
	}
	return all, keep, errors.Join(capErr, err)
}

// unweighable returns why a container's weight cannot be raised, or "".
func unweighable(t policy.Target) string {
	switch y := t.Settings.IOYield; {
	case t.Container.Cgroup.CPU == "":
		return "its cgroup has no cpu controller: start it with one"
	case y == policy.YieldIdle, y == policy.YieldQuota:
		return fmt.Sprintf("policy has it run on idle CPUs only: take away io.yield=%s", y)
	}
	return ""
}

// maxima returns the lines that cap a container at its disks. Where Docker or an administrator has set
// a cap already, the stricter one counts.
func (f *BlockIO) maxima(m *managed) (lines []journal.Setting, err error) {
	c := m.target.Container.Cgroup
	named := make(map[string]string)
	for _, io := range m.target.Settings.IO {
		l := cgroup.Limits(io.Max)
		if l == (cgroup.Limits{}) {
			continue
		}
		if c.IO == "" {
			return nil, errors.New("io.max: the container has no cgroup with a controller of block I/O")
		}
		d, err := block.Open(f.cfg.Roots.Sys, io.Device)
		if err != nil {
			return nil, fmt.Errorf("io.max: %w", err)
		}
		if other, twice := named[d.Number()]; twice {
			return nil, fmt.Errorf("io.max: %s and %s are both on %s: cap it by one name", other, io.Device, d.Name)
		}
		named[d.Number()] = io.Device
		l = m.above(d, l)
		strict, err := cgroup.Stricter(f.cfg.Journal, c.IO, c.IO == c.V2, d.Number(), l)
		if errors.Is(err, journal.ErrGone) {
			continue
		}
		if err != nil {
			return nil, fmt.Errorf("io.max: %w", err)
		}
		lines = append(lines, strict...)
	}
	return lines, nil
}

// above raises caps to what the container itself has reserved on the disk: it may have made the
// reservation, or made it by another name of the disk, after the caps were decided. A reservation of
// bytes alone allows for requests of the smallest size.
func (m *managed) above(d block.Disk, l cgroup.Limits) cgroup.Limits {
	for _, r := range m.reserved {
		if r.disk.Number() != d.Number() {
			continue
		}
		f := r.figures
		if f.ReadIOPS == 0 {
			f.ReadIOPS = f.ReadBytes / decide.SmallRequest
		}
		if f.WriteIOPS == 0 {
			f.WriteIOPS = f.WriteBytes / decide.SmallRequest
		}
		for _, x := range []struct {
			most     *uint64
			reserved uint64
		}{{&l.ReadIOPS, f.ReadIOPS}, {&l.WriteIOPS, f.WriteIOPS}, {&l.ReadBytes, f.ReadBytes}, {&l.WriteBytes, f.WriteBytes}} {
			if *x.most != 0 {
				*x.most = max(*x.most, x.reserved)
			}
		}
	}
	return l
}

// turn brings the knobs to a Target, and restores those that only the last Target asked for.
func (f *BlockIO) turn(m *managed) error {
	all, keep, err := f.knobs(m)
	errs := []error{err}
	by := owner(m.target.Container.ID)
	wanted := make(map[journal.Ref]bool)
	for _, s := range all {
		wanted[s.Ref()] = true
	}
	errs = append(errs, f.restore(func(e journal.Entry) bool {
		return e.Owner == by && e.Ref.Kind != cgroup.KindRT && e.Ref.Kind != sched.KindDeadline && !wanted[e.Ref] && !keep(e.Ref)
	}))
	for _, s := range all {
		err := ignoreGone(f.cfg.Journal.TurnUntil(s.Knob, s.Value, by, s.until))
		if s.Ref().Kind == cgroup.KindSlices && errors.Is(err, errors.ErrUnsupported) {
			err = nil // before 6.12 the weight alone has to do
		}
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

func (f *BlockIO) restore(match func(journal.Entry) bool) error {
	_, err := f.cfg.Journal.Restore(kernel.Opener(f.cfg.Roots), match)
	return err
}

func ignoreGone(err error) error {
	if errors.Is(err, journal.ErrGone) {
		return nil
	}
	return err
}

func owner(id container.ID) journal.Owner {
	return journal.Owner{Feature: name, Container: uint64(id)}
}
