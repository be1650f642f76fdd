package netcpu

import (
	"fmt"
	"sync"
	"time"

	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/feature/netcpu/auto"
)

// bargains are the sums of what the isolations of the mode auto have cost and spared. The zero
// value is empty.
type bargains struct {
	mu sync.Mutex
	by map[container.ID]*sumOfBargain
}

type sumOfBargain struct {
	cost, spared time.Duration // so far
	last         auto.Choice
	at           time.Time
}

// add adds the windows that end now. It forgets containers that are no longer in the mode auto.
func (b *bargains) add(now time.Time, choices []auto.Choice) {
	b.mu.Lock()
	defer b.mu.Unlock()
	by := make(map[container.ID]*sumOfBargain, len(choices))
	for _, c := range choices {
		s := b.by[c.Container]
		if s == nil {
			s = &sumOfBargain{}
		}
		s.cost, s.spared = s.cost+c.Cost, s.spared+c.Spared
		s.last, s.at = c, now
		by[c.Container] = s
	}
	b.by = by
}

// of returns the sums of one container, in seconds.
func (b *bargains) of(id container.ID) (cost, spared float64) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if s := b.by[id]; s != nil {
		return s.cost.Seconds(), s.spared.Seconds()
	}
	return 0, 0
}

// Evidence implements feature.Witness: the present cost of isolation in the mode auto to a
// container, and what it spares others.
func (x *Accounts) Evidence(id container.ID) []api.Evidence {
	x.bargain.mu.Lock()
	defer x.bargain.mu.Unlock()
	s := x.bargain.by[id]
	if s == nil || s.last.Spared == 0 {
		return nil
	}
	return []api.Evidence{{Feature: name, Time: s.at.UTC(), Text: fmt.Sprintf(
		"in a second isolation cost it %v of CPU time and spared others %v", s.last.Cost.Round(time.Millisecond/10), s.last.Spared.Round(time.Millisecond/10))}}
}
