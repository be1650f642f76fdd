package agent

import (
	"cmp"
	"context"
	"errors"
	"log/slog"
	"runtime"
	"slices"
	"sync/atomic"
	"time"

	"github.com/fairlead-project/fairlead/agent/serve"
	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/feature"
	"github.com/fairlead-project/fairlead/kernel/bpf"
	"github.com/fairlead-project/fairlead/metrics"
	"github.com/fairlead-project/fairlead/record"
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

// costWindow is how long a scrape measures the BPF programs.
const costWindow = 100 * time.Millisecond

// spent returns samples of the CPU time of BPF programs now, or none where the kernel does not
// measure it.
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

// Agent implements metrics.View.
func (v view) Agent(send metrics.Send) (rounds uint64, took time.Duration) {
	a := v.a
	snap, st, changes := a.set.Snapshot(), a.policy.Status(), a.journal.Entries()
	send("build_info", "1, with the version as a label.", 1, "version", VersionOf(a.cfg.Version).Version, "goversion", runtime.Version())
	running := make(map[string]int)
	for _, src := range snap.Sources {
		if !src.Pods {
			running[src.Name] = 0
		}
	}
	for _, c := range snap.Containers {
		running[c.Source]++
	}
	for source, n := range running {
		send("agent_containers", "Running containers.", float64(n), "source", source)
	}
	send("agent_complete", "1 if every source of containers has delivered its list.", truth(snap.Complete))
	send("agent_policy_last_reload_success", "1 if the last load of the policy files succeeded.", truth(st.Err == nil))
	if !st.LastSuccess.IsZero() {
		send("agent_policy_loaded_timestamp_seconds", "Time at which the policy in force was loaded.", float64(st.LastSuccess.UnixMilli())/1000)
	}
	send("agent_journal_changes", "Changes of host state in the journal.", float64(len(changes)))
	for part, f := range a.parts {
		send("agent_panics_total", "Panics of the agent's parts beside the features: a source of containers, requests, looks at containers.", float64(f.count.Load()), "part", part)
	}
	for i, f := range a.featureTotals() {
		var calls, failures uint64
		var hangs time.Duration
		if w := a.worker(f.Name); w != nil {
			w.mu.Lock()
			calls, failures = w.calls, w.failures
			w.mu.Unlock()
			if what, since := w.hangs(); what != "" {
				hangs = a.pace.now().Sub(since)
			}
		}
		for _, l := range []api.Level{api.LevelFull, api.LevelDegraded, api.LevelUnavailable} {
			send("feature_support", "1 for the level at which this host supports the feature.", truth(l == f.Support.Level), "feature", f.Name, "level", string(l))
		}
		for state, n := range map[string]int{"done": f.Done, "partly": f.Partly, "pending": f.Pending, "error": f.Failed} {
			send("feature_containers", "Containers by the state of the feature.", float64(n), "feature", f.Name, "state", state)
		}
		send("feature_hangs_seconds", "Time for which a call to the feature has not returned; 0 if none hangs.", hangs.Seconds(), "feature", f.Name)
		send("feature_calls_total", "Calls to the feature's Apply, Remove and Prune.", float64(calls), "feature", f.Name)
		send("feature_panics_total", "Panics in the feature's code, each of which became the error of one call.", float64(a.fence(a.all[i]).count.Load()), "feature", f.Name)
		send("feature_call_failures_total", "Calls to the feature that returned an error.", float64(failures), "feature", f.Name)
	}
	a.mu.Lock()
	problems, rounded := len(a.problems), a.rounds
	stale := 0
	for _, e := range changes {
		// While the list is incomplete, a container missing from it may still run.
		if _, runs := a.targets[container.ID(e.Owner.Container)]; a.complete && !runs && e.Owner.Container != 0 {
			stale++
		}
	}
	a.mu.Unlock()
	send("agent_journal_stale_changes", "Changes of host state in the journal for containers that have ended, which are not undone yet.", float64(stale))
	send("agent_policy_problems", "Policy values of running containers that are invalid.", float64(problems))
	return rounded.made, rounded.took
}

func truth(b bool) float64 {
	if b {
		return 1
	}
	return 0
}

// overviewEvery is the interval between overviews, and the time that each one covers.
const overviewEvery = 5 * time.Second

// Frame returns all reports as of one moment, with the running containers. It omits the report of a
// feature that does not answer or has none.
func (a *Agent) Frame(ctx context.Context) (api.Frame, error) {
	f := api.Frame{Taken: a.pace.now()}
	f.Containers, _ = a.Containers(ctx) // served from memory, so it does not fail
	for _, x := range a.all {
		r, ok := x.(feature.Reporter)
		if !ok {
			continue
		}
		out, _ := readBy(a.fence(x), "report", func() any {
			if out, err := r.Report(context.WithoutCancel(ctx), nil, api.Ask{Feature: x.Name()}); err == nil {
				return out
			}
			return nil
		})
		f.Take(out)
	}
	return f, nil
}

// Overview returns the latest overview of the containers. It has no rows until the agent has run
// for the time of one overview.
func (a *Agent) Overview(context.Context) (api.Overview, error) {
	a.viewing.Lock()
	defer a.viewing.Unlock()
	if a.overview.Rows == nil {
		return api.Overview{Since: a.started, Taken: a.started, Rows: []api.OverviewRow{}}, nil
	}
	return a.overview, nil
}

// watchOverview computes an overview each pace.view, until ctx ends.
func (a *Agent) watchOverview(ctx context.Context) {
	tick := time.NewTicker(a.pace.view)
	defer tick.Stop()
	last, _ := a.Frame(ctx) // a feature that does not answer is left out
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		f, _ := a.Frame(ctx)
		a.recorder.take(f)
		out := f.After(last)
		a.viewing.Lock()
		a.overview = out
		a.viewing.Unlock()
		last = f
	}
}

