// Package traffic gives each container the bandwidth that it is due (CNTC): a guaranteed rate, an
// upper bound, a share by weight of the rest, and an order for idle bandwidth.
//
// It shapes what containers send through the uplinks and what they receive, with HTB, or with HFSC
// where policy bounds the latency. It is not a policer: a packet is dropped only when its queue is
// full. Package model does the arithmetic and kernel/qdisc makes the qdiscs; this package decides
// which container belongs to which class, and traffic.bpf.c does so for packets. Package agent
// calls it, as a feature.Feature. README.md lists what it changes on the host, and DESIGN.md says
// how it works.
package traffic

import (
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
	"github.com/fairlead-project/fairlead/feature"
	"github.com/fairlead-project/fairlead/feature/traffic/delay"
	"github.com/fairlead-project/fairlead/feature/traffic/model"
	"github.com/fairlead-project/fairlead/hook"
	"github.com/fairlead-project/fairlead/kernel"
	"github.com/fairlead-project/fairlead/kernel/cgroup"
	"github.com/fairlead-project/fairlead/kernel/journal"
	"github.com/fairlead-project/fairlead/kernel/netdev"
	"github.com/fairlead-project/fairlead/kernel/probe"
	"github.com/fairlead-project/fairlead/kernel/qdisc"
	"github.com/fairlead-project/fairlead/policy"
	"github.com/fairlead-project/fairlead/tenant/identity"
)

// name is the feature's name and the owner of its journal entries.
const name = "traffic"

// Config is what New needs.
type Config struct {
	Roots   kernel.Roots
	Journal *journal.Journal
	Log     *slog.Logger // nil: no log

	Identity *identity.Identity // nil: one of its own
	Ends     *hook.Ends         // nil: those of its own

	// Containers lists the containers of the host. It may be nil if no reports are needed.
	Containers feature.Containers

	// NetNS is the path of the host's network namespace, which holds the uplinks; "" is the
	// namespace of this process.
	NetNS string
	// Uplinks names the devices to shape, each with its rate in bit/s; 0 is the rate of the driver.
	// Empty: all hardware that is up, and bonds.
	Uplinks map[string]uint64
	// Measured is the file of the rates that Calibrate measured; "": none.
	Measured string
	// Now is the clock; nil: time.Now.
	Now func() time.Time
	// Delays always measures how long packets wait, for Read and Snapshot, while there is a tenant.
	// It slows down each packet at each root qdisc of the host.
	Delays bool
}

// Traffic is the feature. See feature.Feature for how it may be called.
type Traffic struct {
	cfg     Config
	support probe.Verdict
	v2      string             // root of the cgroup v2 tree
	own     *identity.Identity // nil: Config's
	hfsc    bool               // the kernel supports it
	splits  bool               // packets can be cut into frames: the kernel has TBF
	find    *netdev.Finder

	measuring chan struct{} // holds one for each Measure

	mu         sync.Mutex
	host       *netdev.NS      // nil once closed, or without support
	listing    *netdev.Listing // of its devices
	programs   *programs
	tenants    map[identity.Tenant]*tenant
	member     map[container.ID]*tenant
	uplinks    map[int]*uplink
	sharing    bool                  // what uplinks receive is redirected to IFBs
	watches    map[uint64]*watch     // of namespaces with our devices or qdiscs
	macvlans   map[container.ID]bool // containers that send past their veths
	forwards   bool                  // the sysctl was set for that, see forward
	forwarding dispute
	changed    func(container.ID) // see Notify
	done       chan struct{}      // closed by Close
	looking    feature.Loop
	meter      *delay.Meter         // nil unless delays are always measured
	cut        map[delay.Class]bool // classes that the meter cannot measure
	unmeasured string               // why none, or not all, are measured
}

func (cfg Config) withDefaults() Config {
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	if cfg.Ends == nil {
		cfg.Ends = hook.Open(cfg.Roots.Proc, cfg.Journal)
	}
	if cfg.Now == nil {
		cfg.Now = time.Now
	}
	if cfg.NetNS == "" {
		cfg.NetNS = filepath.Join(cfg.Roots.Proc, "self", "ns", "net")
	}
	return cfg
}

