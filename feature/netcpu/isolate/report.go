package isolate

import (
	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/feature"
	"github.com/fairlead-project/fairlead/kernel/sched"
)

// Samples appends samples of isolated containers and of the uplinks.
func (is *Isolator) Samples(to []feature.Sample) []feature.Sample {
	for _, s := range is.isolated {
		for _, m := range s.members() {
			to = append(to, feature.Sample{Container: m.Container.ID, Name: "netcpu_isolated", Value: 1})
		}
		to = is.kthreads(to, s.payer.ID, s.threads)
		if s.drops != nil {
			to = append(to, feature.Sample{Container: s.payer.ID, Name: "netcpu_super_packets", Value: float64(s.control.shape)})
		}
	}
	if is.host != nil {
		for _, u := range is.host.devices {
			to = is.kthreads(to, 0, u.threads)
		}
	}
	return to
}

// kthreads appends the CPU time of threads, summed by device. It omits threads that have ended.
func (is *Isolator) kthreads(to []feature.Sample, id container.ID, threads []thread) []feature.Sample {
	sum := make(map[string]float64)
	for _, t := range threads {
		if used, err := sched.UsageOf(is.cfg.Roots.Proc, t.Thread); err == nil {
			sum[t.device] += used.Ran.Seconds()
		}
	}
	for d, sec := range sum {
		to = append(to, feature.Sample{Container: id, Name: "netcpu_kthread_seconds_total", Device: d, Value: sec})
	}
	return to
}
