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

// shaped is a tenant with a class, and its queues and programs.
type shaped struct {
	*tenant.Tenant
	slot    identity.Slot
	name    string         // of one of its containers
	due     due            // in force: the last due that all members agreed on
	holds   map[spot]*hold // of its ceils
	at      hook.Set       // fl_identify and fl_deliver, at its devices
	socket  *arrival       // fl_arrive, of a container in the host's network; nil: none
	looked  time.Time      // last look at its devices after a netlink event
	touched bool           // an event has come since then
}

// spot is a host end of a tenant's veth where a ceil may hold: for what the tenant receives on it
// (Ingress), for what it receives on all veths in its namespace (sum), or for what it sends on all of
// these (Egress).
type spot struct {
	container.Device
	way Direction
	sum bool
}

// due is the bandwidth that policy gives a tenant, by direction.
type due map[Direction]policy.Net

// dueOf returns a container's due, and false if policy gives it none.
func dueOf(t policy.Target) (due, bool) {
	d := due{Egress: t.Settings.Egress, Ingress: t.Settings.Ingress}
	return d, asked(d[Egress]) || asked(d[Ingress])
}

// asked reports whether policy gives any bandwidth.
func asked(n policy.Net) bool { return n != policy.Net{} }

// close closes the programs of a tenant. Queues stay.
func (t *shaped) close() error {
	errs := []error{t.closeSocket(), t.at.Close()}
	for _, h := range t.holds {
		errs = append(errs, h.set.Close())
	}
	return errors.Join(errs...)
}

// devices lists the ends where a tenant's packets can be identified.
func (t *shaped) devices() (map[container.Device]container.End, error) {
	want := make(map[container.Device]container.End)
	var errs []error
	for _, e := range t.Ends() {
		switch {
		case e.Inside.Kind == "veth" && !e.Host:
			// The host end goes before its container, and shows up a moment after a new one.
			errs = append(errs, fmt.Errorf("%s: look for the host's end of this veth: %w", e.Name, netdev.ErrNoLink))
		case e.Inside.Kind == "veth" || unseen(e.Inside.Kind):
			want[e.Device] = e
		}
	}
	return want, errors.Join(errs...)
}

// identify marks a tenant's packets wherever they enter the host, learns their flows where they arrive,
// and holds them to the tenant's ceils. A repeated call only repairs.
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
	// First, as two may redirect from one device. An unwanted one may be an earlier agent's.
	errs = append(errs, f.withdraw(t, ceils))
	for _, dev := range want {
		if err := ctx.Err(); err != nil {
			return errors.Join(append(errs, err)...)
		}
		if err := f.reach(t, dev); err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", dev.Name, err))
		}
	}
	for _, sum := range []bool{false, true} { // first the holds of single ends
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

// ceils lists the wanted ceils at a tenant's own devices; 0: none there. All veths with a host end in
// one namespace share one queue for what the tenant sends, named after the end with the lowest index.
// For what it receives, each of these veths has a queue, followed by one for the sum.
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

// hostEnds lists the host ends of veths by namespace, lowest index first.
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

// learns reports whether the programs learn flows from what the tenant receives.
func (f *Traffic) learns(t *shaped) bool { return f.divides[Ingress] && asked(t.due[Ingress]) }

// learnAtSockets starts or stops learning at the sockets of a container in the host's network.
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
	dir := t.Members()[0].Container.Cgroup.V2 // such a tenant has one member
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

// reach attaches the programs that classify a tenant's packets, or learn their flows, at a device.
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
		// HTB takes a priority with our major as a class, without asking a filter. A class that does not
		// exist makes it use the filters.
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

// Names of the programs fl_identify and fl_deliver at a device.
const identify, deliver = "identify", "deliver"

// limit holds all packets on the veths of a hold to a ceil: uplinks do not see traffic that stays on
// the host. A foreign qdisc with a lower limit stays, and enforces the ceil instead.
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

// stricter describes a foreign root qdisc that limits packets of the hold to at most ceil, in bit/s;
// empty: there is none. The qdisc is on the device, or on the one to which the device redirects
// everything it receives, as the CNI plugin bandwidth sets it up.
func (h *hold) stricter(ns *netdev.NS, ceil uint64) (string, error) {
	index := h.of.Index
	if h.ifb() {
		if h.sum || len(h.from) > 1 {
			return "", nil
		}
		// Our program redirects before any filter, so the foreign qdisc would see nothing.
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

// withdraw undoes those of a tenant's holds that have no ceil.
func (f *Traffic) withdraw(t *shaped, ceils map[spot]uint64) error {
	var errs []error
	for at, h := range t.holds {
		if ceils[at] != 0 {
			continue
		}
		if err := f.free(h); err != nil {
			errs = append(errs, err) // the next call continues
		} else {
			delete(t.holds, at)
		}
	}
	return errors.Join(append(errs, f.unwatch())...)
}
