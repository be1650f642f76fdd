package traffic

import (
	"context"
	"errors"
	"fmt"
	"reflect"
	"slices"
	"strings"
	"time"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/feature/traffic/model"
	"github.com/fairlead-project/fairlead/hook"
	"github.com/fairlead-project/fairlead/kernel/journal"
	"github.com/fairlead-project/fairlead/kernel/netdev"
	"github.com/fairlead-project/fairlead/kernel/qdisc"
	"github.com/fairlead-project/fairlead/policy"
	"github.com/fairlead-project/fairlead/tenant"
	"github.com/fairlead-project/fairlead/tenant/identity"
)

// shaped is a tenant with a class, and what enforces its due at its own devices.
type shaped struct {
	*tenant.Tenant
	slot    identity.Slot
	name    string // of one of its containers
	due     due    // in force: what all members last agreed on
	ends    map[container.Device]*end
	at      hook.Set                // fl_identify and fl_deliver, at those
	sends   map[uint64]*egressQueue // by network namespace
	socket  *arrival                // fl_arrive, of a container in the host's network; nil: none
	looked  time.Time               // last look at its devices after a netlink event
	touched bool                    // another event has come since
}

// due is what policy gives a tenant in the two directions.
type due struct{ egress, ingress policy.Net }

// dueOf returns what policy gives a container, and false if that is nothing.
func dueOf(t policy.Target) (due, bool) {
	d := due{t.Settings.Egress, t.Settings.Ingress}
	return d, asked(d.egress) || asked(d.ingress)
}

func (d due) equal(o due) bool { return reflect.DeepEqual(d, o) }

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

func newShaped(t *tenant.Tenant, s identity.Slot) *shaped {
	return &shaped{Tenant: t, slot: s, ends: make(map[container.Device]*end), sends: make(map[uint64]*egressQueue)}
}

// bare reports whether no runtime knows any of the tenant's containers.
func (t *shaped) bare() bool {
	return !slices.ContainsFunc(t.Members(), func(m policy.Target) bool { return m.Container.Source != container.CgroupSource })
}

// owner owns the changes at a tenant's devices.
func (t *shaped) owner() journal.Owner {
	return journal.Owner{Feature: name, Container: uint64(t.Owner())}
}

// members lists the ids of the members. Reports name a tenant by the first, which is the lowest.
func (t *shaped) members() (ids []container.ID) {
	for _, m := range t.Members() {
		ids = append(ids, m.Container.ID)
	}
	slices.Sort(ids)
	return ids
}

// close closes the programs of a tenant. Queues stay.
func (t *shaped) close() error {
	var errs []error
	for inode, s := range t.sends {
		errs = append(errs, s.close())
		delete(t.sends, inode)
	}
	clear(t.ends)
	return errors.Join(append(errs, t.closeSocket(), t.at.Close())...)
}

// devices lists the ends that identify a tenant's packets.
func (t *shaped) devices() (map[container.Device]container.End, error) {
	want := make(map[container.Device]container.End)
	var errs []error
	for _, e := range t.Ends() {
		switch {
		case e.Inside.Kind == "veth" && !e.Host:
			// It goes before its container, and is found a moment after a new one.
			errs = append(errs, fmt.Errorf("%s: look for the host's end of this veth: %w", e.Name, netdev.ErrNoLink))
		case e.Inside.Kind == "veth" || unseen(e.Inside.Kind):
			want[e.Device] = e
		}
	}
	return want, errors.Join(errs...)
}

