package latency

import (
	"cmp"
	"slices"
	"time"

	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/container"
)

// work is the time that each CPU has worked for packets, by container and CPU.
type work map[container.ID][]time.Duration

// packetWork returns nil if the packet work is unknown.
func (f *Latency) packetWork() work {
	if f.cfg.Work == nil {
		return nil
	}
	w, err := f.cfg.Work.PacketWork()
	if err != nil {
		return nil
	}
	return w
}

// since returns the work after an earlier reading. A counter that went down has restarted.
func (w work) since(before work) work {
	out := make(work, len(w))
	for id, now := range w {
		now = slices.Clone(now)
		for cpu, was := range before[id] {
			if cpu < len(now) && now[cpu] >= was {
				now[cpu] -= was
			}
		}
		out[id] = now
	}
	return out
}

// meanwhile returns the packet work, by container, of the CPUs that handled a tenant's packets. It
// leaves out CPUs that did less than a hundredth of the tenant's own work. It returns nil if the
// work is unknown.
func (w work) meanwhile(members []container.ID, over time.Duration, name func(container.ID) string) *api.LatencyMeanwhile {
	i := slices.IndexFunc(members, func(id container.ID) bool { return len(w[id]) > 0 })
	if i < 0 || over <= 0 {
		return nil
	}
	own, all := w[members[i]], time.Duration(0)
	for _, d := range own {
		all += d
	}
	out := &api.LatencyMeanwhile{CPUs: []int{}, By: []api.LatencyNeighbour{}}
	for cpu, d := range own {
		if d > 0 && d >= all/100 {
			out.CPUs = append(out.CPUs, cpu)
		}
	}
	if len(out.CPUs) == 0 {
		return nil
	}
	share := func(of []time.Duration) float64 {
		var sum time.Duration
		for _, cpu := range out.CPUs {
			if cpu < len(of) {
				sum += of[cpu]
			}
		}
		return sum.Seconds() / (over.Seconds() * float64(len(out.CPUs)))
	}
	out.Own = share(own)
	for id, of := range w {
		if s := share(of); s > 0 && !slices.Contains(members, id) {
			out.By = append(out.By, api.LatencyNeighbour{Container: api.ID(id), Name: name(id), Share: s})
		}
	}
	slices.SortFunc(out.By, func(a, b api.LatencyNeighbour) int {
		return cmp.Or(cmp.Compare(b.Share, a.Share), cmp.Compare(a.Container, b.Container))
	})
	return out
}
