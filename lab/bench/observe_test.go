package bench

import (
	"math"
	"testing"
	"time"

	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/lab/report"
	"github.com/fairlead-project/fairlead/lab/rig"
)

// TestObserved measures the cost of the accounts: their programs run only while an agent keeps
// them, and then for each packet.
func TestObserved(t *testing.T) {
	testkit.NeedRoot(t)
	e := &experiment{report: &report.Report{Rounds: 2}, settle: 20 * time.Millisecond, take: 300 * time.Millisecond}
	su := setup{name: "kept", cfg: rig.Config{Path: rig.Hop, Containers: rig.Pair(100, 100)}, accounts: true, demands: []demand{
		{name: "1k", traffic: rig.Traffic{Kind: rig.UDP}, rate: 1000},
	}}
	must(t, e.measure(t.Context(), e.netcpu(su)))
	if e.unmetered != "" {
		t.Fatalf("the kernel cannot keep accounts: %s", e.unmetered)
	}
	if c, ok := e.report.Find("kept 1k", Balance); !ok || len(c.On) != 2 || len(c.Off) != 0 || c.On[0] <= 0 {
		t.Errorf("%s: %v, %v off, %v on", Balance, ok, c.Off, c.On)
	}
	if c, ok := e.report.Find("kept", AgentCPU); !ok || len(c.Off) != 2 || c.Off[0] != 0 || c.Off[1] != 0 || report.Median(c.On) == 0 {
		t.Errorf("the agent takes %v off, %v on", c.Off, c.On)
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
