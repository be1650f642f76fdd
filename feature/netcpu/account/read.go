package account

import (
	"errors"
	"fmt"
	"maps"
	"time"

	"github.com/cilium/ebpf"

	"github.com/fairlead-project/fairlead/container"
)

// runOnCPU is BPF_F_TEST_RUN_ON_CPU.
const runOnCPU = 1

// Read returns the present accounts.
func (m *Meter) Read() (Reading, error) { return m.reading(true) }

// Accounts is Read without Thefts, each of which takes two system calls.
func (m *Meter) Accounts() (Reading, error) { return m.reading(false) }

func (m *Meter) reading(thefts bool) (Reading, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.recalibrate()
	w := m.windows
	if w != nil && w.phase <= bare && !m.closed {
		if err := m.between(time.Now(), m.count()); err != nil {
			return Reading{}, fmt.Errorf("read accounts: %w", err)
		}
	}
	r, err := m.read(thefts, true)
	if err != nil {
		return Reading{}, fmt.Errorf("read accounts: %w", err)
	}
	if w != nil {
		w.addTo(&r)
	}
	return r, nil
}

// read reads the programs' counters. With report, a forgotten account comes a step closer to recycling.
func (m *Meter) read(thefts, report bool) (Reading, error) {
	if err := m.flushAll(); err != nil {
		return Reading{}, err
	}
	r := Reading{Taken: time.Now(), Accounts: make(map[container.ID]Account), ByCPU: make(map[container.ID][]time.Duration)}
	var states []accountCpu
	if err := m.maps.FlCpus.Lookup(uint32(0), &states); err != nil {
		return r, err
	}
	for _, s := range states {
		r.Softirq += time.Duration(s.Softirq)
		r.Thread += time.Duration(s.Thread)
		r.Lost += s.Lost
	}
	ids := make(map[uint16]container.ID)
	for slot, acc := range m.slots {
		if acc == nil && slot != 0 {
			continue
		}
		id := System
		if acc != nil {
			id = acc.member.ID
		}
		var perCPU []accountAccount
		if err := m.maps.FlAccounts.Lookup(uint32(slot), &perCPU); err != nil {
			return r, err
		}
		a, byCPU := sum(perCPU)
		if acc != nil && acc.state == reported && report {
			if err := m.recycle(acc, a); err != nil {
				return r, err
			}
			continue
		}
		if acc != nil && acc.state == forgotten && report {
			acc.state = reported
		}
		ids[uint16(slot)] = id
		r.Accounts[id], r.ByCPU[id] = a, byCPU
	}
	r.Gone = m.gone
	var err error
	if thefts {
		r.Thefts, err = m.thefts(ids, r.Taken)
	}
	return r, err
}

// flushAll makes each CPU add its pending charges. After a window it also ends open runs.
func (m *Meter) flushAll() error {
	cpus, err := ebpf.PossibleCPU()
	if err != nil {
		return err
	}
	for cpu := range cpus {
		// An error means that the CPU is offline. Its counters no longer change.
		m.flush.Run(&ebpf.RunOptions{CPU: uint32(cpu), Flags: runOnCPU})
	}
	return nil
}

// sum adds up one account over all CPUs. It also returns the time of each CPU.
func sum(perCPU []accountAccount) (a Account, byCPU []time.Duration) {
	byCPU = make([]time.Duration, len(perCPU))
	for cpu, c := range perCPU {
		for i := range c.By {
			w := &a.Receive[i%int(Protocols)]
			if i >= int(Protocols) {
				w = &a.Send[i%int(Protocols)]
			}
			w.plus(Work{time.Duration(c.By[i].Ns), c.By[i].Packets, c.By[i].Bytes})
			byCPU[cpu] += time.Duration(c.By[i].Ns)
		}
		a.Own += time.Duration(c.Own)
		a.Took += time.Duration(c.Took)
		a.Robbed += time.Duration(c.Robbed)
	}
	return a, byCPU
}

// recycle frees the slot of a reported account.
func (m *Meter) recycle(acc *account, a Account) error {
	cpus, err := ebpf.PossibleCPU()
	if err != nil {
		return err
	}
	if err := m.maps.FlAccounts.Put(acc.slot, make([]accountAccount, cpus)); err != nil {
		return err
	}
	if err := m.maps.FlCharges.Put(acc.slot, int64(0)); err != nil {
		return err
	}
	var dead []accountTheft
	var key accountTheft
	var ns []uint64
	it := m.maps.FlThefts.Iterate()
	for it.Next(&key, &ns) {
		if uint32(key.Victim) == acc.slot || uint32(key.Culprit) == acc.slot {
			dead = append(dead, key)
		}
	}
	if err := it.Err(); err != nil {
		return err
	}
	for _, k := range dead {
		if err := m.maps.FlThefts.Delete(k); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
			return err
		}
	}
	maps.DeleteFunc(m.idle, func(k accountTheft, _ time.Duration) bool {
		return uint32(k.Victim) == acc.slot || uint32(k.Culprit) == acc.slot
	})
	m.gone += a.CPU()
	if m.windows != nil {
		m.gone += m.windows.forget(acc.member.ID)
	}
	m.slots[acc.slot] = nil
	delete(m.accounts, acc.member.ID)
	return nil
}