// maxSlowdowns limits the series of slowed_by_ratio on the metrics page.
const maxSlowdowns = 500

// slowed returns the samples of an overview: the slowdown of every container, and the largest parts
// by cause and culprit.
func slowed(o api.Overview) feature.Snapshot {
	s := feature.Snapshot{Taken: o.Taken, Help: map[string]string{
		"slowed_ratio":    "How much slower the container runs because of its neighbours: 1 minus its speed by its speed without them.",
		"slowed_by_ratio": "The part of slowed_ratio by cause and culprit; the culprit is unknown where it is the host, or nobody saw it.",
	}}
	var by []feature.Sample
	for _, row := range o.Rows {
		s.Samples = append(s.Samples, feature.Sample{Container: container.ID(row.Container), Name: "slowed_ratio", Value: row.Slowed})
		for _, x := range row.By {
			culprit := feature.Label{Name: "culprit", Value: "unknown"}
			if x.Culprit != 0 {
				culprit = feature.Label{Name: "culprit", Container: container.ID(x.Culprit)}
			}
			by = append(by, feature.Sample{
				Container: container.ID(row.Container), Name: "slowed_by_ratio", Value: x.Slowed,
				Labels: []feature.Label{{Name: "cause", Value: x.Cause}, culprit},
			})
		}
	}
	slices.SortStableFunc(by, func(x, y feature.Sample) int { return cmp.Compare(y.Value, x.Value) })
	s.Samples = append(s.Samples, by[:min(len(by), maxSlowdowns)]...)
	return s
}

// RecordConfig says where the agent records its frames. An empty RecordDir means nowhere.
type RecordConfig struct {
	RecordDir  string        // used by the recording alone
	RecordSize int64         // maximum size on disk, in bytes; 0: record.DefaultSize
	RecordAge  time.Duration // how long frames are kept; 0: record.DefaultAge
}

// recorder records the frames that the agent takes for its overview. If the disk hangs, is full or
// cannot be written, frames are lost, and the rest of the agent is not affected.
type recorder struct {
	cfg    record.Config
	writer *record.Writer
	log    *slog.Logger
	frames chan api.Frame // capacity 1
	done   chan struct{}  // closed when run has returned
	fence  *fence
	halted atomic.Pointer[string] // why nothing is written since a panic; nil: writing works
}

// newRecorder returns the recorder of an agent; nil if recording is off.
func newRecorder(cfg Config, fence *fence) (*recorder, error) {
	if cfg.RecordDir == "" {
		return nil, nil
	}
	c := record.Config{Dir: cfg.RecordDir, Size: cfg.RecordSize, Age: cfg.RecordAge}
	for _, group := range []string{api.Group, cfg.ViewGroup} { // the last existing one wins
		if gid, ok := serve.GroupID(group); ok {
			c.Group = gid
		}
	}
	w, err := record.New(c)
	if err != nil {
		return nil, err
	}
	return &recorder{cfg: c, writer: w, log: cfg.Log, frames: make(chan api.Frame, 1), done: make(chan struct{}), fence: fence}, nil
}

// take hands over a frame, which must not change any more. It drops the frame while the previous
// one is still being written.
func (r *recorder) take(f api.Frame) {
	if r == nil {
		return
	}
	select {
	case r.frames <- f:
	default:
	}
}

// run writes frames until ctx ends. After a panic it starts a new file.
func (r *recorder) run(ctx context.Context) {
	defer close(r.done)
	r.fence.keep(ctx, r.write, func(err error) {
		why := err.Error()
		r.halted.Store(&why)
		r.fence.panics.try(place{op: "close"}, r.writer.Close)
	})
}

func (r *recorder) write(ctx context.Context) error {
	told := ""
	for {
		select {
		case <-ctx.Done():
			if err := r.writer.Close(); err != nil {
				r.log.Warn("close recording", "err", err)
			}
			return nil
		case f := <-r.frames:
			err := r.writer.Write(f)
			r.halted.Store(nil)
			switch {
			case err != nil && err.Error() != told:
				told = err.Error()
				r.log.Warn("nothing is recorded; the agent goes on and tries again", "err", err)
			case err == nil && told != "":
				told = ""
				r.log.Info("recording again", "dir", r.cfg.Dir)
			}
		}
	}
}

// await waits until run has returned, unless the disk hangs.
func (r *recorder) await() error {
	if r == nil {
		return nil
	}
	select {
	case <-r.done:
		return nil
	case <-time.After(time.Second):
		return errors.New("stop agent: the disk of the recording does not answer")
	}
}

// status returns the state of the recording; nil if it is off.
func (r *recorder) status() *api.Recording {
	if r == nil {
		return nil
	}
	out := r.writer.Written()
	if why := r.halted.Load(); why != nil {
		out.Error = *why
	}
	return &out
}
