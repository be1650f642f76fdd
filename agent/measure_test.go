package agent

import (
	"testing"
	"time"

	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/feature"
	"github.com/fairlead-project/fairlead/internal/testkit"
)

// TestFrame: a frame has the containers and the report of the feature, and the agent makes an
// overview of two of its own.
func TestFrame(t *testing.T) {
	r := newRig(t, 7)
	r.set.set(true, box(7, ""))
	r.view = 10 * time.Millisecond
	r.start()
	f, err := r.client.Frame(t.Context())
	testkit.Must(t, err)
	if len(f.Containers) != 1 || f.Containers[0].ID != 7 || f.Taken.IsZero() {
		t.Errorf("the frame has %+v of %v, want container 7", f.Containers, f.Taken)
	}
	var o api.Overview
	r.until("there is an overview", func() bool {
		o, err = r.client.Overview(t.Context())
		return err == nil && len(o.Rows) == 1
	})
	if o.Rows[0].Container != 7 || !o.Taken.After(o.Since) {
		t.Errorf("the overview is %+v", o)
	}
}

// TestSlowedSamples: each container has a sample, and each loss one with its culprit, the largest
// first, of bounded number.
func TestSlowedSamples(t *testing.T) {
	o := api.Overview{Taken: time.Unix(9, 0), Rows: []api.OverviewRow{{Container: 1, Slowed: 0.5, By: []api.Slowdown{
		{Cause: api.SlowedByPackets, Slowed: 0.1, Culprit: 2, Name: "b"}, {Cause: api.SlowedByCPU, Slowed: 0.4},
	}}}}
	want := []feature.Sample{
		{Container: 1, Name: "slowed_ratio", Value: 0.5},
		{Container: 1, Name: "slowed_by_ratio", Value: 0.4, Labels: []feature.Label{{Name: "cause", Value: "cpu"}, {Name: "culprit", Value: "unknown"}}},
		{Container: 1, Name: "slowed_by_ratio", Value: 0.1, Labels: []feature.Label{{Name: "cause", Value: "packets"}, {Name: "culprit", Container: 2}}},
	}
	testkit.Same(t, "samples", want, slowed(o).Samples)
	for i := range 2 * maxSlowdowns {
		o.Rows[0].By = append(o.Rows[0].By, api.Slowdown{Cause: api.SlowedByPackets, Culprit: api.ID(3 + i)})
	}
	if got := len(slowed(o).Samples); got != 1+maxSlowdowns {
		t.Errorf("%d samples", got)
	}
}

// BenchmarkOverview is the agent's cost of one overview of 60 containers that all take from one
// another, without the reports' own.
func BenchmarkOverview(b *testing.B) {
	const n = 60
	at := time.Unix(1_800_000_000, 0)
	frame := func(after time.Duration) api.Frame {
		f := api.Frame{Taken: at.Add(after), Reports: api.Reports{NetCPU: &api.NetCPU{Since: at, Taken: at.Add(after)}}}
		s := after.Seconds()
		for i := range n {
			c := container.ID(i + 1)
			f.Containers = append(f.Containers, wireContainer(box(c, "")))
			w := s / 2
			a := api.NetCPUAccount{Container: api.ID(c), Tasks: s / 4, Waited: &w, Own: s / 100, Stolen: s / 8}
			for j := range n {
				if i != j {
					a.StolenBy = append(a.StolenBy, api.NetCPUCulprit{Container: api.ID(j + 1), Seconds: s / 8 / n})
					f.NetCPU.Matrix = append(f.NetCPU.Matrix, api.NetCPUTheft{Kind: api.VictimTask, Victim: api.ID(c), Culprit: api.ID(j + 1), Seconds: s / 8 / n})
				}
			}
			f.NetCPU.Accounts = append(f.NetCPU.Accounts, a)
		}
		return f
	}
	before, after := frame(0), frame(overviewEvery)
	for b.Loop() {
		after.After(before)
	}
}
