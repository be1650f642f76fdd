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
	Capacities string   // the file of what disks can do; "": it is forgotten with the feature
	Scratch    []string // directories in which the disks that they are on are calibrated while nobody uses them
	Deadline   bool     // real-time by SCHED_DEADLINE, also where there are real-time groups

	// Measures says why this kernel cannot measure what containers do; nil: it is tried.
	Measures func() error
}

// BlockIO is the feature. See feature.Feature for how it may be called.
type BlockIO struct {
	cfg     Config
	support probe.Verdict
	layout  cgroup.Layout

	mu          sync.Mutex
	members     map[container.ID]*member
	capacities  capacities
	meter       *monitor.Meter // nil while nothing is reserved and nobody looks
	lookers     int
	idle        *idler                  // nil: no disk is calibrated by itself
	calibrating bool                    // everybody's I/O is measured for it
	ids         map[container.ID]uint64 // of cgroups with the io controller
	last        reading
	window      Window // the last one
	shown       reading
	control     Control
	changed     func(container.ID)     // has Apply called again
	limits      map[monitor.Disk]limit // what disks did that are short of their reservations
	decided     map[decided]bool
	net         *netdev.NS       // of this process; nil: not needed yet
	spare       []int            // CPUs that serve no disk of a member whose interrupts are apart
	works       map[int]irq.Work // of each CPU, as last read; nil: not read
	failed      string           // why nothing was measured, as last told
	tried       struct {         // whether SCHED_DEADLINE can be had
		at  time.Time
		err error
	}
	events   uint64        // id of the latest event
	happened chan struct{} // closed at the next event
}

var (
	_ feature.Feature  = (*BlockIO)(nil)
	_ feature.Reporter = (*BlockIO)(nil)
	_ feature.Decider  = (*BlockIO)(nil)
	_ feature.Exporter = (*BlockIO)(nil)
	_ feature.Witness  = (*BlockIO)(nil)
	_ feature.Examiner = (*BlockIO)(nil)
	_ feature.Notifier = (*BlockIO)(nil)
)

// member is a container that the agent has told of.
type member struct {
	wish     policy.Target // what was last asked for
	target   policy.Target // the same, for what is not refused
	reserved []reservation // in force, also where the wish was refused

	helpWant              time.Duration                  // budget that is decided for it; 0: budget is what policy says
	turning               *turning                       // nil: its threads take no turns
	budget                time.Duration                  // of its real-time threads, in each second of each CPU
	unbudgeted            error                          // why that is not in force
	grouped               bool                           // bounded by a real-time group, not by the deadlines of its threads
	ran                   map[sched.Thread]time.Duration // how long its threads had run a second ago
	promoted, others, own int                            // threads: real-time, left ordinary, real-time by their own doing
	apart                 bool                           // the host was last brought to its interrupts being apart
	told                  told                           // what its status was last to say of what it misses
	refused               error                          // why the kernel left one of them ordinary
}

// reservation is what a container has reserved of one disk.
type reservation struct {
	device  string // as it was named
	disk    block.Disk
	figures api.BlockIOFigures
	told    string // how it is admitted, as Apply last said
}

func (r reservation) at() monitor.Disk { return monitor.Disk{Major: r.disk.Major, Minor: r.disk.Minor} }

// New finds out what the host can do. It changes nothing.
func New(cfg Config) (*BlockIO, error) {
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	f := &BlockIO{
		cfg: cfg, members: make(map[container.ID]*member), ids: make(map[container.ID]uint64),
		decided: make(map[decided]bool), limits: make(map[monitor.Disk]limit), happened: make(chan struct{}),
		changed: func(container.ID) {},
	}
	var err error
	if f.capacities, err = loadCapacities(cfg.Capacities, cfg.Roots.Sys); err != nil {
		cfg.Log.Error("not all that was known of disks is known any more", "err", err)
	}
	f.layout, err = cgroup.Detect(cfg.Roots.Proc, cfg.Roots.Cgroup)
	if cfg.Measures == nil {
		cfg.Measures = monitor.Supported
	}
	f.support = support(f.layout, err, cfg.Measures)
	if len(cfg.Scratch) > 0 {
		f.idle = newIdler(cfg.Roots, f.layout, cfg.Scratch)
	}
	return f, nil
}

func support(l cgroup.Layout, err error, measures func() error) probe.Verdict {
	if os.Geteuid() != 0 {
		return probe.Verdict{Level: probe.Unavailable, Why: "not root: nothing can be measured, and no cgroup changed", Mend: "run the agent as root"}
	}
	if err != nil || l.IO == "" || l.V2 == "" {
		return probe.Verdict{Level: probe.Unavailable, Why: "no controller of block I/O is mounted, or no cgroup v2 tree", Mend: "mount the io controller (v2) or blkio (v1)"}
	}
	if err := measures(); err != nil {
		return probe.Verdict{Level: probe.Unavailable, Why: err.Error(), Mend: "a kernel of 5.15 or later with BTF"}
	}
	if l.CPU == "" {
		return probe.Verdict{Level: probe.Degraded, Why: "no cpu controller is mounted: nobody can be made to yield a CPU", Mend: "mount the cpu controller"}
	}
	return probe.Verdict{Level: probe.Full}
}

// Notify implements feature.Notifier: Apply is called again for a reservation that is
// admitted otherwise than it said.
func (f *BlockIO) Notify(changed func(container.ID)) { f.changed = changed }

