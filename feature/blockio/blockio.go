// Package blockio keeps the block I/O that containers have reserved (MIST). It admits
// reservations against what a disk can do, measures whether they are met, names what is in the
// way if they are not, and holds containers back if policy allows it.
//
// It schedules no I/O itself, and the kernel has no reservations: it acts on other containers, and only
// while that is needed. Package monitor measures, package decide judges, and kernel/cgroup turns the
// knobs. Package agent calls it, as a feature.Feature. README.md lists its changes to the host.
package blockio

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"slices"
	"sync"
	"time"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/feature"
	"github.com/fairlead-project/fairlead/feature/blockio/decide"
	"github.com/fairlead-project/fairlead/feature/blockio/monitor"
	"github.com/fairlead-project/fairlead/kernel/block"
	"github.com/fairlead-project/fairlead/kernel/cgroup"
	"github.com/fairlead-project/fairlead/kernel/journal"
	"github.com/fairlead-project/fairlead/kernel/probe"
	"github.com/fairlead-project/fairlead/policy"
)

// name is the feature's name and the owner of its journal entries.
const name = "blockio"

// Config is the argument of New.
type Config struct {
	feature.Host

	Capacities string // the file of capacities; "": they end with the feature
	Deadline   bool   // use SCHED_DEADLINE even where there are real-time groups

	Disks policy.Disks // the disks that Guarantees reports

	// Measures returns why this kernel cannot measure containers; nil: monitor.Supported.
	Measures func() error
}

// BlockIO is the feature. feature.Feature says how it may be called.
type BlockIO struct {
	feature.Base
	cfg    Config
	layout cgroup.Layout

	mu         sync.Mutex
	managed    map[container.ID]*managed
	changed    func(container.ID) // asks for another Apply
	capacities capacities
	events     *eventLog
	loop       feature.Loop // of turns
	measured
	judged
	placed
	tried struct { // whether SCHED_DEADLINE is available
		at  time.Time
		err error
	}
}

var (
	_ feature.Feature   = (*BlockIO)(nil)
	_ feature.Reporter  = (*BlockIO)(nil)
	_ feature.Commander = (*BlockIO)(nil)
	_ feature.Decider   = (*BlockIO)(nil)
	_ feature.Witness   = (*BlockIO)(nil)
	_ feature.Examiner  = (*BlockIO)(nil)
	_ feature.Guarantor = (*BlockIO)(nil)
	_ feature.Notifier  = (*BlockIO)(nil)
	_ feature.Mapped    = (*BlockIO)(nil)
)

// managed is a container for which the agent has called Apply.
type managed struct {
	target   policy.Target         // the last one
	at       map[string]block.Disk // by the name in target; zero if there was none
	reserved []reservation         // in force, even if the last Target's was refused
	apart    bool                  // the last call of interrupts kept network work off the CPUs of its disks
	told     told                  // what its status last reported as missed
	realtimeState
}

// New detects what the host can do. It changes nothing.
func New(cfg Config) (*BlockIO, error) {
	cfg.Log = cmp.Or(cfg.Log, slog.New(slog.DiscardHandler))
	f := &BlockIO{
		Base: feature.Base{Called: name},
		cfg:  cfg, managed: make(map[container.ID]*managed), events: newEventLog(), changed: func(container.ID) {}, loop: feature.Loop{Name: "disks"},
		measured: measured{ids: make(map[container.ID]uint64)},
		judged:   judged{limits: make(decide.Limits), decided: make(map[decided]bool)},
	}
	f.Beside = []*feature.Loop{&f.loop}
	var err error
	if f.capacities, err = loadCapacities(cfg.Capacities); err != nil {
		cfg.Log.Error("not all that was known of disks is known any more", "err", err)
	}
	f.layout, err = cgroup.Detect(cfg.Roots.Proc, cfg.Roots.Cgroup)
	if cfg.Measures == nil {
		cfg.Measures = monitor.Supported
	}
	f.Verdict = support(f.layout, err, cfg.Measures)
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
		return probe.Verdict{Level: probe.Unavailable, Why: err.Error(), Mend: "a kernel with BTF"}
	}
	if l.CPU == "" {
		return probe.Verdict{Level: probe.Degraded, Why: "no cpu controller is mounted: nobody can be made to yield a CPU", Mend: "mount the cpu controller"}
	}
	return probe.Verdict{Level: probe.Full}
}

