package traffic

import (
	"errors"
	"fmt"
	"maps"
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

// received is the part of an uplink's rate that receivers share, in percent. The queue has to build
// up here and not at the other end of the wire, which does not distinguish containers. The rest
// also covers what counts there beside the frames (preamble, gap, checksum: 24 bytes each).
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

// whys sums up what is not in force.
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
		if !there[index] { // it has gone, or is the port of a bond now
			errs = append(errs, f.renew(u.out, nil), f.renew(u.in, nil), u.close())
			delete(f.uplinks, index)
		}
	}
	return f.absent(links), errors.Join(errs...)
}

// absent lists the operator's uplinks that are not among the present ones.
func (f *Traffic) absent(present []netdev.Link) []string {
	return slices.DeleteFunc(slices.Sorted(maps.Keys(f.cfg.Uplinks)), func(name string) bool {
		return slices.ContainsFunc(present, func(l netdev.Link) bool { return l.Name == name })
	})
}

// present lists the devices that are uplinks now: the operator's, if he names any. The uplinks of
// feature/netcpu, where packets come in, are others: see docs/ARCHITECTURE.md.
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

// bring puts plans into force, for what uplinks send and receive; none for a direction means that
// no tenant is due anything there. A failure does not stop the others. The error is one that a
// retry may mend; what lasts longer is recorded in the hold, see unkept.
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
		if errors.Is(errors.Join(failed...), journal.ErrGone) { // it has vanished, with all that was set there
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

// renew puts the plan of what an uplink sends or receives in force; nil: none.
func (f *Traffic) renew(h *hold, p *model.Plan) error {
	if p == nil {
		if h.plan == nil && (!h.ifb() || h.index == 0) {
			return nil // Prune undoes what an earlier agent left
		}
		return f.take(f.host, h)
	}
	by := journal.Owner{Feature: name}
	if h.ifb() {
		// Without it routing would overwrite the packet's tag.
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
		return err // and no change by others
	}
	f.forwards = true
	return nil
}

// widen looks for uplinks, and raises the frame length at those with a raised MTU, because longer
// frames would be dropped. It does no more: Apply makes, or refuses, a plan for the new MTU.
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
