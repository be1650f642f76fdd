package traffic

import (
	"errors"
	"fmt"
	"maps"
	"math"
	"slices"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/feature/traffic/model"
	"github.com/fairlead-project/fairlead/hook"
	"github.com/fairlead-project/fairlead/kernel/journal"
	"github.com/fairlead-project/fairlead/kernel/netdev"
	"github.com/fairlead-project/fairlead/kernel/probe"
	"github.com/fairlead-project/fairlead/kernel/qdisc"
	"github.com/fairlead-project/fairlead/policy"
)

// received is the part of an uplink's rate that receivers share, in percent. The queue must form here
// and not at the other end of the wire, which does not distinguish containers. The rest also covers the
// bytes on the wire beyond the frames (preamble, gap, checksum: 24 bytes each).
const received = 95

// uplink is a device of the host that packets leave and enter by.
type uplink struct {
	out   *hold // for what it sends
	in    *hold // for what it receives, if shared
	ether bool  // its packets have Ethernet headers
}

func (u *uplink) hold(way Direction) *hold {
	if way == Egress {
		return u.out
	}
	return u.in
}

func (u *uplink) close() error { return errors.Join(u.out.set.Close(), u.in.set.Close()) }

// whys describes what is not in force, for comparison.
func (u *uplink) whys() string { return fmt.Sprint(u.out.why, u.in.why, u.in.before) }

// look finds the present uplinks. missing lists the operator's uplinks that do not exist.
func (f *Traffic) look() (missing []string, err error) {
	links, err := f.present()
	if err != nil {
		return nil, err
	}
	var errs []error
	there := make(map[int]bool)
	for _, l := range links {
		rate, _, err := f.rate(l)
		if err != nil {
			errs = append(errs, err)
			continue
		}
		there[l.Index] = true
		u := f.uplinks[l.Index]
		if u == nil {
			of := container.Device{NetNS: f.host.Inode(), Index: l.Index}
			u = &uplink{out: newHold(of, f.cfg.NetNS, "", false), in: newHold(of, f.cfg.NetNS, trafficProgFlInbound, false)}
			u.in.from = []int{l.Index}
			f.uplinks[l.Index] = u
		}
		u.ether = l.Ether
		u.out.link = linkOf(l)
		u.out.link.Rate, u.out.link.Splits = rate, f.splits
		u.in.link = u.out.link
		u.in.link.Rate, u.in.link.Received = rate/100*received, true
	}
	for index, u := range f.uplinks {
		if !there[index] { // it was removed, or is the port of a bond now
			errs = append(errs, f.renew(u.out, nil), f.renew(u.in, nil), u.close())
			delete(f.uplinks, index)
		}
	}
	return f.absent(links), errors.Join(errs...)
}

// absent lists the operator's uplinks that do not exist.
func (f *Traffic) absent(present []netdev.Link) []string {
	return slices.DeleteFunc(slices.Sorted(maps.Keys(f.cfg.Uplinks)), func(name string) bool {
		return slices.ContainsFunc(present, func(l netdev.Link) bool { return l.Name == name })
	})
}

// present lists the current uplinks: those that the operator names, or else those that lead out.
// feature/netcpu has other uplinks, where packets come in: see docs/ARCHITECTURE.md.
func (f *Traffic) present() (list []netdev.Link, err error) {
	all, err := f.cfg.Roots.Monitor.Links(f.host, netdev.MostLinks)
	for _, l := range all {
		if _, named := f.cfg.Uplinks[l.Name]; named || len(f.cfg.Uplinks) == 0 && l.Leaves(all) {
			list = append(list, l)
		}
	}
	return list, err
}

// rate returns the rate of an uplink in bit/s and its source; 0 and "" if it is unknown. The
// operator's value comes before the driver's.
func (f *Traffic) rate(l netdev.Link) (rate uint64, by string, err error) {
	if rate = f.cfg.Uplinks[l.Name]; rate > 0 {
		return rate, "as the operator says", nil
	}
	if rate, err = f.host.Speed(l.Index); rate > 0 || err != nil {
		return rate, "as its driver says", err
	}
	return 0, "", nil
}

// bring puts plans in force, for both directions. A direction without plans is one in which no tenant
// has a due. A failure does not stop the other uplinks. The error is one that a retry may cure; the
// hold records a lasting one, see unkept.
func (f *Traffic) bring(all plans) error {
	errs := []error{f.reorder(all[Egress])}
	if f.needed(Egress) || f.needed(Ingress) {
		errs = append(errs, f.watch(f.host))
	}
	for index, u := range f.uplinks {
		var failed []error
		for _, way := range directions() {
			var plan *model.Plan
			if p, planned := all[way][index]; planned {
				plan = &p
			}
			h := u.hold(way)
			if err := h.keep(f.renew(h, plan)); err != nil {
				failed = append(failed, fmt.Errorf("uplink %s: %w", h.link.Name, err))
			}
		}
		if errors.Is(errors.Join(failed...), journal.ErrGone) { // the device was removed with all its settings
			failed = []error{u.close()}
			delete(f.uplinks, index)
		}
		errs = append(errs, failed...)
	}
	if len(all) == 0 && f.forwards {
		err := f.undo(qdisc.ForwardPriority(f.cfg.Roots.Proc, f.host).Ref())
		f.forwards, errs = err != nil, append(errs, err)
	}
	// No event reports an MTU that was raised before the watch began.
	return errors.Join(append(errs, f.unwatch(), f.widen())...)
}

