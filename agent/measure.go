package agent

import (
	"context"
	"time"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/feature"
	"github.com/fairlead-project/fairlead/kernel/bpf"
	"github.com/fairlead-project/fairlead/metrics"
)

// view is the agent as package metrics sees it.
type view struct{ a *Agent }

func (v view) Snapshots() []feature.Snapshot {
	var out []feature.Snapshot
	for _, w := range v.a.workers {
		out = append(out, w.snapshot())
		if x, ok := w.feature.(feature.Exporter); ok {
			s, _ := readBy(w.fence, "export", x.Export)
			out = append(out, s)
		}
		if f, ok := w.feature.(feature.Mapped); ok {
			maps, _ := readBy(w.fence, "maps", f.Maps)
			out = append(out, pressure(maps))
		}
	}
	out = append(out, spent())
	v.a.viewing.Lock()
	defer v.a.viewing.Unlock()
	return append(out, pressure(v.a.identity.Usage()), slowed(v.a.overview))
}

// costWindow is how long a scrape times the BPF programs.
const costWindow = 100 * time.Millisecond

// spent returns the samples of what the BPF programs take now. There are none where the kernel times
// no programs.
func spent() (s feature.Snapshot) {
	costs, err := bpf.Costs(context.Background(), costWindow)
	if err != nil {
		return s
	}
	for _, c := range costs {
		labels := []feature.Label{{Name: "program", Value: c.Program}}
		s.Samples = append(s.Samples,
			feature.Sample{Name: "bpf_program_cpu_ratio", Labels: labels, Value: c.Time.Seconds() / costWindow.Seconds()},
			feature.Sample{Name: "bpf_program_runs_per_second", Labels: labels, Value: float64(c.Runs) / costWindow.Seconds()})
	}
	s.Help = map[string]string{
		"bpf_program_cpu_ratio":       "CPUs that the program's runs take, timed for 100 ms of this scrape.",
		"bpf_program_runs_per_second": "Runs of the program, counted for 100 ms of this scrape.",
	}
	return s
}

// pressure returns the samples of BPF maps, bpf_map_entries and
// bpf_map_max_entries. The label object distinguishes maps of the same name.
func pressure(maps []bpf.Usage) (s feature.Snapshot) {
	for _, m := range maps {
		labels := []feature.Label{{Name: "object", Value: m.Object}, {Name: "map", Value: m.Map}}
		s.Samples = append(s.Samples,
			feature.Sample{Name: "bpf_map_entries", Labels: labels, Value: float64(m.Entries)},
			feature.Sample{Name: "bpf_map_max_entries", Labels: labels, Value: float64(m.MaxEntries)})
	}
	return s
}

// Panicked implements metrics.View.
func (v view) Panicked(request string, value any) error { return v.a.Panicked(request, value) }

func (v view) Container(id container.ID) (container.Container, bool) {
	v.a.mu.Lock()
	defer v.a.mu.Unlock()
	t, ok := v.a.targets[id]
	return t.Container, ok
}

func (v view) Agent() metrics.Agent {
	a := v.a
	snap, st, changes := a.set.Snapshot(), a.policy.Status(), a.journal.Entries()
	m := metrics.Agent{
		Version: VersionOf(a.cfg.Version).Version, Containers: make(map[string]int), Complete: snap.Complete,
		PolicyOK: st.Err == nil, PolicyLoaded: st.LastSuccess, Changes: len(changes), Panics: make(map[string]uint64),
	}
	for name, f := range a.parts {
		m.Panics[name] = f.count.Load()
	}
	for _, src := range snap.Sources {
		if !src.Pods {
			m.Containers[src.Name] = 0
		}
	}
	for _, c := range snap.Containers {
		m.Containers[c.Source]++
	}
	for _, f := range a.all {
		row := metrics.Feature{Name: f.Name(), Level: a.fence(f).verdict(f).Level, Panics: a.fence(f).count.Load()}
		if w := a.worker(f.Name()); w != nil {
			t := w.totals()
			row.Done, row.Partly, row.Pending, row.Failed = t.Done, t.Partly, t.Pending, t.Failed
			w.mu.Lock()
			row.Calls, row.Failures = w.calls, w.failures
			w.mu.Unlock()
			if what, since := w.hangs(); what != "" {
				row.Hangs = a.pace.now().Sub(since)
			}
		}
		m.Features = append(m.Features, row)
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	m.Problems, m.Rounds, m.RoundTime = len(a.problems), a.rounds.made, a.rounds.took
	if !a.complete {
		return m // a container that is not listed may run
	}
	for _, e := range changes {
		if _, runs := a.targets[container.ID(e.Owner.Container)]; !runs && e.Owner.Container != 0 {
			m.Stale++
		}
	}
	return m
}
