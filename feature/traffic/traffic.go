// Package traffic gives each container the bandwidth that it is due (CNTC): a
// guaranteed rate, an upper bound, a share by weight of what is left, and an
// order in which idle bandwidth is taken.
//
// In this build it does so for what containers send by the uplinks, by HTB. It
// is no policer: nothing is dropped that a queue can hold. The arithmetic is
// package model's, the qdiscs kernel/qdisc's; here containers are joined with
// both, and their packets with their classes (traffic.bpf.c). Package agent
// calls it, as a feature.Feature. README.md says what is changed on the host.
package traffic

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
	"sync"
	"time"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/container/slot"
	"github.com/fairlead-project/fairlead/feature/traffic/model"
	"github.com/fairlead-project/fairlead/kernel"
	"github.com/fairlead-project/fairlead/kernel/cgroup"
	"github.com/fairlead-project/fairlead/kernel/journal"
	"github.com/fairlead-project/fairlead/kernel/netdev"
	"github.com/fairlead-project/fairlead/kernel/probe"
	"github.com/fairlead-project/fairlead/kernel/qdisc"
	"github.com/fairlead-project/fairlead/policy"
)

// name is the feature's name and the owner of its journal entries.
const name = "traffic"

// Config is what New needs.
type Config struct {
	Roots   kernel.Roots
	Journal *journal.Journal
	Log     *slog.Logger    // nil: no log
	Slots   *slot.Allocator // nil: one of its own

	// NetNS is a path to the host's network namespace, where its uplinks are;
	// "" is the namespace of this process.
	NetNS string
	// Uplinks names the devices to shape, each with its rate in bit/s; 0 is
	// what the device says. Empty: all hardware that is up, and bonds.
	Uplinks map[string]uint64
	// MarkMask is the part of the mark, 16 bits in a row, that carries a
	// packet's slot beside its priority; 0: none. TCIndex says the same of
	// skb->tc_index. Neither is needed where the priority stays: everywhere
	// that is known of, with what this feature sets for IPv4 routing.
	MarkMask uint32
	TCIndex  bool
}

// Traffic is the feature. See feature.Feature for how it may be called.
type Traffic struct {
	cfg     Config
	support probe.Verdict
	v2      string // root of the cgroup v2 tree
	find    *netdev.Finder

	mu       sync.Mutex
	host     *netdev.NS // nil once closed, or where nothing works
	programs *programs
	tenants  map[slot.Tenant]*tenant
	member   map[container.ID]*tenant
	uplinks  map[int]*uplink
	macvlans map[container.ID]bool // containers whose packets no veth brings
}

// New finds out what the host can do. It changes nothing.
func New(cfg Config) (*Traffic, error) {
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	if cfg.Slots == nil {
		cfg.Slots = slot.New(time.Now)
	}
	if cfg.NetNS == "" {
		cfg.NetNS = filepath.Join(cfg.Roots.Proc, "self", "ns", "net")
	}
	f := &Traffic{
		cfg:      cfg,
		find:     netdev.NewFinder(cfg.Roots.Proc, time.Now),
		tenants:  make(map[slot.Tenant]*tenant),
		member:   make(map[container.ID]*tenant),
		uplinks:  make(map[int]*uplink),
		macvlans: make(map[container.ID]bool),
	}
	if os.Geteuid() != 0 {
		f.support = probe.Verdict{Level: probe.Unavailable, Why: "not root: devices cannot be changed", Mend: "run the agent as root"}
		return f, nil
	}
	if layout, err := cgroup.Detect(cfg.Roots.Proc, cfg.Roots.Cgroup); err == nil {
		f.v2 = layout.V2
	}
	var err error
	if f.host, err = netdev.Open(cfg.NetNS); err != nil {
		return nil, fmt.Errorf("traffic: %w", err)
	}
	if err := qdisc.Supported(qdisc.KindHTB); err != nil {
		f.support = probe.Verdict{Level: probe.Unavailable, Why: "no HTB: " + err.Error(), Mend: "a kernel with CONFIG_NET_SCH_HTB"}
		return f, nil
	}
	if f.programs, err = load(cfg.MarkMask, cfg.TCIndex); err != nil {
		f.support = probe.Verdict{Level: probe.Unavailable, Why: "packets cannot be told apart: " + err.Error(), Mend: "a kernel with tcx (6.6 or later)"}
		return f, nil
	}
	f.support = probe.Verdict{Level: probe.Full}
	return f, nil
}

// Name implements feature.Feature.
func (f *Traffic) Name() string { return name }

// Support implements feature.Feature.
func (f *Traffic) Support() probe.Verdict { return f.support }

