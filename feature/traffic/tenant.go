package traffic

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/cilium/ebpf/link"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/feature/traffic/model"
	"github.com/fairlead-project/fairlead/hook"
	"github.com/fairlead-project/fairlead/kernel/journal"
	"github.com/fairlead-project/fairlead/kernel/netdev"
	"github.com/fairlead-project/fairlead/kernel/qdisc"
	"github.com/fairlead-project/fairlead/policy"
	"github.com/fairlead-project/fairlead/tenant/identity"
)

// tenant is one network tenant that is shaped, of one container or several.
type tenant struct {
	key     identity.Tenant
	slot    identity.Slot
	name    string // of one of its containers
	due     due    // in force: what all members last agreed on
	members map[container.ID]container.Container
	wishes  map[container.ID]due // what policy gives each now
	ends    map[container.Device]*end
	at      hook.Set                   // fl_identify and fl_deliver, at those
	sends   map[uint64]*egressQueue    // by network namespace
	sockets map[container.ID]link.Link // fl_arrive, where the tenant has no device
	looked  time.Time                  // last look at its devices after a netlink event
	touched bool                       // another event has come since
}

// due is what policy gives a tenant in the two directions.
type due struct{ egress, ingress policy.Net }

func (d due) equal(o due) bool { return equal(d.egress, o.egress) && equal(d.ingress, o.ingress) }

// asked reports whether policy gives anything.
func asked(n policy.Net) bool { return n != policy.Net{} }

// end is a device that a tenant's packets pass: the host end of a veth, or a macvlan in the
// container's namespace.
type end struct {
	receives queue  // of a veth: limits what the tenant receives
	name     string // of the device
	host     bool   // it is the host end of a veth
	path     string // of the device's namespace
	unheld   error  // why receives enforces nothing, until the host is changed
}

// egressQueue limits what a tenant sends: one queue for all veths with a host end in one namespace.
type egressQueue struct {
	ingress
	of     int    // the host end that names the IFB: the one with the lowest index
	path   string // of the namespace
	unheld error  // as of an end
}

func newTenant(key identity.Tenant, s identity.Slot) *tenant {
	return &tenant{key: key, slot: s, members: make(map[container.ID]container.Container), wishes: make(map[container.ID]due), ends: make(map[container.Device]*end), sends: make(map[uint64]*egressQueue), sockets: make(map[container.ID]link.Link)}
}

// other returns the first other container of the tenant with a policy other than d.
func (t *tenant) other(id container.ID, d due) (container.ID, bool) {
	for _, m := range slices.Sorted(maps.Keys(t.wishes)) {
		if m != id && !t.wishes[m].equal(d) {
			return m, true
		}
	}
	return 0, false
}

func equal(a, b policy.Net) bool {
	same := a.Priority == nil && b.Priority == nil || a.Priority != nil && b.Priority != nil && *a.Priority == *b.Priority
	a.Priority, b.Priority = nil, nil
	return same && a == b
}

// bare reports whether no runtime knows any of the tenant's containers.
func (t *tenant) bare() bool {
	for _, c := range t.members {
		if c.Source != container.CgroupSource {
			return false
		}
	}
	return true
}

func (t *tenant) close() error {
	var errs []error
	for inode, s := range t.sends {
		errs = append(errs, s.close())
		delete(t.sends, inode)
	}
	clear(t.ends)
	for id, l := range t.sockets {
		errs = append(errs, l.Close())
		delete(t.sockets, id)
	}
	return errors.Join(append(errs, t.at.Close())...)
}

// trust records whether c sends through such a device.
func (f *Traffic) trust(c container.Container) error {
	delete(f.macvlans, c.ID)
	for _, dev := range c.Interfaces {
		if unseen(dev.Kind) {
			f.macvlans[c.ID] = true
		}
	}
	return f.programs.setStrict(len(f.macvlans) > 0)
}

// devices lists the ends that identify a tenant's packets.
func (f *Traffic) devices(t *tenant) (map[container.Device]container.End, error) {
	want := make(map[container.Device]container.End)
	var errs []error
	for _, c := range t.members {
		for _, e := range c.Ends(f.cfg.Roots.Proc) {
			switch {
			case e.Inside.Kind == "veth" && !e.Host:
				errs = append(errs, fmt.Errorf("%s: the host's end of this veth is not to be found", e.Name))
			case e.Inside.Kind == "veth" || unseen(e.Inside.Kind):
				want[e.Device] = e
			}
		}
	}
	return want, errors.Join(errs...)
}

