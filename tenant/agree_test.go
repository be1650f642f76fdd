package tenant_test

import (
	"slices"
	"testing"
	"time"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/policy"
	"github.com/fairlead-project/fairlead/tenant"
)

func overlay(t policy.Target) (on, says bool) {
	if t.Settings.Overlay == nil {
		return false, false
	}
	return *t.Settings.Overlay, true
}

// members are containers 1, 2 ...; of each letter: y says on, n off, - nothing.
func members(says string) (list []policy.Target) {
	for i, s := range says {
		m := in(5, container.ID(i+1))
		if on := s == 'y'; s != '-' {
			m.Settings.Overlay = &on
		}
		list = append(list, m)
	}
	return list
}

// The rules of the features that are there, by the same question.
func TestRulesOfFeatures(t *testing.T) {
	list := []policy.Target{in(5, 1), in(5, 2), in(5, 3)}
	high, low, off, on := 1, 1, false, true
	reserve := 0.4
	list[0].Settings = policy.Settings{Egress: policy.Net{Rate: 5, Priority: &high}, NetCPU: policy.NetCPUCharge, Latency: &off}
	list[1].Settings = policy.Settings{Egress: policy.Net{Rate: 5, Priority: &low}, NetCPU: policy.NetCPUIsolate, Latency: &on, NetCPUReserve: &reserve}
	list[1].Expiry, list[2].Expiry = time.Unix(20, 0), time.Unix(10, 0)

	// traffic: the same for all that ask, by a comparison of its own.
	due := func(t policy.Target) (policy.Net, bool) {
		return t.Settings.Egress, t.Settings.Egress != policy.Net{}
	}
	same := func(a, b policy.Net) bool { return a.Rate == b.Rate && *a.Priority == *b.Priority }
	if a := tenant.AgreeFunc(list, due, same); a.Disagree() || a.Value.Rate != 5 {
		t.Errorf("traffic: %+v", a)
	}
	low = 2
	if a := tenant.AgreeFunc(list, due, same); !a.Disagree() || a.Value.Rate != 0 {
		t.Errorf("traffic: %+v", a)
	} else if other, _ := a.Against(1); other.ID != 2 {
		t.Errorf("traffic: against 1 is %v", other.ID)
	}

	// netcpu: the strictest, and among equals the first.
	modes := []policy.NetCPU{policy.NetCPUObserve, policy.NetCPUAuto, policy.NetCPUCharge, policy.NetCPUIsolate}
	said := tenant.Agree(list, func(t policy.Target) (int, bool) {
		rank := slices.Index(modes, t.Settings.NetCPU)
		return rank, rank >= 0
	}).Said
	strictest := slices.MaxFunc(said, func(a, b tenant.Said[int]) int { return a.Value - b.Value })
	if strictest.By.ID != 2 || modes[strictest.Value] != policy.NetCPUIsolate {
		t.Errorf("netcpu: %+v", strictest)
	}

	// latency: anybody's on is enough.
	a := tenant.Agree(list, func(t policy.Target) (bool, bool) { return true, t.Settings.Latency != nil && *t.Settings.Latency })
	if !a.Value || len(a.Said) != 1 {
		t.Errorf("latency: %+v", a)
	}

	// isolate: what is changed lapses with the last, and never if one of them never does.
	lapse := func() (last time.Time) {
		for _, s := range tenant.AgreeFunc(list, func(t policy.Target) (time.Time, bool) { return t.Expiry, true }, time.Time.Equal).Said {
			if s.Value.IsZero() {
				return s.Value
			}
			if s.Value.After(last) {
				last = s.Value
			}
		}
		return last
	}
	if got := lapse(); !got.IsZero() {
		t.Errorf("isolate: %v", got)
	}
	list[0].Expiry = time.Unix(5, 0)
	if got := lapse(); !got.Equal(time.Unix(20, 0)) {
		t.Errorf("isolate: %v", got)
	}
}
