package charge

import (
	"math"
	"testing"
	"time"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/feature/netcpu/account"
	"github.com/fairlead-project/fairlead/feature/netcpu/law"
	"github.com/fairlead-project/fairlead/feature/netcpu/ledger"
)

func TestCharged(t *testing.T) {
	work := [account.Protocols]account.Work{account.UDP: {CPU: 30 * ms}, account.TCP: {CPU: 10 * ms}}
	r := account.Reading{Accounts: map[container.ID]account.Account{
		account.System: {Receive: work, Took: 2 * ms},
		1:              {Receive: work, Send: work, Own: 15 * ms, Took: 27 * ms},
		2:              {Robbed: 22 * ms},
	}}
	for _, tt := range []struct {
		credits bool
		one     cost
		two     cost
	}{
		{true, cost{Charge: 65 * ms, Took: 27 * ms}, cost{Credit: 22 * ms}},
		{false, cost{Charge: 80 * ms, Took: 27 * ms}, cost{}},
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
	r.cfg.Allow = func(id container.ID, budget, lasts time.Duration) error {
		if budget != ledger.Unlimited && lasts != 2*law.Tick {
			t.Errorf("for %v", lasts)
		}
		told[id] = budget
		return nil
	}
	for reserve, want := range map[float64]time.Duration{0: 50 * ms, 0.1: 45 * ms, 0.8: 10 * ms} { // for two periods
		must(t, r.Add(r.container(), reserve))
		r.rounds(10, 0, 0)
		if got := told[webID]; got < want-2*ms || got > want+2*ms {
			t.Errorf("budget %v beside tasks without end, want %v with T %v", got, want, reserve)
		}
	}
	for _, reserve := range []float64{-0.1, 1, 2, math.NaN()} {
		if err := r.Add(r.container(), reserve); err == nil {
			t.Errorf("T %v is taken", reserve)
		}
	}
	must(t, r.Remove(webID))
	if told[webID] != ledger.Unlimited {
		t.Errorf("budget %v afterwards", told[webID])
	}
}
