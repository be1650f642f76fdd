package charge

import (
	"math"
	"path/filepath"

	"github.com/fairlead-project/fairlead/feature/netcpu/ledger"
	"github.com/fairlead-project/fairlead/kernel/cgroup"
)

// shares computes the fair shares of payers by weight, in one round.
type shares struct {
	ch  *Charger
	sum map[string]uint64 // sum of the weights below a parent, by parent
}

func newShares(ch *Charger) *shares { return &shares{ch, make(map[string]uint64)} }

// of returns the share of a payer that competes with its siblings: its part of the CPUs by the owners'
// weights, and no more than its quota. Sleeping siblings count, too: an estimate that is too low does
// no harm, see ledger.Share.
func (s *shares) of(p *payer) (ledger.Share, error) {
	parent := filepath.Dir(p.dir)
	sum, seen := s.sum[parent]
	if !seen {
		dirs, err := cgroup.Children(parent, math.MaxInt)
		if err != nil {
			return ledger.Share{}, err
		}
		for _, dir := range dirs {
			// A sibling that has gone, or has no known weight, does not keep the others from being
			// charged.
			if w, err := s.weight(dir); err == nil {
				sum += w
			}
		}
		s.sum[parent] = sum
	}
	cpus := s.ch.cpus(p)
	fair := float64(max(1, cpus)) * float64(p.weight) / float64(max(sum, p.weight, 1))
	if p.ledger == nil {
		return ledger.Share{Fair: fair, Contended: true}, nil
	}
	quota := float64(p.limit.Quota) / float64(p.limit.Period)
	return ledger.Share{Fair: min(fair, quota), Contended: true, Quota: quota, CPUs: cpus}, nil
}

func (s *shares) weight(dir string) (uint64, error) {
	if p := s.ch.payers[dir]; p != nil {
		return p.weight, nil
	}
	return cgroup.Weight(dir)
}

// cpus returns the number of CPUs that a payer may use; 0: unknown.
func (ch *Charger) cpus(p *payer) int {
	for _, c := range p.members {
		if c.Cgroup.CPUSet == "" {
			continue
		}
		if list, err := cgroup.CPUs(c.Cgroup.CPUSet); err == nil && len(list) > 0 {
			return len(list)
		}
	}
	return 0
}
