// Package overlay puts a cache in front of overlay networks (ONCache): packets of known flows
// between containers of different hosts bypass bridge, routing, netfilter and tunnel device.
//
// overlay.bpf.c learns from packets that pass the kernel's own path, and redirects the packets that
// follow. This package finds the networks, attaches the programs, and invalidates learnt entries when
// anything changes. It makes no network, and passes only what the kernel has passed before. Package
// agent calls it, as a feature.Feature. README.md states the cost, and what stays slow.
package overlay

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/feature"
	"github.com/fairlead-project/fairlead/feature/overlay/network"
	"github.com/fairlead-project/fairlead/hook"
	"github.com/fairlead-project/fairlead/kernel"
	"github.com/fairlead-project/fairlead/kernel/bpf"
	"github.com/fairlead-project/fairlead/kernel/conntrack"
	"github.com/fairlead-project/fairlead/kernel/journal"
	"github.com/fairlead-project/fairlead/kernel/netdev"
	"github.com/fairlead-project/fairlead/kernel/probe"
	"github.com/fairlead-project/fairlead/kernel/qdisc"
	"github.com/fairlead-project/fairlead/policy"
	"github.com/fairlead-project/fairlead/tenant"
	"github.com/fairlead-project/fairlead/tenant/identity"
)

// name is the feature's name and the owner of its journal entries.
const name = "overlay"

// Config is the argument of New.
type Config struct {
	feature.Host

	// Killed is the file of the networks stopped by hand; "": none is kept.
	Killed string
	// Now is the clock; nil: time.Now.
	Now func() time.Time
}

// table is a conntrack.Table.
type table interface {
	BeLiberal(tuples []conntrack.Tuple) (found []bool, err error)
	Close()
}

// Overlay is the feature. feature.Feature says how it may be called.
type Overlay struct {
	feature.Base
	cfg     Config
	own     *identity.Identity // opened by New; nil if Config has one
	looking feature.Loop
	beating feature.Loop

	asking sync.Mutex       // flows are answered without waiting for a round
	tables map[uint32]table // by the network's number, if the kernel has conntrack tables

	mu      sync.Mutex
	host    *netdev.NS // nil once closed, or without support
	changed func(container.ID)
	tenants *tenant.Register
	slots   map[tenant.Key]identity.Slot
	cache   *cache // nil while no network is fast
	stop    context.CancelFunc
	done    sync.WaitGroup
	unwatch func() error
	at      hook.Set                 // programs at uplinks
	by      map[uint32]overlayUplink // the content of fl_ov_uplinks
	reader  network.Reader
	force   map[key]*force
	broken  map[key]error     // networks that failed in the last round
	nets    []network.Network // with containers that ask for the fast path, as of the last round
	last    uint32            // last generation; each network gets new ones
	looked  time.Time         // time of the last round
	due     string            // why another round is due
	killed  map[string]string
}

// New probes the host. It changes nothing.
func New(cfg Config) (*Overlay, error) {
	cfg.Log = cmp.Or(cfg.Log, slog.New(slog.DiscardHandler))
	if cfg.Now == nil {
		cfg.Now = time.Now
	}
	cfg.NetNS = cmp.Or(cfg.NetNS, filepath.Join(cfg.Roots.Proc, "self", "ns", "net"))
	f := &Overlay{
		Base:    feature.Base{Called: name},
		cfg:     cfg,
		looking: feature.Loop{Name: "changes", Bound: feature.BehindCalls},
		beating: feature.Loop{Name: "heartbeat"},
		changed: func(container.ID) {},
		tenants: tenant.New(cfg.Roots.Proc, tenant.Network),
		slots:   make(map[tenant.Key]identity.Slot),
		tables:  make(map[uint32]table),
		force:   make(map[key]*force),
		broken:  make(map[key]error),
		killed:  make(map[string]string),
	}
	f.Beside = []*feature.Loop{&f.looking, &f.beating}
	if os.Geteuid() != 0 {
		f.Verdict = probe.Verdict{Level: probe.Unavailable, Why: "not root: no program can be loaded", Mend: "run the agent as root"}
		return f, nil
	}
	if err := cfg.Ends.Err(); err != nil {
		f.Verdict = probe.Verdict{Level: probe.Unavailable, Why: err.Error(), Mend: "a kernel with tcx (6.6 or later) or clsact"}
		return f, nil
	}
	var u unix.Utsname
	if err := unix.Uname(&u); err != nil || mixes(unix.ByteSliceToString(u.Release[:]), unix.ByteSliceToString(u.Version[:])) {
		f.Verdict = probe.Verdict{Level: probe.Unavailable, Why: "with PREEMPT_RT, Linux 6.18 and later handle several packets of a CPU at once, and would mix what the programs know of them", Mend: "a kernel without PREEMPT_RT"}
		return f, nil
	}
	if err := supported(); err != nil {
		f.Verdict = probe.Verdict{Level: probe.Unavailable, Why: err.Error(), Mend: "a kernel with BTF"}
		return f, nil
	}
	var err error
	if cfg.Identity == nil {
		if f.own, err = identity.Open(cfg.Roots.Proc); err != nil {
			return nil, fmt.Errorf("overlay: %w", err)
		}
		f.cfg.Identity = f.own
	}
	if f.host, err = netdev.Open(cfg.NetNS); err != nil {
		return nil, errors.Join(fmt.Errorf("overlay: %w", err), f.own.Close())
	}
	f.reader = network.Reader{
		Own: f.host, Path: cfg.NetNS, Monitor: cfg.Roots.Monitor, Find: netdev.NewFinder(cfg.Roots.Proc, cfg.Now), Look: cfg.Ends.Look,
		Home: f.cfg.Identity.Home,
	}
	var stopped killedFile
	if _, err := f.stateFile().Read(&stopped); err != nil {
		return nil, errors.Join(fmt.Errorf("overlay: %w", err), f.host.Close(), f.own.Close())
	}
	maps.Copy(f.killed, stopped.Networks)
	f.Verdict = probe.Verdict{Level: probe.Full}
	return f, nil
}

