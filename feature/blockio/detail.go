package blockio

import (
	"cmp"
	"slices"
	"time"

	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/kernel/cgroup"
	"github.com/fairlead-project/fairlead/kernel/sched"
)

// detail is what is read only for whoever asks with a time: interrupts for all containers,
// threads for one.
type detail struct {
	soft, hard []sched.Interrupts
	threads    map[int]api.BlockIOThread
}

// maxThreads bounds what is read of a container, which may have as many as it likes.
const maxThreads = 1000

// detailOf reads what can be read.
func (f *BlockIO) detailOf(c *container.Container) (d detail) {
	proc := f.cfg.Roots.Proc
	if c == nil {
		d.soft, _ = sched.Softirqs(proc)
		d.hard, _ = sched.IRQs(proc)
		return d
	}
	d.threads = make(map[int]api.BlockIOThread)
	tids, _ := cgroup.Threads(c.Cgroup.V2, maxThreads)
	for _, tid := range tids {
		if v, i, err := sched.Switches(proc, tid); err == nil {
			d.threads[tid] = api.BlockIOThread{TID: tid, Voluntary: v, Involuntary: i}
		}
	}
	return d
}

// addTo adds what happened from an earlier reading on to a report.
func (d detail) addTo(out *api.BlockIO, before detail, length time.Duration) {
	out.Interrupts = append(rates(before.hard, d.hard, false, length), rates(before.soft, d.soft, true, length)...)
	for tid, t := range d.threads {
		if b, had := before.threads[tid]; had { // of one that has begun since, all counts
			t.Voluntary, t.Involuntary = t.Voluntary-min(b.Voluntary, t.Voluntary), t.Involuntary-min(b.Involuntary, t.Involuntary)
		}
		if t.Voluntary+t.Involuntary > 0 {
			out.Threads = append(out.Threads, t)
		}
	}
	slices.SortFunc(out.Threads, func(x, y api.BlockIOThread) int {
		return cmp.Or(cmp.Compare(y.Voluntary+y.Involuntary, x.Voluntary+x.Involuntary), cmp.Compare(x.TID, y.TID))
	})
}

// rates are those of the sources that have interrupted anybody meanwhile. Where a CPU has
// come or gone, nothing is comparable.
func rates(before, now []sched.Interrupts, soft bool, length time.Duration) (out []api.BlockIOInterrupts) {
	type key struct {
		source string
		number int
	}
	was := keyed(before, func(i sched.Interrupts) key { return key{i.Source, i.Number} })
	for _, n := range now {
		b := was[key{n.Source, n.Number}]
		if len(b.Counts) != len(n.Counts) {
			continue
		}
		wire, any := api.BlockIOInterrupts{Source: n.Source, Soft: soft, Number: max(n.Number, 0), CPUs: make([]float64, len(n.Counts))}, false
		for cpu, count := range n.Counts {
			wire.CPUs[cpu] = float64(count-min(b.Counts[cpu], count)) / length.Seconds()
			any = any || count > b.Counts[cpu]
		}
		if any {
			out = append(out, wire)
		}
	}
	return out
}
