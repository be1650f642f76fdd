package bench

import (
	"slices"
	"testing"
	"time"

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