// identify numbers a tenant's packets wherever they enter the host, learns them where they arrive,
// and limits what the tenant receives. It may be repeated at any time, and then only repairs.
func (f *Traffic) identify(ctx context.Context, t *tenant) error {
	want, err := f.devices(t)
	errs := []error{err}
	for id, c := range t.members {
		errs = append(errs, f.classify(t, c, t.slot))
		if l := t.sockets[id]; l != nil && detached(l) {
			errs = append(errs, l.Close())
			delete(t.sockets, id)
		}
		if f.learns(t) && t.key.NetNS == 0 && t.sockets[id] == nil && c.Cgroup.V2 != "" {
			l, err := attachCgroup(c.Cgroup.V2, f.programs.copyFor(trafficProgFlArrive, t.slot))
			if err != nil {
				errs = append(errs, err)
				continue
			}
			t.sockets[id] = l
		}
	}
	if !f.learns(t) {
		for id, l := range t.sockets {
			errs = append(errs, l.Close())
			delete(t.sockets, id)
		}
	}
	for key, e := range t.ends {
		if _, wanted := want[key]; !wanted {
			delete(t.ends, key)
			errs = append(errs, t.leave(key, ""), f.leave(key, e))
		}
	}
	leads := f.leads(t, want)
	for inode, s := range t.sends {
		if at := leads[inode]; len(at) == 0 || at[0] != s.of {
			errs = append(errs, f.stop(t, inode))
		}
	}
	for key, dev := range want {
		if ctx.Err() != nil {
			break // the caller reports it
		}
		e := t.ends[key]
		if e == nil {
			e = &end{receives: queue{index: key.Index}, path: dev.Path}
			t.ends[key] = e
		}
		e.name, e.host = dev.Name, dev.Host
		at := leads[key.NetNS]
		if err := f.reach(t, e, dev, len(at) > 0 && at[0] == key.Index); err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", dev.Name, err))
		}
	}
	for inode, at := range leads {
		if err := f.holdSent(t, inode, at); err != nil {
			errs = append(errs, fmt.Errorf("what it sends: %w", err))
		}
	}
	return errors.Join(errs...)
}

// leads lists, by namespace, the host ends that lead to the queue for the tenant's egress ceil, the
// lowest index first.
func (f *Traffic) leads(t *tenant, want map[container.Device]container.End) map[uint64][]int {
	leads := make(map[uint64][]int)
	if t.due.egress.Ceil == 0 || f.cfg.Ends.Filters() { // errNoSharing
		return leads
	}
	for key, e := range want {
		if e.Host {
			leads[key.NetNS] = append(leads[key.NetNS], key.Index)
		}
	}
	for _, at := range leads {
		slices.Sort(at)
	}
	return leads
}

// learns reports whether to learn flows where the tenant receives them.
func (f *Traffic) learns(t *tenant) bool { return f.sharing && asked(t.due.ingress) }

// leave detaches the program of a name, or all, from one device.
func (t *tenant) leave(d container.Device, name string) error {
	return t.at.Drop(func(at container.Device, _ bool, n string) bool { return at == d && (name == "" || n == name) })
}

// reach configures one device of a tenant. named: an IFB bears its index, for holdSent.
func (f *Traffic) reach(t *tenant, e *end, dev container.End, named bool) error {
	at := hook.Place{Device: dev.Device, Path: dev.Path}
	if dev.Host {
		at.Stage, at.Name = hook.Identify, identify
		if err := f.put(&t.at, at, f.programs.copyFor(trafficProgFlIdentify, t.slot)); err != nil {
			return err
		}
	}
	if f.learns(t) {
		// A veth's host end sends what the container receives.
		at.Egress, at.Stage, at.Name = dev.Host, hook.Learn, deliver
		if err := f.put(&t.at, at, f.programs.copyFor(trafficProgFlDeliver, t.slot)); err != nil {
			return err
		}
	} else if err := t.leave(dev.Device, deliver); err != nil {
		return err
	}
	if !dev.Host {
		return nil
	}
	ns, err := f.find.Open(dev.Path, dev.NetNS)
	if err != nil {
		return err
	}
	defer ns.Close()
	if !named {
		err = f.unlead(ns, dev.Index, &ingress{}) // from an earlier agent
	}
	e.unheld = f.holdReceived(t, &e.receives, ns)
	if !lasting(e.unheld) {
		err = errors.Join(err, e.unheld)
	}
	return err
}

// The names of fl_identify and fl_deliver at a device.
const identify, deliver = "identify", "deliver"

