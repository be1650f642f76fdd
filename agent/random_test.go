package agent

import (
	"context"
	"maps"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/policy"
)

// Whatever happens in whatever order, a worker that is left in peace brings the host to what is
// wanted, nothing of containers that have gone is in force, and it then has nothing more to do
// until the next refresh.
func TestWorkerRandom(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		c, f := newClock(), newFake()
		ids := rapid.Uint64Range(1, 6)
		modes := rapid.SampledFrom([]policy.NetCPU{"observe", "isolate", "auto"})
		for _, id := range rapid.SliceOfN(ids, 0, 4).Draw(t, "left by an earlier agent") {
			f.host[container.ID(id)] = "isolate"
		}
		var w *worker
		running := map[container.ID]*policy.Target{}
		complete := false
		tell := func() { w.want(maps.Clone(running), complete) }

		// The feature fails at a given rate, and what is wanted may change in the middle of a call.
		failures := 0
		disturb := func(about container.ID) error {
			if rapid.IntRange(0, 3).Draw(t, "disturb") == 0 {
				id := about
				if rapid.Bool().Draw(t, "another") {
					id = container.ID(ids.Draw(t, "id"))
				}
				if _, runs := running[id]; runs && rapid.Bool().Draw(t, "end") {
					delete(running, id)
				} else if id != 0 {
					running[id] = new(target(id, modes.Draw(t, "mode")))
				}
				tell()
			}
			if failures > 0 {
				failures--
				return errFake
			}
			return nil
		}
		f.apply = func(ctx context.Context, x policy.Target) error {
			err := disturb(x.Container.ID)
			if err == nil {
				err = ctx.Err()
			}
			return err
		}
		f.remove = func(_ context.Context, id container.ID) error { return disturb(id) }
		f.prune = func() error { return disturb(0) }
		left := 0
		w = newWorker(f, c.pace(), quiet(), func() { left++ })

		t.Repeat(map[string]func(*rapid.T){
			"start": func(t *rapid.T) {
				id := container.ID(ids.Draw(t, "id"))
				running[id] = new(target(id, modes.Draw(t, "mode")))
				tell()
			},
			"end": func(t *rapid.T) {
				delete(running, container.ID(ids.Draw(t, "id")))
				tell()
			},
			"list": func(t *rapid.T) {
				complete = rapid.Bool().Draw(t, "complete")
				tell()
			},
			"fail": func(t *rapid.T) { failures += rapid.IntRange(1, 5).Draw(t, "times") },
			"step": func(t *rapid.T) { w.step(context.Background()) },
			"wait": func(t *rapid.T) {
				c.Advance(time.Duration(rapid.Int64Range(0, int64(2*time.Minute)).Draw(t, "for")))
			},
		})
		steps(t, w) // so that no refresh is due when peace begins

		// Peace.
		f.apply, f.remove, f.prune = nil, nil, nil
		complete = true
		tell()
		// What failed is tried again by then; a refresh is not due, which would mend what went
		// wrong.
		steps(t, w)
		c.Advance(w.pace.longest + time.Second)
		steps(t, w)
		f.took()
		want := map[container.ID]policy.NetCPU{}
		for id, x := range running {
			want[id] = x.Settings.NetCPU
			if got := w.status(id); got.State != api.StateDone {
				t.Fatalf("status of %d is %+v", id, got)
			}
		}
		if diff := cmp.Diff(want, f.inForce()); diff != "" {
			t.Fatalf("in force (-want +got):\n%s", diff)
		}
		if len(w.rows) != len(running) {
			t.Fatalf("%d rows for %d containers", len(w.rows), len(running))
		}
		if err := w.stop(context.Background()); err != nil || len(f.inForce()) != 0 {
			t.Fatalf("stop: %v, left in force: %v", err, f.inForce())
		}
	})
}
