package blockio

import (
	"errors"
	"fmt"
	"time"

	"github.com/fairlead-project/fairlead/feature/blockio/decide"
	"github.com/fairlead-project/fairlead/kernel"
	"github.com/fairlead-project/fairlead/kernel/block"
	"github.com/fairlead-project/fairlead/kernel/cgroup"
	"github.com/fairlead-project/fairlead/kernel/journal"
	"github.com/fairlead-project/fairlead/kernel/sched"
	"github.com/fairlead-project/fairlead/policy"
)

// quotaPart is the part of one CPU that YieldQuota leaves.
const quotaPart = 5 // a fifth

// setting is a knob that a Target asks for, the value, and when that lapses.
type setting struct {
	journal.Setting
	until time.Time
}

// knobs are what a Target asks for on the host. What cannot be had is an error, and keeps
// what is in force of it as it is.
func (f *BlockIO) knobs(m *managed) (all []setting, keep func(journal.Ref) bool, err error) {
	t := m.target
	add := func(key string, lines ...journal.Setting) {
		for _, l := range lines {
			all = append(all, setting{l, t.Until(key)})
		}
	}
	caps, capErr := f.maxima(m)
	add(maxKey, caps...)
	var quota journal.Ref // that could not be read
	keep = func(r journal.Ref) bool { return capErr != nil && cgroup.IsThrottle(r) || r == quota }
	c := t.Container.Cgroup
	if w := t.Settings.IOWeight; w != 0 && c.IO != "" {
		add(weightKey, cgroup.IOWeight(c.IO, c.IO == c.V2, w)...)
	}
	add(helpKey, helpKnobs(t)...)
	y := t.Settings.IOYield
	if y != policy.YieldIdle && y != policy.YieldQuota {
		return all, keep, capErr
	}
	if c.CPU == "" {
		return all, keep, errors.Join(capErr, errors.New("io.yield: the container has no cgroup with the cpu controller"))
	}
	weight, _ := cgroup.WeightKnob(c.CPU, c.CPU == c.V2)
	add(yieldKey, journal.Setting{Knob: weight, Value: cgroup.Idled})
	if y == policy.YieldQuota {
		var b cgroup.Bandwidth
		b, _, err = cgroup.GivenBandwidth(f.cfg.Journal, c.CPU, c.CPU == c.V2)
		k, value := cgroup.Quota(c.CPU, c.CPU == c.V2, b.Period/quotaPart, b.Period)
		if err != nil {
			quota, err = k.Ref(), fmt.Errorf("io.yield: %w", err)
		} else if !b.Limited || b.Quota > b.Period/quotaPart { // nothing of ours is looser than the owner's
			add(yieldKey, journal.Setting{Knob: k, Value: value})
		}
	}
	return all, keep, errors.Join(capErr, err)
}

// maxima are the lines that cap a container at its disks. Of what is capped already, by
// Docker or an administrator, the stricter counts.
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

// above raises caps to what the container itself has reserved at the disk: it may have
// reserved it, or by another name of the disk, after the caps were decided. Bytes that are
// reserved alone may be of the smallest requests.
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

// turn brings the host to a Target, and puts back what the last one asked for beyond it.
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