// identify numbers a tenant's packets wherever they enter the host, learns them where they arrive,
// and limits what the tenant receives. It may be repeated at any time, and then only repairs.
func (f *Traffic) identify(ctx context.Context, t *shaped) error {
	want, err := t.devices()
	leads := f.leads(t, want)
	errs := []error{err, f.programs.setClass(t.slot, t.slot), f.learnAtSockets(t), f.withdraw(t, want, leads)}
	for key, dev := range want {
		if err := ctx.Err(); err != nil {
			// The rest of the devices have no end yet, on which what follows depends.
			return errors.Join(append(errs, err)...)
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
		if err := f.holdSent(t, inode, want[container.Device{NetNS: inode, Index: at[0]}].Path, at); err != nil {
			errs = append(errs, fmt.Errorf("what it sends: %w", err))
		}
	}
	return errors.Join(errs...)
}

// leads lists, by namespace, the host ends that lead to the queue for the tenant's egress ceil, the
// lowest index first.
func (f *Traffic) leads(t *shaped, want map[container.Device]container.End) map[uint64][]int {
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
func (f *Traffic) learns(t *shaped) bool { return f.sharing && asked(t.due.ingress) }

// learnAtSockets begins, or ends, to learn at the sockets of a container in the host's network.
func (f *Traffic) learnAtSockets(t *shaped) error {
	learns := f.learns(t)
	if t.socket != nil && (!learns || t.socket.detached()) {
		if err := t.closeSocket(); err != nil {
			return err
		}
	}
	if !learns || t.socket != nil || t.Key().NetNS != 0 {
		return nil
	}
	dir := t.Members()[0].Container.Cgroup.V2 // of the only one
	if dir == "" {
		return nil
	}
	var err error
	t.socket, err = attachCgroup(dir, f.programs.copyFor(trafficProgFlArrive, t.slot))
	return err
}

func (t *shaped) closeSocket() error {
	l := t.socket
	t.socket = nil
	return l.Close()
}

// unlearn stops learning a tenant's flows from what it receives.
func (f *Traffic) unlearn(t *shaped) error {
	return errors.Join(
		t.at.Drop(func(_ container.Device, _ bool, name string) bool { return name == deliver }),
		t.closeSocket(), f.programs.forgetFlows())
}

// reach configures one device of a tenant. named: an IFB bears its index, for holdSent.
func (f *Traffic) reach(t *shaped, e *end, dev container.End, named bool) error {
	// A veth's host end sends what the container receives.
	for _, p := range []struct {
		wanted, egress bool
		stage          qdisc.Stage
		name, program  string
	}{
		{dev.Host && f.dividing && asked(t.due.egress), false, hook.Identify, identify, trafficProgFlIdentify},
		{f.learns(t), dev.Host, hook.Learn, deliver, trafficProgFlDeliver},
	} {
		at := hook.Place{Device: dev.Device, Path: dev.Path, Owner: journal.Owner{Feature: name}, Egress: p.egress, Stage: p.stage, Name: p.name}
		err := t.at.Drop(func(d container.Device, _ bool, name string) bool {
			return !p.wanted && d == dev.Device && name == p.name
		})
		if p.wanted {
			err = t.at.PutCopy(f.cfg.Ends, at, f.programs.copyFor(p.program, t.slot))
		}
		if err != nil {
			return err
		}
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
// qdisc with a lower limit stays, as that of the CNI plugin bandwidth.
func (f *Traffic) holdReceived(t *shaped, q *queue, ns *netdev.NS) error {
	ceil := t.due.ingress.Ceil
	if ceil == 0 {
		q.forget()
		return f.undo(q.knobs(ns)...) // also those of an earlier agent
	}
	if err := f.watch(ns); err != nil {
		return err
	}
	var err error
	if q.theirs, err = stricter(ns, q.index, ceil); err != nil {
		return err
	}
	if q.theirs != "" {
		q.claimed = false
		return nil
	}
	p, err := ceiling(ns, q.index, ceil)
	if err != nil {
		return err
	}
	q.link = p.Link
	return q.bring(f.cfg.Journal, ns, p, t.owner(), f.cfg.Now())
}

// holdSent limits what a tenant sends by the host ends at, to any destination, to its ceil; path is
// the path of their namespace. Uplinks do not see what stays on the host. A device of others, to
// which the ends redirect all that they receive, with a lower limit holds the ceil in its place, as
// an IFB of the CNI plugin bandwidth.
func (f *Traffic) holdSent(t *shaped, inode uint64, path string, at []int) error {
	s := t.sends[inode]
	if s == nil {
		s = &egressQueue{of: at[0], path: path}
		t.sends[inode] = s
	}
	ns, err := f.find.Open(s.path, inode)
	if err != nil {
		return err
	}
	defer ns.Close()
	s.theirs = ""
	if len(at) == 1 {
		// Ours redirects before any filter, so theirs would see nothing.
		to, err := qdisc.Redirected(ns, at[0])
		if err == nil && to != 0 {
			s.theirs, err = stricter(ns, to, t.due.egress.Ceil)
		}
		if err != nil {
			return err
		}
		if theirs := s.theirs; theirs != "" {
			s.unheld = nil
			err := f.unlead(ns, s.of, &s.ingress)
			s.theirs = theirs
			return err
		}
	}
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

// stricter describes the root qdisc of a device if it is foreign and limits it to no more than ceil,
// in bit/s.
func stricter(ns *netdev.NS, index int, ceil uint64) (string, error) {
	value, err := qdisc.Root(ns, index).Read()
	if err != nil {
		return "", err
	}
	l, limits := qdisc.Limits(value)
	if !limits || l.Rate == 0 || l.Rate > ceil {
		return "", nil
	}
	dev, err := ns.Link(index)
	if err != nil {
		return "", err
	}
	return limitText(l) + " at " + dev.Name, nil
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

// withdraw undoes what is in force at a tenant's devices that are not in keep, and the queues of
// what it sends, except where leads names the same device. With neither it undoes all.
func (f *Traffic) withdraw(t *shaped, keep map[container.Device]container.End, leads map[uint64][]int) error {
	gone := func(d container.Device) bool { _, kept := keep[d]; return !kept }
	errs := []error{t.at.Drop(func(d container.Device, _ bool, _ string) bool { return gone(d) })}
	for d, e := range t.ends {
		if !gone(d) {
			continue
		}
		delete(t.ends, d)
		if e.receives.claimed {
			errs = append(errs, f.inside(e.path, d.NetNS, func(ns *netdev.NS) error { return f.undo(e.receives.knobs(ns)...) }))
		}
	}
	for inode, s := range t.sends {
		if at := leads[inode]; len(at) > 0 && at[0] == s.of {
			continue
		}
		err := s.close()
		if s.index != 0 {
			err = errors.Join(err, f.inside(s.path, inode, func(ns *netdev.NS) error { return f.unlead(ns, s.of, &s.ingress) }))
		}
		if err == nil { // else the next call goes on
			delete(t.sends, inode)
		}
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

// inside calls undo in a namespace. If that has gone, it drops all entries of it.
func (f *Traffic) inside(path string, inode uint64, undo func(*netdev.NS) error) error {
	ns, err := f.find.Open(path, inode)
	if errors.Is(err, netdev.ErrNoNS) {
		prefix := fmt.Sprintf("%d/", inode)
		gone := func(journal.Ref) (journal.Knob, error) { return nil, journal.ErrGone }
		_, err = f.cfg.Journal.Restore(gone, func(e journal.Entry) bool {
			return e.Owner.Feature == name && strings.HasPrefix(e.Ref.Object, prefix)
		})
		return errors.Join(err, f.unwatch()) // which would keep it alive
	}
	if err != nil {
		return err
	}
	defer ns.Close()
	return undo(ns)
}
