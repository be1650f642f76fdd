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
	"github.com/fairlead-project/fairlead/kernel/qdisc"
)

// received is the part of an uplink's rate that receivers share, in percent. The queue has to build
// up here and not at the other end of the wire, which does not distinguish containers. The rest
// also covers what counts there beside the frames (preamble, gap, checksum: 24 bytes each).
const received = 95

const (
	linkHeader = 14    // bytes of a frame beyond the MTU
	maxGSO     = 65536 // GSO_LEGACY_MAX_SIZE: the default of a device
)

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
	links, err := f.listing.Links()
	if err != nil {
		return nil, err
	}
	var errs []error
	there := make(map[int]bool)
	named := make(map[string]bool)
	for _, l := range links {
		if !f.isUplink(l, links) {
			continue
		}
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
		if !there[index] {
			errs = append(errs, u.close())
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

// linkOf describes a device, except for its rate.
func linkOf(l netdev.Link) model.Link {
	mtu := l.MTU + linkHeader
	return model.Link{Name: l.Name, MTU: mtu, MaxPacket: max(maxGSO, mtu)}
}

// isUplink reports whether a device is an uplink: one of the operator's, if there are any.
func (f *Traffic) isUplink(l netdev.Link, all []netdev.Link) bool {
	if len(f.cfg.Uplinks) > 0 {
		_, named := f.cfg.Uplinks[l.Name]
		return named
	}
	return leaves(l, all)
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

// bring puts plans into force, for what uplinks send and receive; nil plans mean that no tenant is
// due anything in that direction. A failure does not stop the others. The error is one that a retry
// may mend; what lasts longer is recorded in the uplink, see unkept.
func (f *Traffic) bring(out, in map[int]model.Plan) error {
	errs := []error{f.reorder(out)}
	if out != nil || in != nil {
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
	// No event reports an MTU that was raised before the watch began.
	return errors.Join(append(errs, f.unwatch(), f.widen())...)
}

// send puts the plan of what an uplink sends into force.
func (f *Traffic) send(u *uplink, plans map[int]model.Plan) error {
	if plans == nil {
		if u.plan == nil {
			return nil
		}
		err := u.program.Close()
		u.forget()
		return errors.Join(err, f.undo(u.knobs(f.host)...))
	}
	if err := u.bring(f.cfg.Journal, f.host, plans[u.index], journal.Owner{Feature: name}, f.now()); err != nil {
		if u.lost {
			err = errors.Join(err, u.program.Close())
		}
		return err
	}
	at := hook.Place{
		Device: container.Device{NetNS: f.host.Inode(), Index: u.index}, Path: f.cfg.NetNS,
		Egress: true, Stage: hook.Identify, Name: "normalise",
	}
	// Without the sysctl, forwarded packets carry no priority.
	return errors.Join(f.forward(), f.put(&u.program, at, f.programs.Normalise.Clone))
}

// forward stops IPv4 forwarding from changing the priority of packets.
func (f *Traffic) forward() error {
	k := qdisc.ForwardPriority(f.host)
	value, err := k.Read()
	if err != nil {
		return err
	}
	if value != "0" && f.forwards && !f.forwarding.again(f.now()) {
		return left("net.ipv4.ip_forward_update_priority was set to " + value)
	}
	f.forwards = true
	return f.cfg.Journal.Turn(k, "0", journal.Owner{Feature: name})
}

// release undoes everything, as no tenant is left.
func (f *Traffic) release() error {
	var errs []error
	for _, u := range f.uplinks {
		errs = append(errs, u.close())
	}
	clear(f.uplinks)
	f.sharing, f.forwards = false, false
	errs = append(errs, f.unwatch())
	return errors.Join(append(errs, f.restore(all))...)
}

// all matches every entry of the journal that is ours.
func all(journal.Entry) bool { return true }
