package netcpu

import (
	"cmp"
	"maps"
	"slices"
	"time"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/feature/netcpu/account"
)

// maxPairs limits the series of the matrix on the metrics page.
const maxPairs = 500

// pairs chooses the largest entries of the matrix, which get a series each. An entry keeps its series
// until one of its containers ends. Time once added to the sum of the others stays there. So no
// counter ever falls. The zero value is ready.
type pairs struct {
	shown map[account.Pair]bool
	last  map[account.Pair]time.Duration // all entries of the previous reading
	other time.Duration
}

// ranked returns the entries of the matrix, the largest first.
func ranked(thefts map[account.Pair]time.Duration) []account.Pair {
	entries := slices.DeleteFunc(slices.Collect(maps.Keys(thefts)), func(p account.Pair) bool { return thefts[p] <= 0 || p.Own() })
	slices.SortFunc(entries, func(x, y account.Pair) int {
		return cmp.Or(cmp.Compare(thefts[y], thefts[x]), cmp.Compare(x.Culprit, y.Culprit), cmp.Compare(x.Victim.Container, y.Victim.Container), cmp.Compare(x.Victim.Kind, y.Victim.Kind))
	})
	return entries
}

// split returns the entries that get a series, at most limit, and the growth of all others since the
// first reading.
func (p *pairs) split(thefts map[account.Pair]time.Duration, limit int, runs func(container.ID) bool) (show []account.Pair, other time.Duration) {
	entries := ranked(thefts)
	shown := make(map[account.Pair]bool, limit)
	for _, first := range []bool{true, false} { // entries with a series, then new ones
		for _, k := range entries {
			if len(shown) < limit && p.shown[k] == first && runs(k.Culprit) && runs(k.Victim.Container) {
				shown[k] = true
			}
		}
	}
	for _, k := range entries {
		if shown[k] {
			show = append(show, k)
			continue
		}
		p.other += grown(thefts[k], p.last[k])
	}
	p.shown, p.last = shown, thefts
	return show, p.other
}
