package traffic

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/fairlead-project/fairlead/container"
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
	name    string         // of one of its containers
	due     due            // in force: what all members last agreed on
	holds   map[spot]*hold // of its ceils
	at      hook.Set       // fl_identify and fl_deliver, at its devices
	socket  *arrival       // fl_arrive, of a container in the host's network; nil: none
	looked  time.Time      // last look at its devices after a netlink event
	touched bool           // another event has come since
}

// spot is a host end of a tenant's veth where a ceil may hold: what the tenant receives by it
// (Ingress) or by it and the others in its namespace (sum), or what it sends by all of these
// (Egress).
type spot struct {
	container.Device
	way Direction
	sum bool
}

// due is what policy gives a tenant in the two directions.
type due map[Direction]policy.Net

// dueOf returns what policy gives a container, and false if that is nothing.
func dueOf(t policy.Target) (due, bool) {
	d := due{Egress: t.Settings.Egress, Ingress: t.Settings.Ingress}
	return d, asked(d[Egress]) || asked(d[Ingress])
}

// asked reports whether policy gives anything.
func asked(n policy.Net) bool { return n != policy.Net{} }

// close closes the programs of a tenant. Queues stay.
func (t *shaped) close() error {
	errs := []error{t.closeSocket(), t.at.Close()}
	for _, h := range t.holds {
		errs = append(errs, h.set.Close())
	}
	return errors.Join(errs...)
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
// and holds them to its ceils. It may be repeated at any time, and then only repairs.
func (f *Traffic) identify(ctx context.Context, t *shaped) error {
	want, err := t.devices()
	ends := hostEnds(want)
	ceils := f.ceils(t, ends)
	errs := []error{err, f.programs.setClass(t.slot, t.slot), f.learnAtSockets(t), t.at.Drop(func(d container.Device, _ bool, _ string) bool {
		_, kept := want[d]
		return !kept
	})}
	for at := range ceils {
		if t.holds[at] == nil {
			t.holds[at] = newHold(at.Device, want[at.Device].Path, map[Direction]string{Egress: trafficProgFlLead}[at.way], at.sum)
		}
		h := t.holds[at]
		if h.link.Name = want[at.Device].Name; at.sum {
			h.led = slices.Compact(slices.Sorted(slices.Values(append(h.led, ends[at.NetNS]...))))
		}
	}
	// First, as two may redirect from one device. What is not wanted may be of an earlier agent.
	errs = append(errs, f.withdraw(t, ceils))
	for _, dev := range want {
		if err := ctx.Err(); err != nil {
			return errors.Join(append(errs, err)...)
		}
		if err := f.reach(t, dev); err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", dev.Name, err))
		}
	}
	for _, sum := range []bool{false, true} { // of ends that are held
		for at, ceil := range ceils {
			if ceil == 0 || at.sum != sum {
				continue
			}
			h, what := t.holds[at], want[at.Device].Name
			if h.ifb() {
				what = map[Direction]string{Egress: "what it sends", Ingress: "what it receives"}[at.way]
				h.from = slices.DeleteFunc(slices.Clone(ends[at.NetNS]), func(index int) bool {
					return sum && !t.holds[spot{container.Device{NetNS: at.NetNS, Index: index}, Ingress, false}].live()
				})
			}
			if err := h.keep(f.limit(t, h, ceil)); err != nil {
				errs = append(errs, fmt.Errorf("%s: %w", what, err))
			}
		}
	}
	return errors.Join(errs...)
}

// ceils lists the ceils that are wanted at a tenant's own devices; 0: none there. What it sends has
// one queue for all veths with a host end in one namespace, which the one with the lowest index
// names, and what it receives has one behind those of these veths.
func (f *Traffic) ceils(t *shaped, ends map[uint64][]int) map[spot]uint64 {
	ceils := make(map[spot]uint64)
	for netns, list := range ends {
		for i, index := range list {
			d := container.Device{NetNS: netns, Index: index}
			in, sum, out := spot{d, Ingress, false}, spot{d, Ingress, true}, spot{d, Egress, false}
			ceils[in], ceils[sum], ceils[out] = t.due[Ingress].Ceil, 0, 0
			if i == 0 && len(list) > 1 {
				ceils[sum] = t.due[Ingress].Ceil
			}
			if i == 0 && !f.cfg.Ends.Filters() { // errNoSharing
				ceils[out] = t.due[Egress].Ceil
			}
		}
	}
	return ceils
}

