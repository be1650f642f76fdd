// Package blockio keeps the block I/O that containers have reserved (MIST): it admits
// reservations against what a disk can do, measures whether they are met, names who is in
// the way when they are not, and makes those yield whom policy lets.
//
// It schedules no I/O itself and reserves nothing in the kernel, which has no such thing:
// what is done is done to others, when it is needed. The measuring is package monitor's,
// the judging control.go's, the knobs kernel/cgroup's. Package agent calls it, as a
// feature.Feature. README.md says what is changed on the host.
package blockio

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"slices"
	"sync"
	"time"

	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/feature"
	"github.com/fairlead-project/fairlead/feature/blockio/monitor"
	"github.com/fairlead-project/fairlead/kernel"
	"github.com/fairlead-project/fairlead/kernel/block"
	"github.com/fairlead-project/fairlead/kernel/cgroup"
	"github.com/fairlead-project/fairlead/kernel/irq"
	"github.com/fairlead-project/fairlead/kernel/journal"
	"github.com/fairlead-project/fairlead/kernel/netdev"
	"github.com/fairlead-project/fairlead/kernel/probe"
	"github.com/fairlead-project/fairlead/kernel/sched"
	"github.com/fairlead-project/fairlead/policy"
)

// name is the feature's name and the owner of its journal entries.
const name = "blockio"

// Config is what New needs.
type Config struct {
	Roots      kernel.Roots
	Journal    *journal.Journal
	Log        *slog.Logger // nil: no log
	Containers feature.Containers
	Capacities string // the file of what disks can do; "": it is forgotten with the feature
	Deadline   bool   // real-time by SCHED_DEADLINE, also where there are real-time groups
}

// BlockIO is the feature. See feature.Feature for how it may be called.
type BlockIO struct {
	cfg     Config
	support probe.Verdict
	layout  cgroup.Layout

	mu         sync.Mutex
	members    map[container.ID]*member
	capacities capacities
	meter      *monitor.Meter // nil while nothing is reserved and nobody looks
	lookers    int
	ids        map[container.ID]uint64 // of cgroups with the io controller
	last       reading
	window     Window // the last one
	shown      reading
	control    Control
	decided    map[decided]bool
	net        *netdev.NS       // of this process; nil: not needed yet
	spare      []int            // CPUs that serve no disk of a member whose interrupts are apart
	works      map[int]irq.Work // of each CPU, as last read; nil: not read
	failed     string           // why nothing was measured, as last told
	events     uint64           // id of the latest event
	happened   chan struct{}    // closed at the next event
}

var (
	_ feature.Feature  = (*BlockIO)(nil)
	_ feature.Reporter = (*BlockIO)(nil)
	_ feature.Decider  = (*BlockIO)(nil)
	_ feature.Exporter = (*BlockIO)(nil)
	_ feature.Witness  = (*BlockIO)(nil)
	_ feature.Examiner = (*BlockIO)(nil)
)

// member is a container that the agent has told of.
type member struct {
	wish     policy.Target // what was last asked for
	target   policy.Target // what is in force: the wish, unless that was refused
	reserved []reservation

	budget                time.Duration                  // of its real-time threads, in each second of each CPU
	grouped               bool                           // bounded by a real-time group, not by the deadlines of its threads
	ran                   map[sched.Thread]time.Duration // how long its threads had run a second ago
	promoted, others, own int                            // threads: real-time, left ordinary, real-time by their own doing
	apart                 bool                           // the host was last brought to its interrupts being apart
	refused               error                          // why the kernel left one of them ordinary
}

// reservation is what a container has reserved of one disk.
type reservation struct {
	device  string // as it was named
	disk    block.Disk
	figures api.BlockIOFigures
}

func (r reservation) at() monitor.Disk { return monitor.Disk{Major: r.disk.Major, Minor: r.disk.Minor} }

// New finds out what the host can do. It changes nothing.
func New(cfg Config) (*BlockIO, error) {
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	f := &BlockIO{
		cfg: cfg, members: make(map[container.ID]*member), ids: make(map[container.ID]uint64),
		decided: make(map[decided]bool), happened: make(chan struct{}),
	}
	var err error
	if f.capacities, err = loadCapacities(cfg.Capacities); err != nil {
		cfg.Log.Error("what disks can do is not known any more", "err", err)
	}
	f.layout, err = cgroup.Detect(cfg.Roots.Proc, cfg.Roots.Cgroup)
	f.support = support(f.layout, err)
	return f, nil
}

