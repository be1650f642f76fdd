package rig

import (
	"errors"
	"fmt"

	"github.com/cilium/ebpf"

	"github.com/fairlead-project/fairlead/hist"
	"github.com/fairlead-project/fairlead/kernel/bpf"
	"github.com/fairlead-project/fairlead/kernel/netdev"
	"github.com/fairlead-project/fairlead/lab/load"
)

// Queue measures how long packets of one length wait at the queue of a device.
type Queue struct {
	object *bpf.Object
	links  bpf.Links
	objs   struct {
		Waited *ebpf.Map      `ebpf:"fl_waited"`
		Lost   *ebpf.Variable `ebpf:"fl_lost"`
	}
}

// Queue begins to measure packets of so many bytes, link header included, that leave by the NIC;
// see WatchQueue.
func (r *Rig) Queue(length int) (*Queue, error) {
	ns, err := netdev.Open(r.Node.NetNS())
	if err != nil {
		return nil, err
	}
	defer ns.Close()
	index, err := ns.Index(NICDevice)
	if err != nil {
		return nil, err
	}
	return WatchQueue(ns, index, length)
}

// WatchQueue begins to measure packets of one length that leave by a device: from the moment the
// kernel has a packet for the root qdisc, whatever its kind, to the moment the driver gets it. All
// packets of the machine pay for it, some ten nanoseconds each. The caller closes it.
func WatchQueue(ns *netdev.NS, index, length int) (_ *Queue, err error) {
	q := new(Queue)
	defer func() {
		if err != nil {
			err = errors.Join(fmt.Errorf("measure the queue of device %d: %w", index, err), q.Close())
		}
	}()
	vars := bpf.Vars{queueVarFlNetns: uint32(ns.Inode()), queueVarFlIfindex: uint32(index), queueVarFlLength: uint32(length)}
	if q.object, err = bpf.Open("queue", loadQueue, vars, nil); err != nil {
		return nil, err
	}
	if err := q.object.Load(&q.objs, nil); err != nil {
		return nil, err
	}
	if q.links, err = q.object.Attach(queueProgFlSent, queueProgFlQueued); err != nil {
		return nil, err
	}
	return q, nil
}

// Waits are the delays of packets since the start, and how many packets were missed.
type Waits struct {
	*hist.Histogram
	Missed uint64
}

// Read reads the delays.
func (q *Queue) Read() (Waits, error) {
	w := Waits{Histogram: load.NewHistogram()}
	err := q.objs.Lost.Get(&w.Missed)
	for i := range w.Counts {
		if err == nil {
			err = q.objs.Waited.Lookup(uint32(i), &w.Counts[i])
		}
	}
	if err != nil {
		return w, fmt.Errorf("read the queue's delays: %w", err)
	}
	return w, nil
}

// Close ends the measurement.
func (q *Queue) Close() error { return errors.Join(q.links.Close(), q.object.Close()) }
