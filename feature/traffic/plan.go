package traffic

import (
	"errors"
	"fmt"
	"maps"
	"slices"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/feature/traffic/model"
	"github.com/fairlead-project/fairlead/policy"
)

// errNoSharing is returned on kernels whose IFBs drop what a BPF program redirects to them, as it
// is not marked as redirected (drivers/net/ifb.c, ifb_xmit): 6.1 does so.
var errNoSharing = errors.New("what uplinks receive cannot be shared on this kernel: it needs tcx (6.6 or later)")

// errNoHeader is the error of an uplink that cannot share what it receives.
var errNoHeader = errors.New("its packets have no Ethernet header, as those of WireGuard, tun and PPP, and so no IFB can queue them; possible with: net.ingress.ceil alone, which veths hold")

// direction is egress or ingress, and how they differ.
type direction struct {
	prefix string // of its keys
	what   string // of an uplink, for errors
	due    func(due) policy.Net
	link   func(*uplink) model.Link
	failed func(*uplink) error
}

func sending() direction {
	return direction{"net.", "", func(d due) policy.Net { return d.egress }, func(u *uplink) model.Link { return u.link }, func(u *uplink) error { return u.unsent }}
}

func receiving() direction {
	return direction{"net.ingress.", ", what it receives", func(d due) policy.Net { return d.ingress }, func(u *uplink) model.Link { return u.ingress.link }, func(u *uplink) error {
		if !u.ether {
			return errNoHeader
		}
		return u.unreceived
	}}
}

func (way direction) sent() bool { return way.prefix == sending().prefix }

// plans divides every uplink among the tenants, in both directions. It changes nothing. A nil map
// means that the uplinks need nothing in that direction.
func (f *Traffic) plans() (out, in map[int]model.Plan, err error) {
	sends, shares := false, false
	for _, t := range f.shaped {
		sends = sends || f.needs(t, sending())
		shares = shares || f.needs(t, receiving())
	}
	if sends {
		if out, err = f.divide(sending()); err != nil {
			return nil, nil, err
		}
	}
	if shares {
		if in, err = f.divide(receiving()); err != nil {
			return nil, nil, err
		}
	}
	if len(in) == 0 { // nothing can be enforced there, see unkept
		return out, nil, nil
	}
	if f.cfg.Ends.Filters() {
		return nil, nil, errNoSharing
	}
	return out, in, nil
}

// needed reports whether any tenant needs the uplinks.
func (f *Traffic) needed() bool {
	for _, t := range f.shaped {
		if f.needs(t, sending()) || f.needs(t, receiving()) {
			return true
		}
	}
	return false
}

// needs reports whether a tenant's due needs the uplinks. A ceil alone does not, unless packets pass
// no veth that could hold it.
func (f *Traffic) needs(t *shaped, way direction) bool {
	n := way.due(t.due)
	past := func(e container.End) bool { return unseen(e.Inside.Kind) }
	if t.Key().NetNS != 0 && !f.atUplinks(way) && !slices.ContainsFunc(t.Ends(), past) {
		n.Ceil = 0
	}
	return asked(n)
}

// atUplinks reports whether ceils hold at uplinks only: see errNoSharing.
func (f *Traffic) atUplinks(way direction) bool {
	return way.sent() && f.cfg.Ends.Filters()
}

// divide divides what the uplinks send or receive.
func (f *Traffic) divide(way direction) (map[int]model.Plan, error) {
	tenants := make([]model.Tenant, 0, len(f.shaped))
	bounds, orders := false, false
	for _, t := range f.shaped {
		if n := way.due(t.due); asked(n) {
			tenants = append(tenants, model.Tenant{Slot: t.slot, Name: t.name, Net: n, Bare: t.bare()})
			bounds, orders = bounds || n.Latency > 0, orders || n.Priority != nil
		}
	}
	plans := make(map[int]model.Plan, len(f.uplinks))
	for _, index := range slices.Sorted(maps.Keys(f.uplinks)) {
		u := f.uplinks[index]
		l := way.link(u)
		// Without a rate, only a ceil can be kept of what is received.
		keeps := func(t model.Tenant) bool { return l.Rate > 0 || t.Ceil > 0 }
		if l.Received && (!u.ether || !slices.ContainsFunc(tenants, keeps)) {
			continue
		}
		// HFSC has deadlines, and no priorities; HTB can keep a latency too, at the price of an
		// order.
		l.HFSC = f.hfsc && bounds && !orders
		p, err := model.Compute(l, tenants)
		if err != nil {
			return nil, fmt.Errorf("uplink %s%s: %w", l.Name, way.what, err)
		}
		plans[index] = p
	}
	return plans, nil
}