func support(l cgroup.Layout, err error) probe.Verdict {
	if os.Geteuid() != 0 {
		return probe.Verdict{Level: probe.Unavailable, Why: "not root: nothing can be measured, and no cgroup changed", Mend: "run the agent as root"}
	}
	if err != nil || l.IO == "" || l.V2 == "" {
		return probe.Verdict{Level: probe.Unavailable, Why: "no controller of block I/O is mounted, or no cgroup v2 tree", Mend: "mount the io controller (v2) or blkio (v1)"}
	}
	if err := monitor.Supported(); err != nil {
		return probe.Verdict{Level: probe.Unavailable, Why: err.Error(), Mend: "a kernel of 5.15 or later with BTF"}
	}
	if l.CPU == "" {
		return probe.Verdict{Level: probe.Degraded, Why: "no cpu controller is mounted: nobody can be made to yield a CPU", Mend: "mount the cpu controller"}
	}
	return probe.Verdict{Level: probe.Full}
}

// Name implements feature.Feature.
func (f *BlockIO) Name() string { return name }

// Support implements feature.Feature.
func (f *BlockIO) Support() probe.Verdict { return f.support }

// Apply implements feature.Feature. A reservation for which a disk has no room is refused
// with a *Refusal, and the container keeps what it had. Errors: feature.ErrPartly.
func (f *BlockIO) Apply(_ context.Context, t policy.Target) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.support.Level == probe.Unavailable {
		if len(t.Settings.IO) > 0 || !slices.Contains([]policy.Yield{"", policy.YieldOff}, t.Settings.IOYield) {
			return fmt.Errorf("blockio: %s", f.support.Why)
		}
		return nil
	}
	m := f.members[t.Container.ID]
	if m == nil {
		m = &member{}
		f.members[t.Container.ID] = m
	}
	m.wish, m.target.Container = t, t.Container
	reserved, err := f.admit(t)
	var budget time.Duration
	var grouped bool
	if err == nil {
		budget, grouped, err = f.mayRealtime(t, reserved)
	}
	if err != nil {
		return fmt.Errorf("blockio: %w", err)
	}
	m.target, m.reserved, m.budget, m.grouped = t, reserved, budget, grouped
	err = f.turn(t)
	f.follow()
	if err == nil {
		err = f.realtime()
	}
	if err == nil {
		err = f.promote()
	}
	if err == nil {
		err = f.cover(t)
	}
	if err != nil {
		return fmt.Errorf("blockio: %w", err)
	}
	return nil
}

// admit finds the disks of what a container is to have reserved, and room there.
func (f *BlockIO) admit(t policy.Target) (all []reservation, err error) {
	for _, io := range t.Settings.IO {
		r := reservation{device: io.Device, figures: figuresOf(io)}
		if r.figures == (api.BlockIOFigures{}) {
			continue
		}
		if r.disk, err = block.Open(f.cfg.Roots.Sys, io.Device); err != nil {
			return nil, err
		}
		if r.disk.Size == 0 {
			return nil, fmt.Errorf("%s: there is no disk in it", io.Device)
		}
		if i := slices.IndexFunc(all, func(o reservation) bool { return o.at() == r.at() }); i >= 0 {
			return nil, fmt.Errorf("%s and %s are both on %s: reserve in one place", all[i].device, r.device, r.disk.Name)
		}
		if err := Admit(io.Device, f.capacity(r.disk), f.holders(r.at(), t.Container.ID), r.figures); err != nil {
			return nil, err
		}
		all = append(all, r)
	}
	return all, nil
}

func figuresOf(io policy.IO) api.BlockIOFigures {
	return api.BlockIOFigures{ReadIOPS: io.ReadIOPS, WriteIOPS: io.WriteIOPS, ReadBytes: io.ReadBytes, WriteBytes: io.WriteBytes}
}

func (f *BlockIO) capacity(d block.Disk) Capacity { return f.capacities.of[d.Identity()] }

// holders are those who have reserved something of a disk, but one.
func (f *BlockIO) holders(d monitor.Disk, but container.ID) (out []Holder) {
	for id, m := range f.members {
		for _, r := range m.reserved {
			if id != but && r.at() == d {
				out = append(out, Holder{id, m.target.Container.Name, r.figures})
			}
		}
	}
	slices.SortFunc(out, func(a, b Holder) int { return int(int64(a.Container) - int64(b.Container)) })
	return out
}

// quotaPart is the part of one CPU that YieldQuota leaves.
const quotaPart = 5 // a fifth

