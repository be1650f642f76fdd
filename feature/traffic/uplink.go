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
	queue            // for what it sends
	program hook.Set // fl_normalise
	ingress ingress  // for what it receives, if shared
	ether   bool     // its packets have Ethernet headers
	// Why the last plan of each direction is not in force.
	unsent, unreceived error
}

func (u *uplink) close() error {
	return errors.Join(u.program.Close(), u.ingress.close())
}

// look finds the present uplinks. missing lists the operator's uplinks that do not exist.
func (f *Traffic) look() (missing []string, err error) {
	links, err := f.present()
	if err != nil {
		return nil, err
	}
	var errs []error
	there := make(map[int]bool)
	named := make(map[string]bool)
	for _, l := range links {
		named[l.Name] = true
		rate, _, err := f.rate(l)
		if err != nil {
			errs = append(errs, err)
			continue
		}
		there[l.Index] = true
		u := f.uplinks[l.Index]
		if u == nil {
			u = &uplink{queue: queue{index: l.Index}}
			f.uplinks[l.Index] = u
		}
		u.link, u.ether = linkOf(l), l.Ether
		u.link.Rate, u.link.Splits = rate, f.splits
		u.ingress.link = u.link
		u.ingress.link.Rate, u.ingress.link.Received = rate/100*received, true
	}
	for index, u := range f.uplinks {
		if !there[index] { // it has gone, or is the port of a bond now
			errs = append(errs, f.send(u, nil), f.receive(u, nil), u.close())
			delete(f.uplinks, index)
		}
	}
	for _, name := range slices.Sorted(maps.Keys(f.cfg.Uplinks)) {
		if !named[name] {
			missing = append(missing, name)
		}
	}
	return missing, errors.Join(errs...)
}

// present lists the devices that are uplinks now: the operator's, if he names any.
func (f *Traffic) present() (list []netdev.Link, err error) {
	all, err := f.cfg.Roots.Monitor.Links(f.host, netdev.MostLinks)
	for _, l := range all {
		if _, named := f.cfg.Uplinks[l.Name]; named || len(f.cfg.Uplinks) == 0 && leaves(l, all) {
			list = append(list, l)
		}
	}
	return list, err
}

// leaves reports whether packets leave the host by a device, rather than by a device above it. The
// uplinks of feature/netcpu, where packets come in, are others: see docs/ARCHITECTURE.md.
func leaves(l netdev.Link, all []netdev.Link) bool {
	if !l.Up || l.Name == "lo" || l.Kind != "device" && l.Kind != "bond" {
		return false
	}
	i := slices.IndexFunc(all, func(m netdev.Link) bool { return m.Index == l.Master })
	return i < 0 || all[i].Kind != "bond" && all[i].Kind != "team"
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

// bring puts plans into force, for what uplinks send and receive; nil plans mean that no tenant is
// due anything in that direction. A failure does not stop the others. The error is one that a retry
// may mend; what lasts longer is recorded in the uplink, see unkept.
func (f *Traffic) bring(out, in map[int]model.Plan) error {
	errs := []error{f.reorder(out)}
	if f.needed() {
		errs = append(errs, f.watch(f.host))
	}
	for index, u := range f.uplinks {
		u.unsent, u.unreceived = f.send(u, out), f.receive(u, in)
		err := errors.Join(u.unsent, u.unreceived)
		if errors.Is(err, journal.ErrGone) { // it has vanished, with all that was set there
			errs = append(errs, u.close())
			delete(f.uplinks, index)
			continue
		}
		for _, err := range []error{u.unsent, u.unreceived} {
			if err != nil && !lasting(err) {
				errs = append(errs, fmt.Errorf("uplink %s: %w", u.link.Name, err))
			}
		}
	}
	if out == nil && in == nil && f.forwards {
		err := f.undo(qdisc.ForwardPriority(f.cfg.Roots.Proc, f.host).Ref())
		f.forwards, errs = err != nil, append(errs, err)
	}
	// No event reports an MTU that was raised before the watch began.
	return errors.Join(append(errs, f.unwatch(), f.widen())...)
}

// send puts the plan of what an uplink sends into force.
func (f *Traffic) send(u *uplink, plans map[int]model.Plan) error {
	if plans == nil {
		if u.plan == nil {
			return nil
		}
		err := errors.Join(u.program.Close(), f.undo(u.knobs(f.host)...))
		if err == nil { // else the next call goes on
			u.forget()
		}
		return err
	}
	if err := u.bring(f.cfg.Journal, f.host, plans[u.index], journal.Owner{Feature: name}, f.cfg.Now()); err != nil {
		if u.lost {
			err = errors.Join(err, u.program.Close())
		}
		return err
	}
	at := hook.Place{
		Device: container.Device{NetNS: f.host.Inode(), Index: u.index}, Path: f.cfg.NetNS,
		Egress: true, Stage: hook.Identify, Name: "normalise", Owner: journal.Owner{Feature: name},
	}
	// Without the sysctl, forwarded packets carry no priority.
	return errors.Join(f.forward(), u.program.Put(f.cfg.Ends, at, f.programs.Normalise.Clone))
}

// receive enforces the plan for what an uplink receives, if there is one.
func (f *Traffic) receive(u *uplink, plans map[int]model.Plan) error {
	by := journal.Owner{Feature: name}
	p, planned := plans[u.index]
	if !planned {
		if u.ingress.index == 0 {
			return nil // Prune undoes what an earlier agent left
		}
		return f.unlead(f.host, u.index, &u.ingress)
	}
	// Without it routing would overwrite the packet's tag.
	forward := f.forward()
	if forward != nil && !lasting(forward) {
		return forward
	}
	if err := f.lead(f.host, u.index, []int{u.index}, &u.ingress, p, by, trafficProgFlInbound); err != nil {
		return fmt.Errorf("what it receives: %w", err)
	}
	return forward
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
		errs = append(errs, u.widen(f.host, u.link.Frame()), u.ingress.widen(f.host, u.link.Frame()))
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
	for _, name := range slices.Sorted(maps.Keys(f.cfg.Uplinks)) {
		if !slices.ContainsFunc(links, func(l netdev.Link) bool { return l.Name == name }) {
			list = append(list, uplinkFinding(name, probe.Verdict{Level: probe.Unavailable, Why: "there is no device of that name", Mend: "name another by the agent's flag --uplink"}, ""))
		}
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
