package netcpu

import (
	"cmp"
	"slices"
	"time"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/feature/netcpu/account"
)

// maxPairs limits the series of the matrix on the metrics page.
const maxPairs = 500

// pairs chooses the entries of the matrix with a series of their own: the largest. An entry keeps
// its series until one of its containers ends, and what was added to the sum of the others stays
// there, so no counter ever goes back. Its zero value is ready.
type pairs struct {
	shown map[account.Pair]bool
	last  map[account.Pair]time.Duration // all entries of the previous reading
	other time.Duration
}

// split returns the entries with a series of their own, at most limit, and the sum of all others'
// growth since the first reading.
func (p *pairs) split(thefts []account.Theft, limit int, runs func(container.ID) bool) (show []account.Theft, other time.Duration) {
	thefts = slices.DeleteFunc(slices.Clone(thefts), func(t account.Theft) bool { return t.CPU <= 0 || t.Own() })
	slices.SortFunc(thefts, func(x, y account.Theft) int {
		return cmp.Or(cmp.Compare(y.CPU, x.CPU), cmp.Compare(x.Culprit, y.Culprit), cmp.Compare(x.Victim.Container, y.Victim.Container), cmp.Compare(x.Victim.Kind, y.Victim.Kind))
	})
	shown := make(map[account.Pair]bool, limit)
	for _, first := range []bool{true, false} { // entries with a series, then new ones
		for _, t := range thefts {
			k := account.Pair{Victim: t.Victim, Culprit: t.Culprit}
			if len(shown) < limit && p.shown[k] == first && runs(t.Culprit) && runs(t.Victim.Container) {
				shown[k] = true
			}
		}
	}
	last := make(map[account.Pair]time.Duration, len(thefts))
	for _, t := range thefts {
		k := account.Pair{Victim: t.Victim, Culprit: t.Culprit}
		last[k] = t.CPU
		if shown[k] {
			show = append(show, t)
			continue
		}
		p.other += grown(t.CPU, p.last[k])
	}
	p.shown, p.last = shown, last
	return show, p.other
}
