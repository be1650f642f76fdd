package netcpu

import (
	"math"
	"testing"
	"time"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/feature/netcpu/account"
	"github.com/fairlead-project/fairlead/feature/netcpu/ledger"
)

func TestCharged(t *testing.T) {
	work := [account.Protocols]account.Work{account.UDP: {CPU: 30 * ms}, account.TCP: {CPU: 10 * ms}}
	r := account.Reading{Accounts: []account.Account{
		{Container: account.System, Receive: work, Took: 2 * ms},
		{Container: 1, Receive: work, Send: work, Own: 15 * ms, Took: 27 * ms},
		{Container: 2, Robbed: 22 * ms},
	}}
	for _, tt := range []struct {
		credits bool
		one     cost
		two     cost
	}{
		{true, cost{charge: 65 * ms, took: 27 * ms}, cost{credit: 22 * ms}},
		{false, cost{charge: 80 * ms, took: 27 * ms}, cost{}},
	} {
		got := costs(r, tt.credits)
		if len(got) != 2 || got[1] != tt.one || got[2] != tt.two {
			t.Errorf("credits %v: %+v", tt.credits, got)
		}
	}
}

func TestAllowed(t *testing.T) {
	r := newChargeRig(t, true, "cpu.max", "50000 100000\n")
	told := make(map[container.ID]time.Duration)
	r.cfg.allow = func(id container.ID, budget, period time.Duration) error {
		if period != 100*ms {
			t.Errorf("period %v", period)
		}
		told[id] = budget
		return nil
	}
	for reserve, want := range map[float64]time.Duration{0: 25 * ms, 0.1: 22500 * time.Microsecond, 0.8: 5 * ms} {
		must(t, r.add(r.container(), reserve))
		r.rounds(10, 0, 0)
		if got := told[webID]; got < want-ms || got > want+ms {
			t.Errorf("budget %v beside tasks without end, want %v with T %v", got, want, reserve)
		}
	}
	for _, reserve := range []float64{-0.1, 1, 2, math.NaN()} {
		if err := r.add(r.container(), reserve); err == nil {
			t.Errorf("T %v is taken", reserve)
		}
	}
	must(t, r.remove(webID))
	if told[webID] != ledger.Unlimited {
		t.Errorf("budget %v afterwards", told[webID])
	}
}
