package netcpu

import (
	"errors"
	"fmt"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/feature"
	"github.com/fairlead-project/fairlead/feature/netcpu/account"
	"github.com/fairlead-project/fairlead/policy"
	"github.com/fairlead-project/fairlead/tenant/identity"
)

// claim is how much a container needs an account: where there are more containers than
// accounts, the larger claim has one, and among equals who was first.
type claim int

const (
	bare     claim = iota // a cgroup that no runtime knows, and no policy asks for
	observed              // a container that is only observed
	asked                 // one whose mode needs the account
)

func claimOf(c container.Container, mode policy.NetCPU) claim {
	switch {
	case mode != policy.NetCPUObserve:
		return asked
	case c.Source == container.CgroupSource:
		return bare
	}
	return observed
}

// accountant is what gives the accounts: an *account.Meter.
type accountant interface {
	Watch(identity.Member) error
	Forget(container.ID) error
	Room() int // accounts in all
}

// places says who has an account. Its zero value is ready; it is not safe for concurrent
// use.
type places struct {
	of map[container.ID]claim
}

// watch gives a container an account, if need be that of one with a smaller claim. Bare
// cgroups, which a local user makes as many of as he likes, have a quarter of them at
// most. Errors: feature.ErrPartly for a bare cgroup beyond that; those of Meter.Watch.
func (p *places) watch(from accountant, m identity.Member, as claim) error {
	if p.of == nil {
		p.of = make(map[container.ID]claim)
	}
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

func (p *places) count(of claim) (n int) {
	for _, c := range p.of {
		if c == of {
			n++
		}
	}
	return n
}

// least returns one of those with the smallest claim, if that is below a claim.
func (p *places) least(below claim) (least container.ID, ok bool) {
	for id, c := range p.of {
		if c < below {
			least, below, ok = id, c, true
		}
	}
	return least, ok
}
