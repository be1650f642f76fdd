package traffic

import (
	"errors"
	"time"

	"github.com/cilium/ebpf"

	"github.com/fairlead-project/fairlead/kernel/bpf"
)

// Paths returns how packets at uplinks were identified.
func (f *Traffic) Paths() (map[string]uint64, error) {
	return counted(f.programs.Paths, "priority", "socket", "nobody", "forged")
}

// Inpaths returns the same for what uplinks received; nil unless that is shared.
func (f *Traffic) Inpaths() (map[string]uint64, error) {
	m := f.programs.object.Map(trafficMapFlInpaths)
	if m == nil {
		return nil, nil
	}
	return counted(m, "flow", "new", "none")
}

// counted reads a per-CPU array of counters.
func counted(m *ebpf.Map, names ...string) (map[string]uint64, error) {
	out := make(map[string]uint64)
	for i, name := range names {
		var each []uint64
		if err := m.Lookup(uint32(i), &each); err != nil {
			return nil, err
		}
		for _, n := range each {
			out[name] += n
		}
	}
	return out, nil
}

// Quiesce runs do while the feature looks at nothing.
func (f *Traffic) Quiesce(do func()) {
	f.mu.Lock()
	defer f.mu.Unlock()
	do()
}

// SetRate gives an uplink another rate, as its driver may.
func (f *Traffic) SetRate(uplink string, rate uint64) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.cfg.Uplinks[uplink] = rate
}

// Sorter loads fl_sort with its variables, and a seed that is always the same. cost is that of 64 bytes.
func Sorter(cost, burst, pause time.Duration) (p *ebpf.Program, done func() error, err error) {
	o, err := bpf.Open(name, loadTraffic, bpf.Vars{trafficVarFlSeed: uint64(1)}, nil)
	if err != nil {
		return nil, nil, err
	}
	c, err := o.Copy(trafficProgFlSort, bpf.Vars{trafficVarFlCost: uint64(cost), trafficVarFlBurst: uint64(burst), trafficVarFlPause: uint64(pause)})
	if err != nil {
		return nil, nil, errors.Join(err, o.Close())
	}
	return c.Program, func() error { return errors.Join(c.Close(), o.Close()) }, nil
}
