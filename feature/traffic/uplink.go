package traffic

import (
	"errors"
	"fmt"
	"slices"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"

	"github.com/fairlead-project/fairlead/feature/traffic/model"
	"github.com/fairlead-project/fairlead/kernel/journal"
	"github.com/fairlead-project/fairlead/kernel/netdev"
	"github.com/fairlead-project/fairlead/kernel/qdisc"
)

const (
	linkHeader = 14    // bytes that a frame has beside what counts for the MTU
	maxGSO     = 65536 // GSO_LEGACY_MAX_SIZE: what a device takes unless told otherwise
)

// uplink is a device of the host by which packets leave.
type uplink struct {
	link    model.Link
	index   int
	claimed bool      // its root qdisc is ours
	lost    bool      // it was, until someone replaced it
	program link.Link // fl_normalise
}

func (u *uplink) close() error {
	if u.program == nil {
		return nil
	}
	err := u.program.Close()
	u.program = nil
	return err
}

// look finds the uplinks that there are now. The error is of those that could
// not be taken: their rate is not known, or there is none of that name.
func (f *Traffic) look() error {
	links, err := f.host.Links()
	if err != nil {
		return err
	}
	var errs []error
	there := make(map[int]bool)
	named := make(map[string]bool)
	for _, l := range links {
		rate, isNamed := f.cfg.Uplinks[l.Name]
		named[l.Name] = isNamed
		if !isNamed && (len(f.cfg.Uplinks) > 0 || !isUplink(l, links)) {
			continue
		}
		if rate == 0 {
			if rate, err = f.host.Speed(l.Index); err != nil {
				errs = append(errs, err)
				continue
			}
		}
		if rate == 0 {
			errs = append(errs, fmt.Errorf("rate of uplink %s is not known: its driver does not tell (say it with the agent's flag --uplink %s=1gbit)", l.Name, l.Name))
			continue
		}
		there[l.Index] = true
		u := f.uplinks[l.Index]
		if u == nil {
			u = &uplink{index: l.Index}
			f.uplinks[l.Index] = u
		}
		mtu := l.MTU + linkHeader
		u.link = model.Link{Name: l.Name, Rate: rate, MTU: mtu, MaxPacket: max(maxGSO, mtu)}
	}
	for index, u := range f.uplinks {
		if !there[index] {
			errs = append(errs, u.close())
			delete(f.uplinks, index)
		}
	}
	for name := range f.cfg.Uplinks {
		if !named[name] {
			errs = append(errs, fmt.Errorf("there is no uplink %s", name))
		}
	}
	return errors.Join(errs...)
}

// isUplink says whether packets leave the host by a device, and are not sent on
// by a device above it that is one.
func isUplink(l netdev.Link, all []netdev.Link) bool {
	if !l.Up || l.Name == "lo" || l.Kind != "device" && l.Kind != "bond" {
		return false
	}
	i := slices.IndexFunc(all, func(m netdev.Link) bool { return m.Index == l.Master })
	return i < 0 || all[i].Kind != "bond" && all[i].Kind != "team"
}

// bring puts plans into force. It goes on with the others after a failure.
func (f *Traffic) bring(plans map[int]model.Plan) error {
	var errs []error
	for index, p := range plans {
		u := f.uplinks[index]
		err := f.bringUplink(u, p)
		switch {
		case errors.Is(err, journal.ErrGone): // it has vanished: nothing is lost but what it was for
			errs = append(errs, u.close())
			delete(f.uplinks, index)
		case err != nil:
			errs = append(errs, fmt.Errorf("uplink %s: %w", u.link.Name, err))
		}
	}
	return errors.Join(errs...)
}

var errLost = errors.New("someone has replaced the root qdisc, which is left alone: nothing is guaranteed there until all containers' policy is removed and set again")

func (f *Traffic) bringUplink(u *uplink, p model.Plan) error {
	if u.lost {
		return errLost
	}
	if err := f.claim(u); err != nil {
		return err
	}
	d, err := qdisc.Open(f.host, u.index)
	if err != nil {
		return err
	}
	defer d.Close()
	classes := make([]qdisc.Class, 0, len(p.Classes)+1)
	classes = append(classes, qdisc.Class{Minor: qdisc.MinorTop, HTB: qdisc.HTB(p.Root)})
	for _, c := range p.Classes {
		minor := uint16(c.Slot)
		if minor == 0 {
			minor = qdisc.MinorDefault
		}
		classes = append(classes, qdisc.Class{Minor: minor, HTB: qdisc.HTB(c.HTB)})
	}
	_, err = d.Bring(qdisc.KindHTB, classes)
	if errors.Is(err, qdisc.ErrNotOurs) {
		u.lost = true
		return errors.Join(errLost, u.close())
	}
	return err
}

// claim makes the root qdisc of an uplink ours.
func (f *Traffic) claim(u *uplink) error {
	if u.claimed {
		return nil
	}
	by := journal.Owner{Feature: name}
	turn := func(k journal.Knob, value string) error { return f.cfg.Journal.Turn(k, value, by) }
	length := qdisc.QueueLen(f.host, u.index)
	if n, err := length.Read(); err != nil {
		return err
	} else if n == "0" {
		if err := turn(length, qdisc.DefaultQueueLen); err != nil {
			return err
		}
	}
	// Without it the priority of what is routed would say nothing.
	if err := turn(qdisc.ForwardPriority(f.host), "0"); err != nil {
		return err
	}
	if err := turn(qdisc.Root(f.host, u.index), qdisc.Ours(qdisc.KindHTB)); err != nil {
		return err
	}
	l, err := attach(f.host, u.index, f.programs.normalise, ebpf.AttachTCXEgress)
	if err != nil {
		return err
	}
	u.program, u.claimed = l, true
	return nil
}

// release gives the uplinks back, as nobody is shaped any more.
func (f *Traffic) release() error {
	var errs []error
	for _, u := range f.uplinks {
		errs = append(errs, u.close())
	}
	clear(f.uplinks)
	return errors.Join(append(errs, f.restore())...)
}