// knobs are what a Target asks for on the host.
func (f *BlockIO) knobs(t policy.Target) (lines []cgroup.Line, err error) {
	c := t.Container.Cgroup
	for _, io := range t.Settings.IO {
		l := cgroup.Limits{ReadIOPS: io.MaxReadIOPS, WriteIOPS: io.MaxWriteIOPS, ReadBytes: io.MaxReadBytes, WriteBytes: io.MaxWriteByte}
		if l == (cgroup.Limits{}) {
			continue
		}
		if c.IO == "" {
			return nil, errors.New("the container has no cgroup with a controller of block I/O")
		}
		d, err := block.Open(f.cfg.Roots.Sys, io.Device)
		if err != nil {
			return nil, err
		}
		l = f.above(t.Container.ID, d, l)
		for _, line := range cgroup.Throttle(c.IO, c.IO == c.V2, d.Number(), l) {
			if line.Value != "" {
				lines = append(lines, line)
			}
		}
	}
	if w := t.Settings.IOWeight; w != 0 && c.IO != "" {
		lines = append(lines, cgroup.IOWeight(c.IO, c.IO == c.V2, w)...)
	}
	y := t.Settings.IOYield
	if y != policy.YieldIdle && y != policy.YieldQuota {
		return lines, nil
	}
	if c.CPU == "" {
		return nil, errors.New("the container has no cgroup with the cpu controller")
	}
	if y == policy.YieldQuota {
		b, err := cgroup.ReadBandwidth(c.CPU)
		if err != nil {
			return nil, err
		}
		if quota := b.Period / quotaPart; !b.Limited || b.Quota > quota {
			k, value := cgroup.Quota(c.CPU, c.CPU == c.V2, quota, b.Period)
			lines = append(lines, cgroup.Line{Knob: k, Value: value})
		} else if k, value := cgroup.Quota(c.CPU, c.CPU == c.V2, b.Quota, b.Period); f.wrote(k, value) {
			lines = append(lines, cgroup.Line{Knob: k, Value: value}) // it is ours, or smaller than ours
		}
	}
	return append(lines, cgroup.Line{Knob: cgroup.Idle(c.CPU), Value: cgroup.Idled}), nil
}

// above raises caps to what the container itself has reserved at the disk: it may have
// reserved it, or by another name of the disk, after the caps were decided. Bytes that are
// reserved alone may be of the smallest requests.
func (f *BlockIO) above(id container.ID, d block.Disk, l cgroup.Limits) cgroup.Limits {
	for _, r := range f.members[id].reserved {
		if r.disk.Number() != d.Number() {
			continue
		}
		f := r.figures
		if f.ReadIOPS == 0 {
			f.ReadIOPS = f.ReadBytes / smallRequest
		}
		if f.WriteIOPS == 0 {
			f.WriteIOPS = f.WriteBytes / smallRequest
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

// wrote says whether a value is one that this feature has put in force.
func (f *BlockIO) wrote(k journal.Knob, value string) bool {
	e, ours := f.cfg.Journal.Entry(k.Ref())
	return ours && e.Owner.Feature == name && e.Ours(value)
}

// turn brings the host to a Target, and puts back what the last one asked for beyond it.
func (f *BlockIO) turn(t policy.Target) error {
	lines, err := f.knobs(t)
	errs := []error{err}
	by := journal.Owner{Feature: name, Container: uint64(t.Container.ID)}
	wanted := make(map[journal.Ref]bool)
	for _, l := range lines {
		wanted[l.Ref()] = true
	}
	errs = append(errs, f.restore(func(e journal.Entry) bool {
		return e.Owner == by && e.Ref.Kind != cgroup.KindRT && e.Ref.Kind != sched.KindDeadline && !wanted[e.Ref]
	}))
	for _, l := range lines {
		if err := f.cfg.Journal.TurnUntil(l.Knob, l.Value, by, t.Expiry); err != nil && !errors.Is(err, journal.ErrGone) {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

func (f *BlockIO) restore(match func(journal.Entry) bool) error {
	_, err := f.cfg.Journal.Restore(kernel.Opener(f.cfg.Roots), match)
	return err
}

// Remove implements feature.Feature.
func (f *BlockIO) Remove(_ context.Context, id container.ID) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if err := f.restore(func(e journal.Entry) bool { return e.Owner == journal.Owner{Feature: name, Container: uint64(id)} }); err != nil {
		return fmt.Errorf("blockio: %w", err)
	}
	m := f.members[id]
	delete(f.members, id)
	if err := f.realtime(); err != nil {
		return fmt.Errorf("blockio: %w", err)
	}
	f.follow()
	if m != nil && !m.apart { // the host's knobs of its devices have gone with these
		return nil
	}
	if err := f.interrupts(policy.Target{}); err != nil {
		return fmt.Errorf("blockio: %w", err)
	}
	return nil
}

// Prune implements feature.Feature.
func (f *BlockIO) Prune(_ context.Context, alive func(container.ID) bool) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	host := container.ID(0) // whose knobs are those of all members together
	return errors.Join(f.interrupts(policy.Target{}), f.restore(func(e journal.Entry) bool {
		id := container.ID(e.Owner.Container)
		return e.Owner.Feature == name && id != host && !alive(id)
	}), f.realtime())
}

// Close implements feature.Feature. What is in force stays, and what was decided lapses.
func (f *BlockIO) Close() error {
	f.mu.Lock()
	defer f.mu.Unlock()
	clear(f.members)
	f.lookers = 0
	f.follow()
	if f.net == nil {
		return nil
	}
	err := f.net.Close()
	f.net = nil
	return err
}