// Notify implements feature.Notifier.
func (f *Overlay) Notify(changed func(container.ID)) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.changed = changed
}

// wants reports whether a container asks for the fast path.
func wants(t policy.Target) (on, says bool) {
	if t.Settings.Overlay == nil {
		return false, false
	}
	return *t.Settings.Overlay, true
}

// Apply implements feature.Feature. Containers that share a network are fast if one asks for it and
// none opposes it.
func (f *Overlay) Apply(_ context.Context, t policy.Target) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	on, _ := wants(t)
	if f.host == nil {
		if on {
			return fmt.Errorf("overlay: %s", f.Verdict.Why)
		}
		return nil
	}
	in, left, err := f.tenants.Apply(t)
	if err != nil {
		if !on {
			return f.remove(t.Container.ID)
		}
		return fmt.Errorf("overlay: %w", err)
	}
	if err := f.settle(append(left, in)); err != nil {
		return fmt.Errorf("overlay: %w", err)
	}
	if !on {
		return nil
	}
	if other, ok := tenant.Agree(in.Members(), wants).Against(t.Container.ID); ok {
		return fmt.Errorf("overlay: %w: container %s (%q)", feature.ErrDisagree, other.ID, other.Name)
	}
	return f.state(in)
}

// Remove implements feature.Feature.
func (f *Overlay) Remove(_ context.Context, id container.ID) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.host == nil {
		return nil
	}
	return f.remove(id)
}

func (f *Overlay) remove(id container.ID) error {
	if err := f.settle(f.tenants.Remove(id)); err != nil {
		return fmt.Errorf("overlay: %w", err)
	}
	return nil
}

// settle adapts the host to changed tenants.
func (f *Overlay) settle(changed []*tenant.Tenant) error {
	news := slices.ContainsFunc(changed, func(t *tenant.Tenant) bool {
		_, fast := f.slots[t.Key()]
		return fast || tenant.Agree(t.Members(), wants).Value
	})
	if news {
		if err := f.round("containers"); err != nil {
			return err
		}
	}
	for _, t := range changed {
		if c := t.Change(); len(c.Joined)+len(c.Left) > 0 {
			for _, m := range t.Members() { // their status may change
				if on, _ := wants(m); on && !slices.Contains(c.Joined, m.Container.ID) {
					f.changed(m.Container.ID)
				}
			}
		}
		f.tenants.Settle(t)
	}
	return nil
}

// Prune implements feature.Feature: it removes the device pairs of an earlier agent.
func (f *Overlay) Prune(context.Context, func(container.ID) bool) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.host == nil {
		return nil
	}
	return f.restore(func(e journal.Entry) bool {
		if e.Ref.Kind == qdisc.KindFilter {
			return f.cfg.Ends.Stray(e)
		}
		for _, o := range f.force {
			if o.NetNS != f.host.Inode() && e.Ref == o.ns.Pair(o.Index, nil).Ref() {
				return false
			}
		}
		return true
	})
}

// Maps implements feature.Mapped.
func (f *Overlay) Maps() []bpf.Usage {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.cache == nil {
		return nil
	}
	return f.cache.object.Usage()
}

// Close implements feature.Feature. Nothing stays in the kernel.
func (f *Overlay) Close() error {
	host, err := f.end()
	f.done.Wait()
	if host != nil {
		err = errors.Join(err, host.Close(), f.own.Close())
	}
	return err
}

// end removes everything from the kernel, and returns the host's namespace, which is still open.
func (f *Overlay) end() (host *netdev.NS, err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	var errs []error
	for _, o := range f.force {
		errs = append(errs, f.drop(o))
	}
	errs = append(errs, f.shut())
	host, f.host = f.host, nil
	return host, errors.Join(errs...)
}

// mixes reports whether one softirq can preempt another on the same CPU. Before Linux 6.18 a lock
// prevents that.
func mixes(release, version string) bool {
	var major, minor int
	fmt.Sscanf(release, "%d.%d", &major, &minor)
	return strings.Contains(version, "PREEMPT_RT") && (major > 6 || major == 6 && minor >= 18)
}

// supported returns an error if the programs cannot be loaded.
func supported() error {
	c, err := openCache(nil)
	if err != nil {
		return err
	}
	p, err := c.program(overlayProgFlOvReceive, 0)()
	if err != nil {
		return errors.Join(err, c.close())
	}
	return errors.Join(p.Close(), c.close())
}

// restore undoes this feature's matching changes.
func (f *Overlay) restore(match func(journal.Entry) bool) error {
	_, err := f.cfg.Journal.Restore(kernel.Opener(f.cfg.Roots), func(e journal.Entry) bool {
		return e.Owner.Feature == name && match(e)
	})
	return err
}
