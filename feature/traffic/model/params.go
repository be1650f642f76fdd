package model

import (
	"time"

	"github.com/fairlead-project/fairlead/kernel/qdisc"
)

// burstTime limits the rate and the ceil that a class saves up. A timer that fires later costs
// rate; a ceil is exceeded by at most a hundredth in one second.
const burstTime = 10 * time.Millisecond

// turnTime limits the turn of the class with the greatest weight, and so, roughly, the wait of the
// others.
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
		// Each leaf has a real-time curve, or it would starve behind those that have one. feasible
		// has admitted this curve.
		c.HFSC.RealTime, _ = realTime(p.Link, p.Link.largest(ts[i]), promised(ts[i], *c), p.Link.MTU, ts[i].Latency)
		share := max(muldiv(c.Weight, p.PerWeight, unit), minShare)
		c.HFSC.LinkShare = qdisc.Curve{M1: share, M2: share}
		if c.Ceil < rate { // an upper limit on every class would defeat the sharing
			c.HFSC.UpperLimit = qdisc.Curve{M1: c.Ceil, M2: c.Ceil}
		}
	}
}

// burst is the amount that a rate sends in burstTime, at least two frames.
func (p *Plan) burst(rate uint64) uint32 {
	b := muldiv(rate, uint64(burstTime), 8*uint64(time.Second))
	return uint32(min(max(b, 2*uint64(p.Link.MTU)), 1<<31))
}

// quanta returns the quantum of a weight. HTB lets a class send one packet more than its quantum
// per turn. So the least quantum must be as long as the largest packet for the shares of
// super-packets to be right, but the greatest must not hold up the others for too long. If both are
// impossible, turns are short, and shares are right for packets of one frame.
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
