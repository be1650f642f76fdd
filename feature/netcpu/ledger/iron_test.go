package ledger

import (
	"testing"
	"time"
)

const ms = time.Millisecond

func TestPeriod(t *testing.T) {
	for _, tt := range []struct {
		name    string
		runtime time.Duration
		gained  time.Duration
		idled   bool
		want    time.Duration
	}{
		{"used up", 0, 0, false, 50 * ms},
		{"left over for lack of demand", 20 * ms, 0, true, 50 * ms},
		{"left over though it wanted to run", 20 * ms, 0, false, 70 * ms},
		{"gained is added", 0, 7 * ms, false, 57 * ms},
		{"gained is not hoarded either", 0, 7 * ms, true, 50 * ms},
		{"debt", -20 * ms, 0, false, 30 * ms},
		{"an idle container keeps its debt", -20 * ms, 0, true, 30 * ms},
		{"debt over more than one period", -120 * ms, 0, false, -70 * ms},
		{"gained pays a debt", -20 * ms, 15 * ms, true, 45 * ms},
		{"gained beyond a debt", -20 * ms, 25 * ms, false, 55 * ms},
	} {
		g := Global{Runtime: tt.runtime, Gained: tt.gained, Refill: 50 * ms, Slice: 5 * ms}
		g.Period(tt.idled)
		if g.Runtime != tt.want || g.Gained != 0 {
			t.Errorf("%s: runtime %v, gained %v, want %v, 0", tt.name, g.Runtime, g.Gained, tt.want)
		}
	}
}

func TestRefilled(t *testing.T) {
	for _, tt := range []struct {
		name            string
		runtime, gained time.Duration
		remain, usage   time.Duration
		runs            bool
		wantRuntime     time.Duration
		wantGained      time.Duration
		wantRemain      time.Duration
	}{
		{"a slice", 50 * ms, 0, 0, 0, true, 45 * ms, 0, 5 * ms},
		{"overrun of the CPU is taken first", 50 * ms, 0, -2 * ms, 0, true, 43 * ms, 0, 5 * ms},
		{"the rest of a period", 3 * ms, 0, 0, 0, true, 0, 0, 3 * ms},
		{"exhausted", 0, 0, 0, 0, false, 0, 0, 0},
		{"charge from runtime", 50 * ms, 0, 0, 10 * ms, true, 35 * ms, 0, 5 * ms},
		{"charge from gained first", 50 * ms, 4 * ms, 0, 10 * ms, true, 39 * ms, 0, 5 * ms},
		{"charge from gained alone", 50 * ms, 14 * ms, 0, 10 * ms, true, 45 * ms, 4 * ms, 5 * ms},
		{"charge as large as gained", 50 * ms, 10 * ms, 0, 10 * ms, true, 45 * ms, 0, 5 * ms},
		{"charge makes a debt", 4 * ms, 0, 0, 10 * ms, false, -6 * ms, 0, 0},
		{"charge to the last bit", 10 * ms, 0, 0, 10 * ms, false, 0, 0, 0},
		{"credit", 50 * ms, 0, 0, -3 * ms, true, 45 * ms, 3 * ms, 5 * ms},
		{"credit at exhaustion", 0, 0, 0, -3 * ms, true, 0, 0, 3 * ms},
		{"more credit than a slice at exhaustion", 0, 6 * ms, 0, -3 * ms, true, 0, 4 * ms, 5 * ms},
		{"credit does not let a debtor run", -1 * ms, 0, 0, -3 * ms, false, -1 * ms, 3 * ms, 0},
		{"credit at exhaustion that an overrun eats", 0, 0, -4 * ms, -3 * ms, false, 0, 0, -1 * ms},
	} {
		g := Global{Runtime: tt.runtime, Gained: tt.gained, Refill: 50 * ms, Slice: 5 * ms}
		l := Local{RTRemain: tt.remain, CPUUsage: tt.usage}
		runs := g.Refilled(&l)
		if runs != tt.runs || g.Runtime != tt.wantRuntime || g.Gained != tt.wantGained || l.RTRemain != tt.wantRemain || l.CPUUsage != 0 {
			t.Errorf("%s: runs %v, runtime %v, gained %v, rt_remain %v, cpuusage %v", tt.name, runs, g.Runtime, g.Gained, l.RTRemain, l.CPUUsage)
		}
	}
}

func TestReturn(t *testing.T) {
	for _, tt := range []struct {
		name                    string
		runtime, remain         time.Duration
		wantRuntime, wantRemain time.Duration
	}{
		{"what is left of a slice", 10 * ms, 4 * ms, 13 * ms, ms},
		{"too little", 10 * ms, ms, 10 * ms, ms},
		{"nothing", 10 * ms, 0, 10 * ms, 0},
		{"an overrun stays", 10 * ms, -2 * ms, 10 * ms, -2 * ms},
		{"to a debtor", -10 * ms, 4 * ms, -7 * ms, ms},
	} {
		g, l := Global{Runtime: tt.runtime}, Local{RTRemain: tt.remain}
		g.Return(&l)
		if g.Runtime != tt.wantRuntime || l.RTRemain != tt.wantRemain {
			t.Errorf("%s: runtime %v, rt_remain %v", tt.name, g.Runtime, l.RTRemain)
		}
	}
}

// TestDebtAcrossPeriods follows one debt from the packets that caused it to the first slice after
// it.
func TestDebtAcrossPeriods(t *testing.T) {
	g := Global{Refill: 50 * ms, Slice: 5 * ms}
	l := Local{CPUUsage: 170 * ms}
	g.Period(false)
	for period, runs := range []bool{false, false, false, true} {
		if got := g.Refilled(&l); got != runs {
			t.Fatalf("period %d: runs %v with runtime %v", period, got, g.Runtime)
		}
		if !runs {
			g.Period(true) // idle or not, only time repays a debt
		}
	}
	if g.Runtime != 25*ms {
		t.Errorf("runtime %v after a debt of 120 ms and three periods, less a slice", g.Runtime)
	}
}
