package traffic

import (
	"maps"
	"time"

	"github.com/fairlead-project/fairlead/feature/traffic/model"
	"github.com/fairlead-project/fairlead/kernel/bpf"
	"github.com/fairlead-project/fairlead/kernel/netdev"
	"github.com/fairlead-project/fairlead/kernel/qdisc"
)

// ceiling returns the plan of a device that is limited to a ceil. Sparse flows have a class that is
// served first. Each class is guaranteed half of the ceil, so that neither starves.
func ceiling(ns *netdev.NS, index int, ceil uint64) (model.Plan, error) {
	dev, err := ns.Link(index)
	if err != nil {
		return model.Plan{}, err
	}
	l := linkOf(dev)
	l.Rate = ceil
	p, err := model.Compute(l, nil)
	if err != nil {
		return model.Plan{}, err
	}
	p.Classes[0].HTB.Rate = ceil / 2
	sparse := p.Classes[0]
	sparse.Slot, p.Classes[0].HTB.Prio = qdisc.MinorSparse, 1
	p.Classes = append(p.Classes, sparse)
	return p, nil
}

// fl_sort counts a flow as sparse if it takes little of the ceil.
const (
	sparsePart   = 16 // each such flow at most a sixteenth of the ceil
	sparseFrames = 2  // at once: a request, or a query and its retransmission
	costUnit     = 64 // bytes, COST_UNIT
	// A bulk flow is sparse again after a pause in which bulkPackets of the largest size could be sent, at
	// most longestPause. A queue rarely holds more: the kernel lets a local TCP socket queue two (TSQ).
	bulkPackets  = 16
	longestPause = 10 * time.Second
)

// sparse returns the variables of fl_sort for a ceil.
func sparse(l model.Link) bpf.Vars {
	took := func(bytes int, part uint64) uint64 { return uint64(bytes) * 8 * uint64(time.Second) * part / l.Rate }
	return bpf.Vars{
		trafficVarFlCost: took(costUnit, sparsePart), trafficVarFlBurst: took(sparseFrames*l.MTU, sparsePart),
		trafficVarFlPause: min(took(bulkPackets*l.MaxPacket, 1), uint64(longestPause)),
	}
}

// sort lets fl_sort choose the class of each packet in the queue of a ceil.
func (f *Traffic) sort(ns *netdev.NS, h *hold) (err error) {
	vars := sparse(h.link)
	switch {
	case h.sorter == nil:
		h.sorter, err = f.programs.object.Copy(trafficProgFlSort, vars)
	case !maps.Equal(h.sorts, vars): // flows start anew
		err = h.sorter.Set(vars)
	}
	if err != nil {
		return err
	}
	h.sorts = vars
	return qdisc.Sort(ns, h.index, h.sorter.Program)
}

// unsort closes fl_sort. Its queue is gone, or keeps the program.
func (h *hold) unsort() error {
	c := h.sorter
	h.sorter = nil
	if c == nil {
		return nil
	}
	return c.Close()
}

// together adds the counters of a ceil's two classes. They borrow from each other, so it omits that.
func together(bulk, sparse qdisc.Stats) qdisc.Stats {
	return qdisc.Stats{
		Bytes: bulk.Bytes + sparse.Bytes, Packets: bulk.Packets + sparse.Packets, Drops: bulk.Drops + sparse.Drops,
		Backlog: bulk.Backlog + sparse.Backlog, Queued: bulk.Queued + sparse.Queued, Overlimits: bulk.Overlimits + sparse.Overlimits,
	}
}