// Name implements feature.Feature.
func (f *BlockIO) Name() string { return name }

// Support implements feature.Feature.
func (f *BlockIO) Support() probe.Verdict { return f.support }

// Apply implements feature.Feature. A reservation for which a disk has no room is refused
// with a *Refusal, and the container keeps what it had reserved. One of a disk whose capacity is not
// known is in force; the error is a feature.ErrPartly if the disk has not been seen to do that.
// Everything else that the Target says is done all the same. What other containers cannot have
// is no error. Errors: feature.ErrPartly.
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
	m.wish, m.target = t, t
	var errs []error
	reserved, err := f.admit(t)
	if err == nil {
		m.reserved = reserved
	} else if m.holds(t) {
		err = fmt.Errorf("%w: io.reserve: it stays as it was admitted, but now: %w", feature.ErrPartly, err)
	}
	errs = append(errs, err)
	budget, grouped, err := f.mayRealtime(t, m.reserved)
	if err == nil {
		m.budget, m.grouped = budget, grouped
	}
	m.helpWant = f.helpWant(t)
	f.apportionHelp()
	if m.turning != nil && t.Settings.IOHelp != policy.HelpTurns {
		f.takeTurns() // before anything is put back
	}
	errs = append(errs, err, f.turn(t))
	f.follow()
	f.realtime()
	f.takeTurns()
	f.promote()
	errs = append(errs, m.unbudgeted, f.cover(t))
	if err := joined(errs); err != nil {
		return fmt.Errorf("blockio: %w", err)
	}
	return nil
}

// joined joins what went wrong: it is a feature.ErrPartly if nothing but that did.
func joined(errs []error) (failed error) {
	var partly error
	for _, err := range errs {
		switch {
		case err == nil:
		case !errors.Is(err, feature.ErrPartly):
			failed = errors.Join(failed, err)
		case partly == nil:
			partly = err
		default:
			partly = fmt.Errorf("%w; %w", partly, err)
		}
	}
	if failed != nil {
		return failed
	}
	return partly
}

// holds says whether a container has reserved what t says already.
func (m *member) holds(t policy.Target) bool {
	var asks, has []reservation
	for _, io := range t.Settings.IO {
		if r := (reservation{device: io.Device, figures: figuresOf(io)}); r.figures != (api.BlockIOFigures{}) {
			asks = append(asks, r)
		}
	}
	for _, r := range m.reserved {
		has = append(has, reservation{device: r.device, figures: r.figures})
	}
	return slices.Equal(asks, has)
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

// setting is a knob that a Target asks for, the value, and when that lapses.
type setting struct {
	cgroup.Line
	until time.Time
}

// knobs are what a Target asks for on the host. What cannot be had is an error, and keeps
// what is in force of it as it is.
func (f *BlockIO) knobs(t policy.Target) (all []setting, keep func(journal.Ref) bool, err error) {
	add := func(key string, lines ...cgroup.Line) {
		for _, l := range lines {
			all = append(all, setting{l, t.Until(key)})
		}
	}
	caps, capErr := f.maxima(t)
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
	add(yieldKey, cgroup.Line{Knob: weight, Value: cgroup.Idled})
	if y == policy.YieldQuota {
		var b cgroup.Bandwidth
		b, _, err = cgroup.GivenBandwidth(f.cfg.Journal, c.CPU, c.CPU == c.V2)
		k, value := cgroup.Quota(c.CPU, c.CPU == c.V2, b.Period/quotaPart, b.Period)
		if err != nil {
			quota, err = k.Ref(), fmt.Errorf("io.yield: %w", err)
		} else if !b.Limited || b.Quota > b.Period/quotaPart { // nothing of ours is looser than the owner's
			add(yieldKey, cgroup.Line{Knob: k, Value: value})
		}
	}
	return all, keep, errors.Join(capErr, err)
}

// maxima are the lines that cap a container at its disks. Of what is capped already, by
// Docker or an administrator, the stricter counts.
func (f *BlockIO) maxima(t policy.Target) (lines []cgroup.Line, err error) {
	c := t.Container.Cgroup
	named := make(map[string]string)
	for _, io := range t.Settings.IO {
		l := cgroup.Limits{ReadIOPS: io.MaxReadIOPS, WriteIOPS: io.MaxWriteIOPS, ReadBytes: io.MaxReadBytes, WriteBytes: io.MaxWriteByte}
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
		l = f.above(t.Container.ID, d, l)
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

// turn brings the host to a Target, and puts back what the last one asked for beyond it.
func (f *BlockIO) turn(t policy.Target) error {
	all, keep, err := f.knobs(t)
	errs := []error{err}
	by := owner(t.Container.ID)
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

// Remove implements feature.Feature.
func (f *BlockIO) Remove(_ context.Context, id container.ID) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if m := f.members[id]; m != nil && m.turning != nil {
		m.turning.end() // before its threads are made ordinary
		m.turning = nil
	}
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
	if f.idle != nil {
		if f.idle.cancel != nil {
			f.idle.cancel()
		}
		f.mu.Unlock()
		f.idle.running.Wait()
		f.mu.Lock()
	}
	defer f.mu.Unlock()
	for _, m := range f.members {
		if m.turning != nil {
			m.turning.end()
		}
	}
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
