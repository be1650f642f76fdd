package account

import (
	"testing"
	"time"

	"github.com/cilium/ebpf"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/internal/testkit"
)

// Pairs of running containers fill the table. Idle pairs give their places to others and keep their
// values in readings; growing pairs stay.
func TestIdlePairs(t *testing.T) {
	testkit.InFull(t)
	m := newMeter(t)
	ids := make(map[uint16]container.ID)
	for slot := range uint16(200) {
		ids[slot+1] = container.ID(slot) + 1000
	}
	put := func(k accountTheft, ns uint64, flags ebpf.MapUpdateFlags) error {
		perCPU := make([]uint64, ebpf.MustPossibleCPU())
		for i := range perCPU {
			perCPU[i] = ns
		}
		return m.maps.FlThefts.Update(k, perCPU, flags)
	}
	sum := func(ns uint64) time.Duration { return time.Duration(ns) * time.Duration(ebpf.MustPossibleCPU()) }
	now := time.Now()
	read := func() map[accountTheft]time.Duration {
		t.Helper()
		m.mu.Lock()
		defer m.mu.Unlock()
		thefts, err := m.thefts(ids, now)
		must(t, err)
		of := make(map[accountTheft]time.Duration)
		for k, d := range thefts {
			of[accountTheft{Victim: uint16(k.Victim.Container - 999), Kind: uint16(k.Victim.Kind), Culprit: uint16(k.Culprit - 999)}] = d
		}
		return of
	}
	var all []accountTheft
	for v := range uint16(200) {
		for c := range uint16(200) {
			k := accountTheft{Victim: v + 1, Culprit: c + 1}
			if put(k, 5, ebpf.UpdateNoExist) == nil {
				all = append(all, k)
			}
		}
	}
	if len(all) == 200*200 {
		t.Fatal("the table is not full")
	}
	before := len(read())
	busy := all[7]
	next := accountTheft{Victim: 200, Kind: 1, Culprit: 200}
	for _, step := range []time.Duration{idleAfter / 2, idleAfter / 2, idleAfter / 2} {
		now = now.Add(step)
		must(t, put(busy, uint64(now.UnixNano()), ebpf.UpdateExist))
		if got := read(); len(got) != before || got[all[0]] != sum(5) || got[busy] != sum(uint64(now.UnixNano())) {
			t.Fatalf("%d pairs, an idle one has %v, and the busy one %v", len(got), got[all[0]], got[busy])
		}
	}
	must(t, put(next, 3, ebpf.UpdateNoExist)) // there is room
	must(t, put(all[0], 2, ebpf.UpdateNoExist))
	if got := read(); got[next] != sum(3) || got[all[0]] != sum(7) || got[all[1]] != sum(5) {
		t.Errorf("a new pair has %v, one that grows again %v, an idle one %v", got[next], got[all[0]], got[all[1]])
	}
}

// The number of idle pairs is bounded: the smallest are forgotten.
func TestIdlePairsAreBounded(t *testing.T) {
	m := &Meter{idle: make(map[accountTheft]time.Duration)}
	for i := range idleMost + 1 {
		m.idle[accountTheft{Victim: uint16(i), Kind: uint16(i >> 16)}] = time.Duration(i)
	}
	m.trim()
	if _, there := m.idle[accountTheft{Kind: 1}]; len(m.idle) != 3*idleMost/4+1 || !there {
		t.Errorf("%d pairs are left, the largest: %v", len(m.idle), there)
	}
}
