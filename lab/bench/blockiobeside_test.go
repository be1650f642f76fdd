package bench

import (
	"strings"
	"testing"
	"time"

	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/lab/rig"
)

func TestTransactions(t *testing.T) {
	start := time.Unix(1_800_000_000, 0)
	at := func(seconds float64) time.Time { return start.Add(time.Duration(seconds * float64(time.Second))) }
	log := "0 1 1500 0 1800000000 0\n" +
		"1 1 9000 0 1800000000 250000\n" +
		"0 2 2000 0 1800000001 500000\n" +
		"1 2 3000 0 1800000001 750000 0 0\n" // with the columns of other options
	all, err := parseTransactions(strings.NewReader(log))
	if err != nil || len(all) != 4 || all[1] != (transaction{at(0.25), 9 * time.Millisecond}) {
		t.Fatalf("got %v (%v)", all, err)
	}
	for _, tt := range []struct {
		from, to, rate float64
		p99            time.Duration
	}{
		{0, 2, 2, 9 * time.Millisecond}, {1, 2, 2, 3 * time.Millisecond}, {0, 0.25, 4, 1500 * time.Microsecond},
		{0.5, 1, 0, 500 * time.Millisecond}, // none ended
	} {
		if rate, p99 := all.in(span{at(tt.from), at(tt.to)}); rate != tt.rate || p99 != tt.p99 {
			t.Errorf("%v to %v: %v a second, p99 %v; want %v, %v", tt.from, tt.to, rate, p99, tt.rate, tt.p99)
		}
	}
	for _, bad := range []string{"\n", "0 1 failed 0 1800000000 0\n", "0 1 1500 0\n"} {
		if all, err := parseTransactions(strings.NewReader(bad)); err == nil {
			t.Errorf("%q is %v", bad, all)
		}
	}
}

// TestDatabase runs pgbench, and expects its transactions in a window.
func TestDatabase(t *testing.T) {
	testkit.NeedRoot(t)
	if rig.Postgres.Program() == "" {
		t.Log("no PostgreSQL here")
		return
	}
	alone(t)()
	r := &blockioRig{bed: bed{experiment: new(experiment)}, config: blockioConfig{service: rig.Postgres}}
	defer func() {
		testkit.Check(t, r.close())
	}()
	must(t, r.build(t.Context()))
	testkit.Await(t, "a window with transactions", func() bool {
		w, err := r.window(t.Context(), blockioSettle)
		must(t, err)
		return w.rate > 0 && w.p99 > 0
	})
}