// New probes the host. It changes nothing.
func New(cfg Config) (*Traffic, error) {
	cfg = cfg.withDefaults()
	f := &Traffic{
		cfg:      cfg,
		find:     netdev.NewFinder(cfg.Roots.Proc, time.Now),
		tenants:  make(map[identity.Tenant]*tenant),
		member:   make(map[container.ID]*tenant),
		uplinks:  make(map[int]*uplink),
		watches:  make(map[uint64]*watch),
		macvlans: make(map[container.ID]bool),

		measuring: make(chan struct{}, atOnce),
		done:      make(chan struct{}),
		looking:   feature.Loop{Name: "what is in force"},
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
	if f.listing, err = netdev.NewListing(cfg.NetNS); err != nil {
		return nil, errors.Join(fmt.Errorf("traffic: %w", err), f.host.Close())
	}
	if err := qdisc.Supported(qdisc.KindHTB); err != nil {
		f.support = probe.Verdict{Level: probe.Unavailable, Why: "no HTB: " + err.Error(), Mend: "a kernel with CONFIG_NET_SCH_HTB"}
		return f, nil
	}
	f.hfsc = qdisc.Supported(qdisc.KindHFSC) == nil
	f.splits = qdisc.Supported(qdisc.KindTBF) == nil
	if err = f.cfg.Ends.Err(); err == nil && cfg.Identity == nil {
		f.own, err = identity.Open(cfg.Roots.Proc)
		f.cfg.Identity = f.own
	}
	if err == nil {
		f.programs, err = load(f.cfg.Identity.Maps())
	}
	if err != nil {
		f.support = probe.Verdict{Level: probe.Unavailable, Why: "packets cannot be told apart: " + err.Error(), Mend: "a kernel with tcx (6.6 or later) or clsact"}
		return f, nil
	}
	f.support = probe.Verdict{Level: probe.Full}
	go f.lookAgain(f.done)
	if cfg.Delays {
		if err := delay.Supported(); err != nil {
			f.cfg.Delays = false
			f.support = probe.Verdict{Level: probe.Degraded, Why: err.Error() + "; the rest works", Mend: "a kernel of 5.15 or later with BTF, or an agent without --traffic-delays"}
		}
	}
	return f, nil
}

func (f *Traffic) now() time.Time { return f.cfg.Now() }

// Name implements feature.Feature.
func (f *Traffic) Name() string { return name }

// Support implements feature.Feature.
func (f *Traffic) Support() probe.Verdict { return f.support }

// Apply implements feature.Feature. It refuses a container with a *model.Refusal if an uplink
// cannot keep its promise, and with feature.ErrDisagree if it shares its network with a container
// that is due something else; what was in force stays. It returns feature.ErrPartly if all is done
// that can be done here, and a part of the container's due does not hold.
func (f *Traffic) Apply(ctx context.Context, t policy.Target) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	defer f.follow()
	d := due{t.Settings.Egress, t.Settings.Ingress}
	wanted := asked(d.egress) || asked(d.ingress)
	if f.programs == nil || f.host == nil {
		if wanted {
			return fmt.Errorf("traffic: %s", f.support.Why)
		}
		return nil
	}
	if err := f.trust(t.Container); err != nil {
		return err
	}
	if !wanted {
		return f.remove(t.Container.ID)
	}
	if err := f.shape(ctx, t.Container, d); err != nil {
		return fmt.Errorf("traffic: %w", err)
	}
	return nil
}

// errNoSharing is returned on kernels whose IFBs drop what a BPF program redirects to them, as it
// is not marked as redirected (drivers/net/ifb.c, ifb_xmit): 6.1 does so.
var errNoSharing = errors.New("what uplinks receive cannot be shared on this kernel: it needs tcx (6.6 or later)")

// shape brings one container, and with it all others, to their due.
func (f *Traffic) shape(ctx context.Context, c container.Container, d due) error {
	key := identity.TenantOf(c)
	if key == (identity.Tenant{}) {
		return errors.New("the container's network is not known")
	}
	if t := f.member[c.ID]; t != nil && t.key != key {
		if err := f.remove(c.ID); err != nil { // it has moved
			return err
		}
	}
	t := f.tenants[key]
	if t != nil {
		if _, member := t.members[c.ID]; member {
			t.members[c.ID], t.wishes[c.ID] = c, d
		}
		if id, differs := t.other(c.ID, d); differs {
			return fmt.Errorf("%w: container %s (%q); what is in force for them stays until theirs are the same", feature.ErrDisagree, id, t.members[id].Name)
		}
	}
	missing, err := f.look()
	if err != nil {
		return err
	}
	made := t == nil
	if made {
		s, err := f.cfg.Identity.Take(key)
		if err != nil {
			return err
		}
		t = newTenant(key, s)
	}
	was := t.due
	t.due, t.name = d, c.Name
	f.tenants[key] = t
	_, had := t.members[c.ID]
	t.members[c.ID], t.wishes[c.ID] = c, d
	out, in, failed := f.plans()
	if failed != nil {
		t.due = was
		if made {
			delete(f.tenants, key)
		}
		if _, _, before := f.plans(); before == nil { // its own fault: nothing has been changed
			if !had {
				delete(t.members, c.ID)
				delete(t.wishes, c.ID)
			}
			if made {
				f.cfg.Identity.Release(key)
			}
			return failed
		}
		// Without it the uplinks cannot be divided either: its veths enforce what they can.
		t.due, f.tenants[key] = d, t
	}
	f.member[c.ID] = t
	if asked(was.ingress) && !asked(d.ingress) {
		// Its packets leave the class first.
		if err := f.unlearn(t); err != nil {
			return err
		}
	}
	errs := []error{failed}
	if failed == nil {
		// The class first, so that no packet names a missing one.
		errs = append(errs, f.bring(out, in), f.share(ctx, in != nil))
	}
	if err := errors.Join(append(errs, f.identify(ctx, t), ctx.Err())...); err != nil {
		return err
	}
	return f.unkept(t, missing)
}

