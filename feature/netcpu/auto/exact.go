package auto

import (
	"time"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/feature/netcpu/account"
)

// sums are the sums of the accounts over one window, which need no room for each pair of victim and
// culprit. They are nil if every pair had room: the pairs are read a moment later, and the
// difference is no theft.
type sums struct {
	took   map[container.ID]time.Duration // from tasks and from ksoftirqd
	robbed map[container.ID]time.Duration // of its tasks
}

// grown subtracts, as between does.
func grown(a, b account.Reading) sums {
	if b.Lost <= a.Lost {
		return sums{}
	}
	s := sums{took: make(map[container.ID]time.Duration, len(b.Accounts)), robbed: make(map[container.ID]time.Duration, len(b.Accounts))}
	for _, x := range b.Accounts {
		s.took[x.Container], s.robbed[x.Container] = x.Took, x.Robbed
	}
	for _, x := range a.Accounts {
		if x.Took <= s.took[x.Container] && x.Robbed <= s.robbed[x.Container] {
			s.took[x.Container] -= x.Took
			s.robbed[x.Container] -= x.Robbed
		}
	}
	return s
}

// untold adds the thefts without a pair to the evidence about a container: the table of pairs has
// room for some hundred containers. The part of ksoftirqd in them is not known, so all of them
// count like ksoftirqd's.
func (d reading) untold(id container.ID, e *evidence, took map[string]time.Duration) {
	robbed, rest := d.exact.robbed[id], d.exact.took[id]
	for _, t := range d.thefts {
		if t.Culprit == id && (t.Victim.Kind == account.Task || t.Victim.Kind == account.Peer || t.Victim.Kind == account.Ksoftirqd) {
			rest -= t.CPU
		}
		if t.Victim.Container == id && t.Victim.Kind == account.Peer {
			robbed -= t.CPU
		}
	}
	e.lost = max(e.lost, robbed)
	if rest <= 0 {
		return
	}
	lost := time.Duration(float64(rest) * d.wanted)
	e.idle += rest - lost
	took["others, not told apart"] += lost
}
