package netcpu

import (
	"errors"
	"fmt"
	"slices"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/feature"
	"github.com/fairlead-project/fairlead/feature/netcpu/account"
	"github.com/fairlead-project/fairlead/policy"
	"github.com/fairlead-project/fairlead/tenant/identity"
)

// claim ranks containers by their need for an account. If there are more containers than accounts,
// the larger claim gets one; among equal claims, the first.
type claim int

const (
	bare     claim = iota // a cgroup that no runtime knows and no policy asks for
	observed              // a container that is only observed
	asked                 // a container that a mode may act on by its account
	acted                 // a container that a mode acts on
)

// claimOf returns the claim of a container with a mode in force. A container with a steal limit below
// account.Seen counts as acted on, because windows could miss what it takes.
func claimOf(t policy.Target) claim {
	c, s := t.Container, t.Settings
	modal := s.NetCPU != policy.NetCPUObserve || !t.Until(modeKey).IsZero()
	switch {
	case s.NetCPU == policy.NetCPUIsolate, s.NetCPU == policy.NetCPUCharge, modal && s.NetCPUSteal != nil && *s.NetCPUSteal < account.Seen:
		return acted
	case modal:
		return asked
	case c.Source == container.CgroupSource:
		return bare
	}
	return observed
}

// accountant keeps the accounts. *account.Meter and noMeter implement it.
type accountant interface {
	Watch(identity.Member) error
	Forget(container.ID) error
	Demand(account.Need) error
	Room() int // the number of accounts
}

// places decides which containers have an account. It is not safe for concurrent use.
type places struct {
	from accountant
	of   map[container.ID]claim
}

// rank orders the modes by strictness. The strictest mode among a tenant's members applies to its
// packets; among equal modes, that of the first member.
func rank(mode policy.NetCPU) int {
	return slices.Index([]policy.NetCPU{policy.NetCPUObserve, policy.NetCPUAuto, policy.NetCPUCharge, policy.NetCPUIsolate}, mode)
}

// observe opens an account for a container in any mode. It also demands complete accounts if a mode
// or a decision acts on them.
func (n *Netcpu) observe(to aim) error {
	if n.cfg.Identity == nil {
		return nil // Meter.Read returns the reason
	}
	n.used.begin(to.Container, n.Since)
	m, err := identity.Of(to.Container)
	m.Rank = max(0, rank(to.Settings.NetCPU))
	if err := errors.Join(err, n.places.watch(m, to.claim), n.places.demand()); err != nil {
		return fmt.Errorf("netcpu observe: %w", err)
	}
	return nil
}

// forget closes the account of a container.
func (n *Netcpu) forget(id container.ID) error {
	if n.cfg.Identity == nil {
		return nil
	}
	delete(n.places.of, id)
	return errors.Join(n.places.from.Forget(id), n.places.demand())
}

// watch gives a container an account. If none is free, it takes one from a container with a smaller
// claim. Bare cgroups get at most a quarter of the accounts, because a local user can create any
// number of them. Errors: feature.ErrPartly for a bare cgroup beyond that; those of Meter.Watch.
func (p *places) watch(m identity.Member, as claim) error {
	from := p.from
	if _, has := p.of[m.ID]; !has && as == bare && p.count(bare) >= from.Room()/4 {
		return fmt.Errorf("%w: no account is kept of its packets, as %d cgroups that no policy asks for have one; possible with: fairlead.netcpu of a policy file with runtime: cgroup", feature.ErrPartly, from.Room()/4)
	}
	err := from.Watch(m)
	for errors.Is(err, account.ErrSlots) {
		loser, ok := p.least(as)
		if !ok {
			return err
		}
		delete(p.of, loser)
		if err := from.Forget(loser); err != nil {
			return err
		}
		err = from.Watch(m)
	}
	p.of[m.ID] = as
	return err
}

// demand passes the purpose of the accounts to the accountant.
func (p *places) demand() error { return p.from.Demand(p.need()) }

func (p *places) need() account.Need {
	switch {
	case p.count(acted) > 0:
		return account.Acted
	case p.count(asked) > 0:
		return account.Watched
	}
	return account.Shown
}

func (p *places) count(of claim) (n int) {
	for _, c := range p.of {
		if c == of {
			n++
		}
	}
	return n
}

// least returns a container with the smallest claim, if that is below the given one.
func (p *places) least(below claim) (least container.ID, ok bool) {
	for id, c := range p.of {
		if c < below {
			least, below, ok = id, c, true
		}
	}
	return least, ok
}
