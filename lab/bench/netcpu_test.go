package bench

import (
	"math"
	"slices"
	"testing"
	"time"

	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/lab/report"
	"github.com/fairlead-project/fairlead/lab/rig"
)

// TestAccuracy measures the accuracy of the accounts and checks that every figure that a bar names
// is there. The bars judge the values.
func TestAccuracy(t *testing.T) {
	testkit.NeedRoot(t)
	e := &experiment{report: &report.Report{Rounds: 1}, settle: 20 * time.Millisecond, take: 300 * time.Millisecond}
	su := accuracy()[slices.IndexFunc(accuracy(), func(su setup) bool { return su.cfg.Path == rig.NIC })]
	su.demands = su.demands[:1]
	must(t, e.measure(t.Context(), e.netcpu(su)))
	name := su.name + " " + su.demands[0].name
	for _, b := range accountBars() {
		if b.Case != name {
			continue
		}
		if c, ok := e.report.Find(name, b.Metric); !ok || len(c.On) != 1 || c.On[0] < 0 || len(c.Off) != 0 {
			t.Errorf("%s: %v, %+v", b.Metric, ok, c)
		}
	}
	clean(t)
}

func TestLoss(t *testing.T) {
	for _, tt := range []struct {
		base    float64
		off, on sample
		want    float64
		ok      bool
	}{
		{1000, sample{work: 900, received: 20000}, sample{work: 890, received: 20100}, 0.01 / 20100, true},
		{1000, sample{work: 900, received: 21000}, sample{work: 890, received: 20000}, 0, false},
		{1000, sample{work: 900, received: 19000}, sample{work: 890, received: 20000}, 0, false},
		{1000, sample{work: 900}, sample{work: 890}, 0, false},
		{0, sample{work: 900, received: 1}, sample{work: 890, received: 1}, 0, false},
	} {
		if got, ok := loss(tt.base, tt.off, tt.on); math.Abs(got-tt.want) > 1e-12 || ok != tt.ok {
			t.Errorf("%+v: %v, %v", tt, got, ok)
		}
	}
}

// The figure is the API's, of the container with the name, and the report has its distance from the
// victim's own count.
func TestSlowedFigures(t *testing.T) {
	at := time.Unix(1_800_000_000, 0)
	before := &api.NetCPU{Since: at, Taken: at, Accounts: []api.NetCPUAccount{{Container: 7, Name: "victim"}}}
	none := 0.0
	after := &api.NetCPU{Since: at, Taken: at.Add(10 * time.Second), Accounts: []api.NetCPUAccount{
		{Container: 7, Name: "victim", Tasks: 10, Waited: &none, Stolen: 4, StolenBy: []api.NetCPUCulprit{{Container: 8, Seconds: 4}}},
	}}
	said := slowedBetween(before, after, "victim")
	if math.Abs(said-0.4) > 1e-9 || !math.IsNaN(slowedBetween(before, after, "another")) {
		t.Errorf("%v", said)
	}
	got := map[string]float64{}
	for _, f := range (undisturbed{work: 1000}).slowedFigures(500, said) {
		got[f.metric] = f.value
	}
	if got[Slowed] != 0.5 || got[SlowedSaid] != said || math.Abs(got[SlowedOff]-0.1) > 1e-9 {
		t.Errorf("%v", got)
	}
	// What slows it in any case is no part of what a case does to it.
	for _, f := range (undisturbed{work: 1000, said: 0.2}).slowedFigures(500, 0.6) {
		got[f.metric] = f.value
	}
	if math.Abs(got[SlowedSaid]-0.5) > 1e-9 || math.Abs(got[SlowedOff]) > 1e-9 {
		t.Errorf("%v", got)
	}
}

// A worklog has the work between any two moments that it covers, as if it were steady between its
// entries.
func TestWorklog(t *testing.T) {
	at := func(s float64) time.Time {
		return time.Unix(1_800_000_000, 0).Add(time.Duration(s * float64(time.Second)))
	}
	l := &worklog{read: func() uint64 { return 0 }}
	for i, done := range []uint64{0, 100, 400} {
		l.add(at(float64(i)), done)
	}
	if got := l.until(at(1.5)) - l.until(at(0.5)); got != 200 {
		t.Errorf("%v done", got)
	}
	if !math.IsNaN(l.until(at(-1))) || !math.IsNaN(l.until(at(3))) || l.until(at(0)) != 0 || l.until(at(2)) != 400 {
		t.Error("beyond its ends, or at them")
	}
}