// Apply implements feature.Feature. A container whose promise no uplink can
// keep is refused with a *model.Refusal, and keeps what it had.
func (f *Traffic) Apply(ctx context.Context, t policy.Target) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	net := t.Settings.Egress
	net.Latency = 0 // not in this build; policy tells so
	asked := net != policy.Net{}
	if f.programs == nil || f.host == nil {
		if asked {
			return fmt.Errorf("traffic: %s", f.support.Why)
		}
		return nil
	}
	if err := f.trust(t.Container); err != nil {
		return err
	}
	if !asked {
		return f.remove(t.Container.ID)
	}
	if err := f.shape(ctx, t.Container, net); err != nil {
		return fmt.Errorf("traffic: %w", err)
	}
	return nil
}

// shape brings one container, and with it all others, to what is due to them.
func (f *Traffic) shape(ctx context.Context, c container.Container, net policy.Net) error {
	key := slot.Of(c)
	if key == (slot.Tenant{}) {
		return errors.New("the container's network is not known")
	}
	if t := f.member[c.ID]; t != nil && t.key != key {
		if err := f.remove(c.ID); err != nil { // it has moved
			return err
		}
	}
	t := f.tenants[key]
	if t != nil {
		if id, differs := t.other(c.ID, net); differs {
			return fmt.Errorf("it shares its network with container %s, whose policy is another: that one's holds for both", id)
		}
	}
	missing := f.look()
	if len(f.uplinks) == 0 {
		return cmp.Or(missing, errors.New("the host has no uplink: no hardware is up (the agent's flag --uplink names others)"))
	}
	made := t == nil
	if made {
		s, err := f.cfg.Slots.Take(key)
		if err != nil {
			return err
		}
		t = newTenant(key, s)
	}
	was := t.net
	t.net, t.name = net, c.Name
	f.tenants[key] = t
	plans, err := f.plan()
	if err != nil { // nothing has been changed
		t.net = was
		if made {
			delete(f.tenants, key)
			f.cfg.Slots.Release(key)
		}
		return err
	}
	t.members[c.ID] = c
	f.member[c.ID] = t
	// The class first, so that no packet asks for one that is not there.
	if err := f.bring(plans); err != nil {
		return err
	}
	if err := errors.Join(f.identify(ctx, t), ctx.Err()); err != nil {
		return err
	}
	return missing
}

// Remove implements feature.Feature.
func (f *Traffic) Remove(_ context.Context, id container.ID) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.macvlans[id] {
		delete(f.macvlans, id)
		if f.programs != nil {
			if err := f.programs.setStrict(len(f.macvlans) > 0); err != nil {
				return err
			}
		}
	}
	return f.remove(id)
}

func (f *Traffic) remove(id container.ID) error {
	t := f.member[id]
	if t == nil {
		return nil
	}
	if err := f.programs.forget(id); err != nil {
		return err
	}
	delete(f.member, id)
	delete(t.members, id)
	if len(t.members) > 0 {
		return nil
	}
	// First its packets go elsewhere, then its classes.
	errs := []error{t.close()}
	delete(f.tenants, t.key)
	f.cfg.Slots.Release(t.key)
	if len(f.tenants) == 0 {
		return errors.Join(append(errs, f.release())...)
	}
	plans, err := f.plan()
	if err == nil {
		err = f.bring(plans)
	}
	return errors.Join(append(errs, err)...)
}

// plan divides every uplink among the tenants. It changes nothing.
func (f *Traffic) plan() (map[int]model.Plan, error) {
	tenants := make([]model.Tenant, 0, len(f.tenants))
	for _, t := range f.tenants {
		tenants = append(tenants, model.Tenant{Slot: t.slot, Name: t.name, Net: t.net})
	}
	plans := make(map[int]model.Plan, len(f.uplinks))
	for _, index := range slices.Sorted(maps.Keys(f.uplinks)) {
		u := f.uplinks[index]
		p, err := model.Compute(u.link, tenants)
		if err != nil {
			return nil, fmt.Errorf("uplink %s: %w", u.link.Name, err)
		}
		plans[index] = p
	}
	return plans, nil
}

// Prune implements feature.Feature. What an earlier agent left at the uplinks
// goes if nobody is shaped any more; else Apply has adopted it.
func (f *Traffic) Prune(context.Context, func(container.ID) bool) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if len(f.tenants) > 0 {
		return nil
	}
	return f.restore()
}

// restore puts back all that was changed.
func (f *Traffic) restore() error {
	_, err := f.cfg.Journal.Restore(kernel.Opener(f.cfg.Roots), func(e journal.Entry) bool { return e.Owner.Feature == name })
	return err
}

// Close implements feature.Feature. The qdiscs stay; without the programs all
// packets are in the default class, and share the link as they come.
func (f *Traffic) Close() error {
	f.mu.Lock()
	defer f.mu.Unlock()
	var errs []error
	for _, t := range f.tenants {
		errs = append(errs, t.close())
	}
	for _, u := range f.uplinks {
		errs = append(errs, u.close())
	}
	clear(f.tenants)
	clear(f.member)
	clear(f.uplinks)
	if f.programs != nil {
		errs = append(errs, f.programs.close())
		f.programs = nil
	}
	if f.host != nil {
		errs = append(errs, f.host.Close())
		f.host = nil
	}
	return errors.Join(errs...)
}