// Notify implements feature.Notifier. BlockIO asks for another Apply if a reservation is missed, or if
// its admission differs from what Apply reported.
func (f *BlockIO) Notify(changed func(container.ID)) { f.changed = changed }

// Apply implements feature.Feature. It puts every part of the Target in force that it can, even if it
// refuses another part.
//
// A reservation that does not fit on its disk is refused with a *decide.Refusal, and the container
// keeps its earlier reservation. A reservation on a disk of unknown capacity is in force. Errors:
// feature.ErrPartly if only things are missing that this host cannot do, or if the disk has never been
// seen to do what is reserved.
func (f *BlockIO) Apply(_ context.Context, t policy.Target) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.Verdict.Level == probe.Unavailable {
		if len(t.Settings.IO) > 0 || !slices.Contains([]policy.Yield{"", policy.YieldOff}, t.Settings.IOYield) {
			return fmt.Errorf("blockio: %s", f.Verdict.Why)
		}
		return nil
	}
	m := f.managed[t.Container.ID]
	if m == nil {
		m = &managed{}
		f.managed[t.Container.ID] = m
	}
	m.target, m.at = t, f.disks(t.Settings)

	// What the container gets.
	errs := []error{f.reserve(m), f.grant(m)}
	// The container's own knobs.
	if m.turning != nil && t.Settings.IOHelp != policy.HelpTurns {
		f.takeTurns() // ends its turns before its knobs are put back
	}
	errs = append(errs, f.turn(m))
	// Budgets, turns and measurements that containers share.
	f.follow()
	f.realtime()
	f.takeTurns()
	f.promote()
	errs = append(errs, m.unbudgeted, f.cover(m))
	if err := joined(errs); err != nil {
		return fmt.Errorf("blockio: %w", err)
	}
	return nil
}

// disks returns the disks that settings name, by name; zero for a name without a disk.
func (f *BlockIO) disks(s policy.Settings) map[string]block.Disk {
	at := make(map[string]block.Disk, len(s.IO))
	for _, io := range s.IO {
		at[io.Device], _ = block.Open(f.cfg.Roots.Sys, io.Device) // Apply reports the error
	}
	return at
}

// joined joins errors. The result is a feature.ErrPartly only if all of the errors are.
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

// Remove implements feature.Feature.
func (f *BlockIO) Remove(_ context.Context, id container.ID) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	m := f.managed[id]
	if m != nil && m.turning != nil {
		m.turning.end() // before its threads are made ordinary
		m.turning = nil
	}
	if err := f.restore(func(e journal.Entry) bool { return e.Owner == journal.Owner{Feature: name, Container: uint64(id)} }); err != nil {
		return fmt.Errorf("blockio: %w", err)
	}
	delete(f.managed, id)
	if err := f.realtime(); err != nil {
		return fmt.Errorf("blockio: %w", err)
	}
	f.follow()
	if m != nil && !m.apart { // restore has put back the host's knobs of its devices
		return nil
	}
	if err := f.interrupts(nil); err != nil {
		return fmt.Errorf("blockio: %w", err)
	}
	return nil
}

// Prune implements feature.Feature.
func (f *BlockIO) Prune(_ context.Context, alive func(container.ID) bool) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	host := container.ID(0) // owns the knobs that containers share
	return errors.Join(f.interrupts(nil), f.restore(func(e journal.Entry) bool {
		id := container.ID(e.Owner.Container)
		return e.Owner.Feature == name && id != host && !alive(id)
	}), f.realtime())
}

// Close implements feature.Feature. Settings stay in force, and decisions lapse.
func (f *BlockIO) Close() error {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, m := range f.managed {
		if m.turning != nil {
			m.turning.end()
		}
	}
	clear(f.managed)
	f.lookers = 0
	f.follow()
	if f.net == nil {
		return nil
	}
	err := f.net.Close()
	f.net = nil
	return err
}