// Remove implements feature.Feature.
func (f *Traffic) Remove(_ context.Context, id container.ID) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	defer f.follow()
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
	if err := f.cfg.Identity.Forget(name, id); err != nil {
		return err
	}
	others := slices.DeleteFunc(slices.Sorted(maps.Keys(t.members)), func(m container.ID) bool { return m == id })
	if len(others) > 0 {
		// The others take over its entries.
		if err := f.cfg.Journal.Reassign(func(e journal.Entry) bool {
			return e.Owner == journal.Owner{Feature: name, Container: uint64(id)}
		}, journal.Owner{Feature: name, Container: uint64(others[0])}); err != nil {
			return err
		}
	}
	delete(f.member, id)
	delete(t.members, id)
	delete(t.wishes, id)
	if l := t.sockets[id]; l != nil {
		delete(t.sockets, id)
		if err := l.Close(); err != nil {
			return err
		}
	}
	if len(t.members) > 0 {
		return nil
	}
	// First move its packets, then remove its classes.
	errs := []error{f.programs.setClass(t.slot, identity.Nobody), f.let(t), t.close()}
	if asked(t.due.ingress) {
		errs = append(errs, f.programs.forgetFlows())
	}
	delete(f.tenants, t.key)
	f.cfg.Identity.Release(t.key)
	if len(f.tenants) == 0 {
		return errors.Join(append(errs, f.release())...)
	}
	out, in, err := f.plans()
	if err == nil {
		err = errors.Join(f.bring(out, in), f.share(context.Background(), in != nil))
	}
	return errors.Join(append(errs, err)...)
}

// plans divides every uplink among the tenants, in both directions. It changes nothing. A nil map
// means that the uplinks need nothing in that direction.
func (f *Traffic) plans() (out, in map[int]model.Plan, err error) {
	sends, shares := false, false
	for _, t := range f.tenants {
		sends = sends || asked(t.due.egress)
		shares = shares || t.shares()
	}
	if sends {
		if out, err = f.plan(); err != nil {
			return nil, nil, err
		}
	}
	if shares {
		if in, err = f.planIngress(); err != nil {
			return nil, nil, err
		}
	}
	if len(in) == 0 { // nothing can be enforced there, see unkept
		return out, nil, nil
	}
	if f.cfg.Ends.Filters() {
		return nil, nil, errNoSharing
	}
	return out, in, nil
}

// shares reports whether a tenant's due needs the ingress of the uplinks. A ceil alone needs its
// veth.
func (t *tenant) shares() bool {
	n := t.due.ingress
	if !asked(n) || t.key.NetNS == 0 {
		return asked(n)
	}
	for _, c := range t.members {
		for _, dev := range c.Interfaces {
			if unseen(dev.Kind) {
				return true
			}
		}
	}
	n.Ceil = 0
	return asked(n)
}

// plan divides what the uplinks send.
func (f *Traffic) plan() (map[int]model.Plan, error) {
	return f.divide("uplink %s: %w", func(u *uplink) model.Link { return u.link }, func(d due) policy.Net { return d.egress })
}

// planIngress divides what the uplinks receive.
func (f *Traffic) planIngress() (map[int]model.Plan, error) {
	return f.divide("uplink %s, what it receives: %w", func(u *uplink) model.Link { return u.ingress.link }, func(d due) policy.Net { return d.ingress })
}

func (f *Traffic) divide(format string, link func(*uplink) model.Link, of func(due) policy.Net) (map[int]model.Plan, error) {
	tenants := make([]model.Tenant, 0, len(f.tenants))
	bounds, orders := false, false
	for _, t := range f.tenants {
		if n := of(t.due); asked(n) {
			tenants = append(tenants, model.Tenant{Slot: t.slot, Name: t.name, Net: n, Bare: t.bare()})
			bounds, orders = bounds || n.Latency > 0, orders || n.Priority != nil
		}
	}
	plans := make(map[int]model.Plan, len(f.uplinks))
	for _, index := range slices.Sorted(maps.Keys(f.uplinks)) {
		u := f.uplinks[index]
		l := link(u)
		if l.Received && !u.ether || l.Received && !slices.ContainsFunc(tenants, func(t model.Tenant) bool { return sharesReceived(l, t.Net) }) {
			continue
		}
		// HFSC has deadlines, and no priorities; HTB can keep a latency too, at the price of an
		// order.
		l.HFSC = f.hfsc && bounds && !orders
		p, err := model.Compute(l, tenants)
		if err != nil {
			return nil, fmt.Errorf(format, l.Name, err)
		}
		plans[index] = p
	}
	return plans, nil
}