// renew puts the plan of an uplink's direction in force; nil: none.
func (f *Traffic) renew(h *hold, p *model.Plan) error {
	if p == nil {
		if h.plan == nil && (!h.ifb() || h.index == 0) {
			return nil // Prune undoes the settings of an earlier agent
		}
		return f.take(f.host, h)
	}
	by := journal.Owner{Feature: name}
	if h.ifb() {
		// Without the sysctl, routing would overwrite the packet's tag.
		forward := f.forward()
		if forward != nil && !lasting(forward) {
			return forward
		}
		if err := f.put(f.host, h, *p, by); err != nil {
			return fmt.Errorf("what it receives: %w", err)
		}
		return forward
	}
	if err := f.put(f.host, h, *p, by); err != nil {
		return err
	}
	at := hook.Place{Device: h.of, Path: h.path, Egress: true, Stage: hook.Identify, Name: "normalise", Owner: by}
	// Without the sysctl, forwarded packets carry no priority.
	return errors.Join(f.forward(), h.set.Put(f.cfg.Ends, at, f.programs.Normalise.Clone))
}

// forward stops IPv4 forwarding from changing the priority of packets.
func (f *Traffic) forward() error {
	k := qdisc.ForwardPriority(f.cfg.Roots.Proc, f.host)
	value, err := k.Read()
	if err != nil {
		return err
	}
	if value != "0" && f.forwards && !f.forwarding.again(f.cfg.Now()) {
		return left("net.ipv4.ip_forward_update_priority was set to " + value)
	}
	if err := f.cfg.Journal.Turn(k, "0", journal.Owner{Feature: name}); err != nil {
		return err // and not a change by other software
	}
	f.forwards = true
	return nil
}

// widen looks for uplinks, and raises the frame length at those with a raised MTU, because longer
// frames would be dropped. Apply makes, or refuses, a plan for the new MTU.
func (f *Traffic) widen() error {
	_, err := f.look()
	errs := []error{err}
	for _, u := range f.uplinks {
		errs = append(errs, u.out.widen(f.host, u.out.link.Frame()), u.in.widen(f.host, u.in.link.Frame()))
	}
	return errors.Join(errs...)
}

// giveRate tells an operator how to set the rate of an uplink.
const giveRate = "give its rate with the agent's flag --uplink %s=1gbit"

// Examine implements feature.Examiner: a finding per uplink, with its rate and the source.
func (f *Traffic) Examine() []probe.Finding {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.host == nil {
		return nil
	}
	links, err := f.present()
	if err != nil {
		return []probe.Finding{uplinkFinding("uplinks", probe.Verdict{Level: probe.Unavailable, Why: err.Error()}, "")}
	}
	var list []probe.Finding
	for _, l := range links {
		rate, by, err := f.rate(l)
		switch {
		case err != nil:
			list = append(list, uplinkFinding(l.Name, probe.Verdict{Level: probe.Unavailable, Why: err.Error()}, ""))
		case rate == 0:
			list = append(list, uplinkFinding(l.Name, probe.Verdict{
				Level: probe.Degraded, Why: "its rate is not known, as its driver does not tell: no net.rate and no net.latency can be kept; net.ceil, net.weight and net.priority are",
				Mend: fmt.Sprintf(giveRate, l.Name),
			}, ""))
		default:
			list = append(list, uplinkFinding(l.Name, probe.Verdict{Level: probe.Full}, policy.FormatRate(rate)+", "+by))
		}
	}
	for _, name := range f.absent(links) {
		list = append(list, uplinkFinding(name, probe.Verdict{Level: probe.Unavailable, Why: "there is no device of that name", Mend: "name another by the agent's flag --uplink"}, ""))
	}
	if len(list) == 0 {
		list = append(list, uplinkFinding("uplinks", probe.Verdict{
			Level: probe.Degraded, Why: "no hardware is up: net.ceil and net.ingress.ceil hold at veths, and nothing else can be kept",
			Mend: "name the devices by which packets leave by the agent's flag --uplink",
		}, ""))
	}
	return list
}

func uplinkFinding(device string, v probe.Verdict, detail string) probe.Finding {
	return probe.Finding{Capability: device, Area: "uplink", Verdict: v, Detail: detail}
}

// errNoSharing is returned on kernels where an IFB drops what a BPF program redirects to it, because
// the packet is not marked as redirected (drivers/net/ifb.c, ifb_xmit): 6.1 does so.
var errNoSharing = errors.New("what uplinks receive cannot be shared on this kernel: it needs tcx (6.6 or later)")

