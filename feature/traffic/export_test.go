package traffic

import (
	"errors"
	"time"

	"github.com/cilium/ebpf"

	"github.com/fairlead-project/fairlead/kernel/bpf"
)

// Quiesce runs do while the feature's looks are blocked.
func (f *Traffic) Quiesce(do func()) {
	f.mu.Lock()
	defer f.mu.Unlock()
	do()
}

// SetRate changes the rate of an uplink, as its driver may.
func (f *Traffic) SetRate(uplink string, rate uint64) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.cfg.Uplinks[uplink] = rate
}

// Sorter loads fl_sort with its variables, and a constant seed. cost is the cost of 64 bytes.
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
