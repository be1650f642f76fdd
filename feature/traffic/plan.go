package traffic

import (
	"errors"
	"fmt"
	"maps"
	"slices"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/feature/traffic/model"
)

// errNoSharing is returned on kernels whose IFBs drop what a BPF program redirects to them, as it
// is not marked as redirected (drivers/net/ifb.c, ifb_xmit): 6.1 does so.
var errNoSharing = errors.New("what uplinks receive cannot be shared on this kernel: it needs tcx (6.6 or later)")

// errNoHeader is the error of an uplink that cannot share what it receives.
var errNoHeader = errors.New("its packets have no Ethernet header, as those of WireGuard, tun and PPP, and so no IFB can queue them; possible with: net.ingress.ceil alone, which veths hold")

// directions lists both.
func directions() []Direction { return []Direction{Egress, Ingress} }

// prefix begins the keys of a direction.
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

// plans are those of the uplinks, by index, in the directions in which tenants need them.
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
	if len(all[Ingress]) == 0 { // nothing can be enforced there, see unkept
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

// needs reports whether a tenant's due needs the uplinks. A ceil alone does not, unless packets pass
// no veth that could hold it.
func (f *Traffic) needs(t *shaped, way Direction) bool {
	n := t.due[way]
	past := func(e container.End) bool { return unseen(e.Inside.Kind) }
	if t.Key().NetNS != 0 && !f.atUplinks(way) && !slices.ContainsFunc(t.Ends(), past) {
		n.Ceil = 0
	}
	return asked(n)
}

// atUplinks reports whether ceils hold at uplinks only: see errNoSharing.
func (f *Traffic) atUplinks(way Direction) bool { return way == Egress && f.cfg.Ends.Filters() }

// divide divides what the uplinks send or receive.
func (f *Traffic) divide(way Direction) (map[int]model.Plan, error) {
	tenants := make([]model.Tenant, 0, len(f.shaped))
	bounds, orders := false, false
	for _, t := range f.shaped {
		if n := t.due[way]; asked(n) {
			tenants = append(tenants, model.Tenant{Slot: t.slot, Name: t.name, Net: n, Bare: t.bare()})
			bounds, orders = bounds || n.Latency > 0, orders || n.Priority != nil
		}
	}
	plans := make(map[int]model.Plan, len(f.uplinks))
	for _, index := range slices.Sorted(maps.Keys(f.uplinks)) {
		u := f.uplinks[index]
		l := u.hold(way).link
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
			return nil, fmt.Errorf("uplink %s%s: %w", l.Name, map[Direction]string{Ingress: ", what it receives"}[way], err)
		}
		plans[index] = p
	}
	return plans, nil
}