// hostEnds lists the host ends of veths by namespace, the lowest index first.
func hostEnds(want map[container.Device]container.End) map[uint64][]int {
	ends := make(map[uint64][]int)
	for d, e := range want {
		if e.Host {
			ends[d.NetNS] = append(ends[d.NetNS], d.Index)
		}
	}
	for _, list := range ends {
		slices.Sort(list)
	}
	return ends
}

// learns reports whether to learn flows where the tenant receives them.
func (f *Traffic) learns(t *shaped) bool { return f.divides[Ingress] && asked(t.due[Ingress]) }

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
	t.socket, err = attachCgroup(dir, f.programs.copyFor(trafficProgFlArrive, trafficVarFlSlot, uint32(t.slot)))
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

// reach attaches the programs that give a tenant's packets a class, or learn it, at one of its devices.
func (f *Traffic) reach(t *shaped, dev container.End) error {
	// A veth's host end sends what the container receives.
	for _, p := range []struct {
		wanted, egress bool
		stage          qdisc.Stage
		name, program  string
		slot           uint32
	}{
		{dev.Host && f.divides[Egress] && asked(t.due[Egress]), false, hook.Identify, identify, trafficProgFlIdentify, uint32(t.slot)},
		{f.learns(t), dev.Host, hook.Learn, deliver, trafficProgFlDeliver, uint32(t.slot)},
		// HTB takes a priority of our major for a class, and asks no filter. What has a class that
		// is not there goes by the filters.
		{!f.learns(t) && dev.Host && t.due[Ingress].Ceil > 0, true, hook.Learn, "classless", trafficProgFlIdentify, qdisc.MinorSparse - 1},
	} {
		at := hook.Place{Device: dev.Device, Path: dev.Path, Owner: journal.Owner{Feature: name}, Egress: p.egress, Stage: p.stage, Name: p.name}
		err := t.at.Drop(func(d container.Device, _ bool, name string) bool {
			return !p.wanted && d == dev.Device && name == p.name
		})
		if p.wanted {
			err = t.at.PutCopy(f.cfg.Ends, at, f.programs.copyFor(p.program, trafficVarFlSlot, p.slot))
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// The names of fl_identify and fl_deliver at a device.
const identify, deliver = "identify", "deliver"

// limit holds what passes the veths of a hold, from or to anywhere, to a ceil: uplinks do not see
// what stays on the host. A qdisc of others with a lower limit stays, and holds in its place.
func (f *Traffic) limit(t *shaped, h *hold, ceil uint64) error {
	ns, err := f.find.Open(h.path, h.of.NetNS)
	if err != nil {
		return err
	}
	defer ns.Close()
	if err := f.watch(ns); err != nil {
		return err
	}
	theirs, err := h.stricter(ns, ceil)
	if err != nil {
		return err
	}
	if theirs != "" {
		err = f.take(ns, h)
		h.theirs = theirs
		return err
	}
	p, err := ceiling(ns, h.of.Index, ceil)
	if err != nil {
		return err
	}
	h.theirs, h.link = "", p.Link
	if err := f.put(ns, h, p, journal.Owner{Feature: name, Container: uint64(t.Owner())}); err != nil {
		return err
	}
	return f.sort(ns, h)
}

// stricter describes the foreign root qdisc that limits what passes the hold to no more than ceil,
// in bit/s; empty: there is none. It is that of the device, or of the one to which the device
// redirects all that it receives, as the CNI plugin bandwidth has it.
func (h *hold) stricter(ns *netdev.NS, ceil uint64) (string, error) {
	index := h.of.Index
	if h.ifb() {
		if h.sum || len(h.from) > 1 {
			return "", nil
		}
		// Ours redirects before any filter, so theirs would see nothing.
		var err error
		if index, err = qdisc.Redirected(ns, index); err != nil || index == 0 {
			return "", err
		}
	}
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

// withdraw undoes a tenant's holds except those with a ceil.
func (f *Traffic) withdraw(t *shaped, ceils map[spot]uint64) error {
	var errs []error
	for at, h := range t.holds {
		if ceils[at] != 0 {
			continue
		}
		if err := f.free(h); err != nil {
			errs = append(errs, err) // the next call goes on
		} else {
			delete(t.holds, at)
		}
	}
	return errors.Join(append(errs, f.unwatch())...)
}
