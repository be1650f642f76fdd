package model

import (
	"errors"
	"fmt"
	"slices"
)

// tags is the length of two VLAN tags, which a frame may have in excess of a full frame.
const tags = 8

// Frame is the largest packet that splitting leaves, in bytes, link header included.
func (l Link) Frame() int { return min(l.MTU+tags, l.MaxPacket) }

// largest is the largest packet that a tenant may have to wait for. A tenant that has not asked for
// splitting does not benefit when others do, and so does not lose its latency when they no longer
// need it.
func (l Link) largest(t Tenant) int {
	if t.Split {
		return l.Frame()
	}
	return l.MaxPacket
}

// fit reports whether all latencies can be kept, and lets packets be split into frames if necessary
// and allowed. It returns the tenants as it assumed them: with Split where it is used.
func (p *Plan) fit(ts []Tenant) ([]Tenant, error) {
	check := inTurn
	if p.Link.HFSC {
		check = feasible
	}
	whole := slices.Clone(ts)
	for i := range whole {
		whole[i].Split = false
	}
	err := check(p.Link, whole, p.Classes)
	if err == nil || !errors.Is(err, ErrInfeasible) || p.Link.Frame() == p.Link.MaxPacket {
		return whole, err
	}
	if p.Link.Splits {
		if err = check(p.Link, ts, p.Classes); err == nil {
			p.split(ts)
			return ts, nil
		}
	}
	return nil, p.allow(err, ts, check)
}

// split splits the packets of all classes that a tenant relying on it may have to wait for: all,
// except the class of a single such tenant.
func (p *Plan) split(ts []Tenant) {
	p.Split = p.Link.Frame()
	relying := 0
	for _, t := range ts {
		if t.Split {
			relying++
		}
	}
	for i, t := range ts {
		if !t.Split || relying > 1 {
			p.Classes[i].Split = p.Split
		}
	}
}

// allow adds to a refusal whether splitting the packets of others would keep the latency.
func (p *Plan) allow(err error, ts []Tenant, check func(Link, []Tenant, []Class) error) error {
	r := new(Refusal)
	i := -1
	if errors.As(err, &r) && r.Key == "latency" {
		i = slices.IndexFunc(ts, func(t Tenant) bool { return t.Slot == r.Slot })
	}
	switch {
	case i < 0:
	case !p.Link.Splits && ts[i].Split:
		r.Reason += "; this kernel cannot split packets of others, as it has no TBF"
	case p.Link.Splits && !ts[i].Split:
		ts = slices.Clone(ts)
		ts[i].Split = true
		if check(p.Link, ts, p.Classes) == nil {
			if r.Mend != "" {
				r.Mend += ", or "
			}
			r.Mend += fmt.Sprintf("latency.split on, as packets of the others are split to at most %d bytes then", p.Link.Frame())
		}
	}
	return err
}
