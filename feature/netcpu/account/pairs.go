package account

import (
	"cmp"
	"errors"
	"maps"
	"slices"
	"time"

	"github.com/cilium/ebpf"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/feature/netcpu/law"
)

// The number of pairs of victim and culprit is the square of the number of containers, and
// fl_thefts has room for the pairs of some hundred containers. So a pair that has not grown for
// idleAfter leaves it. Meter.idle keeps the values of up to idleMost such pairs.
const (
	idleAfter = law.Long
	idleMost  = 65536
)

// growth is the value of a pair in fl_thefts at a reading, and when it was first seen.
type growth struct {
	cpu   time.Duration
	since time.Time
}

// thefts reads fl_thefts at the time now, and makes room in it. ids has the containers by
// slot.
func (m *Meter) thefts(ids map[uint16]container.ID, now time.Time) (map[Pair]time.Duration, error) {
	thefts := make(map[Pair]time.Duration)
	add := func(k accountTheft, cpu time.Duration) {
		culprit, ok := ids[k.Culprit]
		victim, vok := ids[k.Victim]
		if ok && vok { // else a slot is being recycled
			thefts[Pair{Party{victim, PartyKind(k.Kind)}, culprit}] = cpu
		}
	}
	grown := make(map[accountTheft]growth, len(m.pairs))
	var key accountTheft
	var perCPU []uint64
	it := m.maps.FlThefts.Iterate()
	for it.Next(&key, &perCPU) {
		g := growth{total(perCPU), now}
		if was, seen := m.pairs[key]; seen && was.cpu == g.cpu {
			g = was
		}
		grown[key] = g
	}
	if err := it.Err(); err != nil {
		return nil, err
	}
	m.pairs = grown
	for k, g := range grown {
		if now.Sub(g.since) >= idleAfter {
			if err := m.retire(k, g.cpu); err != nil {
				return nil, err
			}
			delete(grown, k)
			continue
		}
		add(k, m.idle[k]+g.cpu)
	}
	m.trim()
	for k, cpu := range m.idle {
		if _, grows := grown[k]; !grows {
			add(k, cpu)
		}
	}
	return thefts, nil
}

func total(perCPU []uint64) (sum time.Duration) {
	for _, ns := range perCPU {
		sum += time.Duration(ns)
	}
	return sum
}

// retire moves a pair from fl_thefts to Meter.idle.
func (m *Meter) retire(k accountTheft, cpu time.Duration) error {
	var perCPU []uint64
	err := m.maps.FlThefts.LookupAndDelete(k, &perCPU)
	if err == nil {
		cpu = total(perCPU) // the pair may just have grown
	}
	if err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
		return err
	}
	m.idle[k] += cpu
	return nil
}

// trim forgets the smallest quarter of the idle pairs if there are too many.
func (m *Meter) trim() {
	if len(m.idle) <= idleMost {
		return
	}
	keys := slices.SortedFunc(maps.Keys(m.idle), func(a, b accountTheft) int { return cmp.Compare(m.idle[a], m.idle[b]) })
	for _, k := range keys[:idleMost/4] {
		delete(m.idle, k)
	}
}
