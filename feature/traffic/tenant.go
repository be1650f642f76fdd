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
	"github.com/fairlead-project/fairlead/datapath/ends"
	"github.com/fairlead-project/fairlead/datapath/identity"
	"github.com/fairlead-project/fairlead/feature/traffic/model"
	"github.com/fairlead-project/fairlead/kernel/journal"
	"github.com/fairlead-project/fairlead/kernel/netdev"
	"github.com/fairlead-project/fairlead/kernel/qdisc"
	"github.com/fairlead-project/fairlead/policy"
)

// tenant is one network tenant that is shaped, however many containers it is.
type tenant struct {
	key     identity.Tenant
	slot    identity.Slot
	name    string // of one of its containers
	due     due    // in force: what all members wished when they last agreed
	members map[container.ID]container.Container
	wishes  map[container.ID]due // what policy gives each of them now
	ends    map[ends.Device]*end
	at      ends.Set                   // fl_identify and fl_deliver, at those
	sends   map[uint64]*egressQueue    // by network namespace
	sockets map[container.ID]link.Link // fl_arrive, where the tenant has no device
	looked  time.Time                  // when its devices were, at a word of netlink
	touched bool                       // of which there was one more since
}

// due is what policy gives a tenant in the two directions.
type due struct{ egress, ingress policy.Net }

func (d due) equal(o due) bool { return equal(d.egress, o.egress) && equal(d.ingress, o.ingress) }

// asked says whether policy gives anything.
func asked(n policy.Net) bool { return n != policy.Net{} }

// end is a device by which a tenant's packets pass: the host's end of a veth,
// or a macvlan in the container's own namespace.
type end struct {
	receives queue  // of a veth: what holds the tenant to the ceil of what it receives
	name     string // of the device
	host     bool   // it is the host's end of a veth
	path     string // to the device's namespace
	unheld   error  // why receives holds nothing, until somebody changes the host
}

// egressQueue holds a tenant to the ceil of what it sends, by all veths whose host ends are in
// one namespace: one queue for all of them.
type egressQueue struct {
	ingress
	of     int    // the host end for which the IFB is named: the one with the lowest index
	path   string // to the namespace
	unheld error  // as of an end
}

func newTenant(key identity.Tenant, s identity.Slot) *tenant {
	return &tenant{key: key, slot: s, members: make(map[container.ID]container.Container), wishes: make(map[container.ID]due), ends: make(map[ends.Device]*end), sends: make(map[uint64]*egressQueue), sockets: make(map[container.ID]link.Link)}
}

// other gives the first container of the tenant beside id whose policy gives it
// something else than d.
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

// bare says that no runtime knows any of the tenant's containers.
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

// trust notes whether packets of c come by such a device.
func (f *Traffic) trust(c container.Container) error {
	delete(f.macvlans, c.ID)
	for _, dev := range c.Interfaces {
		if unseen(dev.Kind) {
			f.macvlans[c.ID] = true
		}
	}
	return f.programs.setStrict(len(f.macvlans) > 0)
}

// devices lists the ends of a tenant at which packets can be told to be its.
func (f *Traffic) devices(t *tenant) (map[ends.Device]ends.End, error) {
	want := make(map[ends.Device]ends.End)
	var errs []error
	for _, c := range t.members {
		for _, e := range ends.Of(c, f.cfg.Roots.Proc) {
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

// identify has the packets of a tenant numbered wherever they enter the host,
// has them learnt where they arrive, and holds what they receive to its ceil.
// It may be called again at any time and then only repairs.
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
			break // the caller tells
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

// leads lists, by namespace, the host ends whose packets pass a queue that holds what the
// tenant sends to its ceil, the one with the lowest index first.
func (f *Traffic) leads(t *tenant, want map[ends.Device]ends.End) map[uint64][]int {
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

// learns says whether flows are to be learnt where the tenant receives them.
func (f *Traffic) learns(t *tenant) bool { return f.sharing && asked(t.due.ingress) }

// leave detaches the program of a name from a device, or all, and only those.
func (t *tenant) leave(d ends.Device, name string) error {
	return t.at.Drop(func(at ends.Device, _ bool, n string) bool { return at == d && (name == "" || n == name) })
}

// reach brings one device of a tenant to what it is to have. named says that an IFB bears
// its number, for holdSent.
func (f *Traffic) reach(t *tenant, e *end, dev ends.End, named bool) error {
	at := ends.Place{Device: dev.Device, Path: dev.Path}
	if dev.Host {
		at.Stage, at.Name = ends.Identify, identify
		if err := f.put(&t.at, at, f.programs.copyFor(trafficProgFlIdentify, t.slot)); err != nil {
			return err
		}
	}
	if f.learns(t) {
		// What a veth's host end sends is what the container receives.
		at.Egress, at.Stage, at.Name = dev.Host, ends.Learn, deliver
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
		err = f.unlead(ns, dev.Index, &ingress{}) // what an earlier agent left
	}
	e.unheld = f.holdReceived(t, &e.receives, ns)
	if !lasting(e.unheld) {
		err = errors.Join(err, e.unheld)
	}
	return err
}

// The names of fl_identify and fl_deliver at a device.
const identify, deliver = "identify", "deliver"

// holdReceived keeps what a tenant receives by a veth, from wherever it comes,
// below its ceil. Where somebody's qdisc holds it to less, that one stays.
func (f *Traffic) holdReceived(t *tenant, q *queue, ns *netdev.NS) error {
	ceil := t.due.ingress.Ceil
	if ceil == 0 {
		q.forget()
		return f.undo(q.knobs(ns)...) // also what an earlier agent left
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

// holdSent keeps what a tenant sends by the host ends at, wherever it goes, below its
// ceil. The uplinks alone do not: what stays on the host never comes there.
func (f *Traffic) holdSent(t *tenant, inode uint64, at []int) error {
	s := t.sends[inode]
	if s == nil {
		s = &egressQueue{of: at[0], path: t.ends[ends.Device{NetNS: inode, Index: at[0]}].path}
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

// stop ends what holdSent does in a namespace.
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

// forget drops all that is noted of a namespace that has gone.
func (f *Traffic) forget(inode uint64) error {
	prefix := fmt.Sprintf("%d/", inode)
	err := f.restore(func(e journal.Entry) bool { return strings.HasPrefix(e.Ref.Object, prefix) })
	return errors.Join(err, f.unwatch()) // which would keep it alive
}

// ceiling plans for a device that has one class, which is held to a ceil.
func ceiling(ns *netdev.NS, index int, ceil uint64) (model.Plan, error) {
	dev, err := ns.Link(index)
	if err != nil {
		return model.Plan{}, err
	}
	l := linkOf(dev)
	l.Rate = ceil
	return model.Compute(l, nil)
}

// owner is who has what is changed at a tenant's devices.
func (t *tenant) owner() journal.Owner {
	return journal.Owner{Feature: name, Container: uint64(t.first())}
}

// first is the container that stands for a tenant: the one with the lowest id.
func (t *tenant) first() container.ID {
	return slices.Min(slices.Collect(maps.Keys(t.members)))
}

// let puts back what was changed at a tenant's devices.
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

// leave puts back what was changed at one device.
func (f *Traffic) leave(key ends.Device, e *end) error {
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

// level gives how deep a cgroup lies in the v2 tree; 0 if it does not.
func (f *Traffic) level(dir string) int {
	rel, err := filepath.Rel(f.v2, dir)
	if f.v2 == "" || err != nil || rel == "." || strings.HasPrefix(rel, "..") {
		return 0
	}
	return strings.Count(rel, "/") + 1
}
