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

// claim is a container's need for an account: if there are more containers than accounts, the
// larger claim gets one, and the first among equals.
type claim int

const (
	bare     claim = iota // a cgroup that no runtime knows, and no policy asks for
	observed              // a container that is only observed
	asked                 // a container that a mode may act on, by its account
	acted                 // one that a mode acts on
)

// claimOf returns the claim of a container with a mode in force. Windows may miss what one takes that
// may take less than they look for.
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

// accountant keeps the accounts: an *account.Meter.
type accountant interface {
	Watch(identity.Member) error
	Forget(container.ID) error
	Room() int // the number of accounts
}

// places decides which containers have an account. Its zero value is ready; it is not safe for
// concurrent use.
type places struct {
	of map[container.ID]claim
}

// watch gives a container an account, if necessary from a container with a smaller claim. Bare
// cgroups, which a local user can create without limit, get at most a quarter of them. Errors:
// feature.ErrPartly for a bare cgroup beyond that; those of Meter.Watch.
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

// need returns what the accounts are needed for.
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