// errNoHeader is the error of an uplink that cannot share what it receives.
var errNoHeader = errors.New("its packets have no Ethernet header, as those of WireGuard, tun and PPP, and so no IFB can queue them; possible with: net.ingress.ceil alone, which veths hold")

// directions lists both directions.
func directions() []Direction { return []Direction{Egress, Ingress} }

// prefix returns the prefix of a direction's policy keys.
func (way Direction) prefix() string {
	if way == Egress {
		return "net."
	}
	return "net.ingress."
}

// unheld returns why the plan of a direction is not in force.
func (u *uplink) unheld(way Direction) error {
	if way == Ingress && !u.ether {
		return errNoHeader
	}
	return u.hold(way).why
}

// plans are the plans of the uplinks, by device index, in the directions in which tenants need them.
type plans map[Direction]map[int]model.Plan

// plans divides every uplink among the tenants. It changes nothing.
func (f *Traffic) plans() (all plans, err error) {
	all = make(plans)
	for _, way := range directions() {
		if !f.needed(way) {
			continue
		}
		if all[way], err = f.divide(way); err != nil {
			return nil, err
		}
	}
	if len(all[Ingress]) == 0 { // there is nothing to enforce, see unkept
		delete(all, Ingress)
	} else if f.cfg.Ends.Filters() {
		return nil, errNoSharing
	}
	return all, nil
}

// needed reports whether any tenant needs the uplinks.
func (f *Traffic) needed(way Direction) bool {
	for _, t := range f.shaped {
		if f.needs(t, way) {
			return true
		}
	}
	return false
}

// needs reports whether a tenant's due needs the uplinks. A ceil alone needs them only if packets pass
// no veth that could enforce it.
func (f *Traffic) needs(t *shaped, way Direction) bool {
	n := t.due[way]
	past := func(e container.End) bool { return unseen(e.Inside.Kind) }
	if t.Key().NetNS != 0 && !f.atUplinks(way) && !slices.ContainsFunc(t.Ends(), past) {
		n.Ceil = 0
	}
	return asked(n)
}

// atUplinks reports whether only uplinks can enforce ceils: see errNoSharing.
func (f *Traffic) atUplinks(way Direction) bool { return way == Egress && f.cfg.Ends.Filters() }

// divide plans one direction of the uplinks.
func (f *Traffic) divide(way Direction) (map[int]model.Plan, error) {
	tenants := make([]model.Tenant, 0, len(f.shaped))
	bounds, orders := false, false
	for _, t := range f.shaped {
		if n := t.due[way]; asked(n) {
			byRuntime := slices.ContainsFunc(t.Members(), func(m policy.Target) bool { return m.Container.Source != container.CgroupSource })
			tenants = append(tenants, model.Tenant{Slot: t.slot, Name: t.name, Net: n, Bare: !byRuntime})
			bounds, orders = bounds || n.Latency > 0, orders || n.Priority != nil
		}
	}
	plans := make(map[int]model.Plan, len(f.uplinks))
	for _, index := range slices.Sorted(maps.Keys(f.uplinks)) {
		u := f.uplinks[index]
		l := u.hold(way).link
		// Without a rate, only a ceil can be kept for received packets.
		keeps := func(t model.Tenant) bool { return l.Rate > 0 || t.Ceil > 0 }
		if l.Received && (!u.ether || !slices.ContainsFunc(tenants, keeps)) {
			continue
		}
		// HFSC has deadlines, but no priorities. HTB can keep a latency too, but only by serving it first.
		l.HFSC = f.hfsc && bounds && !orders
		p, err := model.Compute(l, tenants)
		if err != nil {
			return nil, fmt.Errorf("uplink %s%s: %w", l.Name, map[Direction]string{Ingress: ", what it receives"}[way], err)
		}
		plans[index] = p
	}
	return plans, nil
}

const mbit = 1_000_000

// Guarantees implements feature.Guarantor: the rates that every uplink can promise, in Mbit/s. A
// container may send by any uplink, so the slowest counts. If the rate of one is unknown, there is
// nothing to promise.
func (f *Traffic) Guarantees() (map[string]uint64, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.host == nil {
		return nil, nil
	}
	links, err := f.present()
	if err != nil {
		return nil, fmt.Errorf("list uplinks: %w", err)
	}
	slowest := uint64(math.MaxUint64)
	for _, l := range links {
		rate, _, err := f.rate(l)
		if err == nil && rate == 0 {
			err = errors.New("its rate is not known")
		}
		if err != nil {
			return nil, fmt.Errorf("uplink %s: %w", l.Name, err)
		}
		slowest = min(slowest, rate)
	}
	if slowest == math.MaxUint64 {
		return nil, errors.New("no uplink is up")
	}
	return map[string]uint64{
		policy.ResourceEgress:  model.Admitted(slowest) / mbit,
		policy.ResourceIngress: model.Admitted(slowest/100*received) / mbit,
	}, nil
}
