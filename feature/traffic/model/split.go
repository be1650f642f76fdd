package model

import (
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/fairlead-project/fairlead/kernel/qdisc"
)

// tags is the length of two VLAN tags, which a frame may have in excess of a full frame.
const tags = 8

// Frame is the largest packet that splitting leaves, in bytes, link header included.
func (l Link) Frame() int { return min(l.MTU+tags, l.MaxPacket) }

// largest is the largest packet that a tenant may have to wait for. A tenant that has not asked for
// splitting does not benefit when others have, so it does not lose its latency when they stop.
func (l Link) largest(t Tenant) int {
	if t.Split {
		return l.Frame()
	}
	return l.MaxPacket
}

// fit checks whether all latencies can be kept, and plans to split packets into frames where that is
// necessary and allowed. It returns the tenants as assumed: with Split only if it is used.
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

// split marks all classes whose packets a tenant that relies on splitting may have to wait for: all
// classes, except that of a single such tenant.
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

// allow adds to a refusal whether splitting other tenants' packets would keep the latency.
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

// burstTime limits the bandwidth that a class saves up. If a timer fires later than that, the class
// loses rate; a ceil is exceeded by at most 1 % within a second.
const burstTime = 10 * time.Millisecond

// turnTime limits the turn of the class with the greatest weight, and so, roughly, the time that the
// others wait.
const turnTime = 5 * time.Millisecond

// parameters computes the parameters of both shapers.
func (p *Plan) parameters(ts []Tenant) {
	rate := p.Link.Rate
	p.Root = qdisc.HTB{Rate: rate, Ceil: rate, Burst: p.burst(rate), CBurst: p.burst(rate), Quantum: uint32(p.Link.MTU)}
	all := qdisc.Curve{M1: rate, M2: rate}
	p.Top = qdisc.HFSC{LinkShare: all, UpperLimit: all}
	quantum := p.quanta()
	for i := range p.Classes {
		c := &p.Classes[i]
		c.HTB = qdisc.HTB{
			Rate: c.Guaranteed, Ceil: c.Ceil,
			Burst: p.burst(c.Guaranteed), CBurst: p.burst(c.Ceil),
			Quantum: quantum(c.Weight), Prio: uint32(c.Level),
		}
		if ts[i].urgent(p.Link) {
			c.HTB.Burst = uint32(ownBurst(p.Link))
		}
		// Every leaf needs a real-time curve, or it starves behind those that have one. feasible has admitted
		// this curve.
		c.HFSC.RealTime, _ = realTime(p.Link, p.Link.largest(ts[i]), promised(ts[i], *c), p.Link.MTU, ts[i].Latency)
		share := max(muldiv(c.Weight, p.PerWeight, unit), minShare)
		c.HFSC.LinkShare = qdisc.Curve{M1: share, M2: share}
		if c.Ceil < rate { // an upper limit on every class would defeat the sharing
			c.HFSC.UpperLimit = qdisc.Curve{M1: c.Ceil, M2: c.Ceil}
		}
	}
}

// burst returns the bytes that a rate sends in burstTime, at least two frames.
func (p *Plan) burst(rate uint64) uint32 {
	b := muldiv(rate, uint64(burstTime), 8*uint64(time.Second))
	return uint32(min(max(b, 2*uint64(p.Link.MTU)), 1<<31))
}

// quanta returns the quantum of a weight. In each turn HTB lets a class send one packet more than its
// quantum. So the smallest quantum must be as large as the largest packet, or the shares of
// super-packets are wrong. But the largest quantum must not hold up the others for too long. If both
// are impossible, turns are short, and shares are right for packets of one frame.
func (p *Plan) quanta() func(weight uint64) uint32 {
	least, greatest := p.Classes[0].Weight, uint64(0)
	for _, c := range p.Classes {
		least, greatest = min(least, c.Weight), max(greatest, c.Weight)
	}
	packet := uint64(p.Link.MaxPacket)
	if p.Split > 0 {
		packet = uint64(p.Split)
	}
	rate := p.Link.Rate
	if rate == fastest {
		rate = usual
	}
	most := max(muldiv(rate, uint64(turnTime), 8*uint64(time.Second)), packet)
	return func(weight uint64) uint32 {
		q := muldiv(packet, weight, least)
		if muldiv(packet, greatest, least) > most {
			q = muldiv(most, weight, greatest)
		}
		return uint32(min(max(q, uint64(p.Link.MTU)), 1<<30))
	}
}
