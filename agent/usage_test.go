package agent

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/feature/netcpu"
	"github.com/fairlead-project/fairlead/internal/testkit"
)

// What a container used before the accounts began is not in them, what it has
// used since is, whether it ran by then or not.
func TestUsageSince(t *testing.T) {
	r := newRig(t)
	since := time.Unix(1_800_000_000, 0)
	r.accounts = &netcpu.Accounts{Since: since, Meter: &fakeMeter{now: robbery()}}
	stat := func(dir, text string) {
		t.Helper()
		testkit.Must(t, os.WriteFile(filepath.Join(dir, "cpu.stat"), []byte(text), 0o644))
	}
	old, young, moved := box(1, ""), box(2, ""), box(3, "")
	old.Started, young.Started, moved.Started = since.Add(-time.Hour), since.Add(time.Second), since.Add(-time.Minute)
	for _, c := range []*string{&old.Cgroup.V2, &young.Cgroup.V2, &moved.Cgroup.V2} {
		*c = t.TempDir()
		stat(*c, "usage_usec 3000000\nnr_periods 90\nnr_throttled 40\nthrottled_usec 2000000\n")
	}
	old.Cgroup.CPU, young.Cgroup.CPU, moved.Cgroup.CPU = old.Cgroup.V2, young.Cgroup.V2, moved.Cgroup.V2
	r.set.set(true, old, young, moved)
	r.start()
	if _, err := r.client.NetCPU(t.Context(), ""); err != nil { // from now on it knows them
		t.Fatal(err)
	}

	const later = "usage_usec 3500000\nnr_periods 95\nnr_throttled 41\nthrottled_usec 2250000\n"
	stat(old.Cgroup.V2, later)
	stat(young.Cgroup.V2, later)
	elsewhere := t.TempDir()
	stat(elsewhere, "nr_periods 2\nnr_throttled 1\nthrottled_time 100000000\n")
	moved.Cgroup.CPU = elsewhere
	r.set.set(true, old, young, moved)
	want := map[string]api.NetCPUAccount{
		"box-1": {Tasks: 0.5, Throttled: 0.25, Periods: 1},
		"box-2": {Tasks: 3.5, Throttled: 2.25, Periods: 41},
		"box-3": {Tasks: 0, Throttled: 0.1, Periods: 1},
	}
	r.until("what was used since", func() bool {
		n, err := r.client.NetCPU(t.Context(), "")
		testkit.Must(t, err)
		right := 0
		for _, x := range n.Accounts {
			w, ok := want[x.Name]
			if ok && x.Tasks == w.Tasks && x.Throttled == w.Throttled && x.Periods == w.Periods {
				right++
			}
		}
		return right == len(want)
	})
	samples := make(map[string]float64)
	for _, snap := range (view{r.agent}).Snapshots() {
		for _, x := range snap.Samples {
			samples[fmt.Sprintf("%s %d", x.Name, x.Container)] = x.Value
		}
	}
	for name, value := range map[string]float64{
		"netcpu_tasks_seconds_total 1": 0.5, "netcpu_throttled_seconds_total 1": 0.25,
		"netcpu_tasks_seconds_total 2": 3.5, "netcpu_throttled_seconds_total 2": 2.25,
	} {
		if samples[name] != value {
			t.Errorf("%s is %v on the metrics page, want %v", name, samples[name], value)
		}
	}
}