// holdReceived limits what a tenant receives by a veth, from any source, to its ceil. A foreign
// qdisc with a lower limit stays.
func (f *Traffic) holdReceived(t *tenant, q *queue, ns *netdev.NS) error {
	ceil := t.due.ingress.Ceil
	if ceil == 0 {
		q.forget()
		return f.undo(q.knobs(ns)...) // also those of an earlier agent
	}
	if err := f.watch(ns); err != nil {
		return err
	}
	value, err := qdisc.Root(ns, q.index).Read()
	if err != nil {
		return err
	}
	l, limits := qdisc.Limits(value)
	if q.theirs = limits && l.Rate > 0 && l.Rate <= ceil; q.theirs {
		q.claimed = false
		return nil
	}
	p, err := ceiling(ns, q.index, ceil)
	if err != nil {
		return err
	}
	q.link = p.Link
	return q.bring(f.cfg.Journal, ns, p, t.owner(), f.now())
}

// holdSent limits what a tenant sends by the host ends at, to any destination, to its ceil. Uplinks
// do not see what stays on the host.
func (f *Traffic) holdSent(t *tenant, inode uint64, at []int) error {
	s := t.sends[inode]
	if s == nil {
		s = &egressQueue{of: at[0], path: t.ends[container.Device{NetNS: inode, Index: at[0]}].path}
		t.sends[inode] = s
	}
	ns, err := f.find.Open(s.path, inode)
	if err != nil {
		return err
	}
	defer ns.Close()
	p, err := ceiling(ns, s.of, t.due.egress.Ceil)
	if err != nil {
		return err
	}
	s.link = p.Link
	s.unheld = f.lead(ns, s.of, at, &s.ingress, p, t.owner(), trafficProgFlLead)
	if lasting(s.unheld) {
		return nil
	}
	return s.unheld
}

// stop undoes holdSent in a namespace.
func (f *Traffic) stop(t *tenant, inode uint64) error {
	s := t.sends[inode]
	delete(t.sends, inode)
	err := s.close()
	if s.index == 0 {
		return err
	}
	ns, nerr := f.find.Open(s.path, inode)
	if errors.Is(nerr, netdev.ErrNoNS) {
		return errors.Join(err, f.forget(inode))
	}
	if nerr != nil {
		return errors.Join(err, nerr)
	}
	defer ns.Close()
	return errors.Join(err, f.unlead(ns, s.of, &s.ingress))
}

// forget drops all entries of a namespace that has gone.
func (f *Traffic) forget(inode uint64) error {
	prefix := fmt.Sprintf("%d/", inode)
	err := f.restore(func(e journal.Entry) bool { return strings.HasPrefix(e.Ref.Object, prefix) })
	return errors.Join(err, f.unwatch()) // which would keep it alive
}

// ceiling returns the plan of a device with a single class, limited to a ceil.
func ceiling(ns *netdev.NS, index int, ceil uint64) (model.Plan, error) {
	dev, err := ns.Link(index)
	if err != nil {
		return model.Plan{}, err
	}
	l := linkOf(dev)
	l.Rate = ceil
	return model.Compute(l, nil)
}

// owner owns the changes at a tenant's devices.
func (t *tenant) owner() journal.Owner {
	return journal.Owner{Feature: name, Container: uint64(t.first())}
}

// first returns the container that stands for a tenant: the one with the lowest id.
func (t *tenant) first() container.ID {
	return slices.Min(slices.Collect(maps.Keys(t.members)))
}

// let undoes the changes at a tenant's devices.
func (f *Traffic) let(t *tenant) error {
	var errs []error
	for inode := range t.sends {
		errs = append(errs, f.stop(t, inode))
	}
	for key, e := range t.ends {
		delete(t.ends, key)
		errs = append(errs, f.leave(key, e))
	}
	return errors.Join(append(errs, f.unwatch())...)
}

// leave undoes the changes at one device.
func (f *Traffic) leave(key container.Device, e *end) error {
	if !e.receives.claimed {
		return nil
	}
	ns, err := f.find.Open(e.path, key.NetNS)
	if errors.Is(err, netdev.ErrNoNS) {
		return f.forget(key.NetNS)
	}
	if err != nil {
		return err
	}
	defer ns.Close()
	return f.undo(e.receives.knobs(ns)...)
}

// level returns the depth of a cgroup in the v2 tree; 0 if it is outside.
func (f *Traffic) level(dir string) int {
	rel, err := filepath.Rel(f.v2, dir)
	if f.v2 == "" || err != nil || rel == "." || strings.HasPrefix(rel, "..") {
		return 0
	}
	return strings.Count(rel, "/") + 1
}
