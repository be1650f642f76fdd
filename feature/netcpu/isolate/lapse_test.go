package isolate

import (
	"testing"
	"time"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/policy"
	"github.com/fairlead-project/fairlead/tenant"
)

// The changes in the payer's name lapse with the last decision that isolates a member of its tenant,
// and those of the host with the last that isolates or charges any container.
func TestLapse(t *testing.T) {
	const key = "fairlead.netcpu"
	at := func(second int64) time.Time { return time.Unix(second, 0) }
	tenants := tenant.New("/proc", tenant.Network)
	is := New(Config{Key: key, Tenants: tenants})
	apply := func(id container.ID, netns uint64, mode policy.NetCPU, until time.Time) *tenant.Tenant {
		t.Helper()
		of, _, err := tenants.Apply(policy.Target{
			Container: container.Container{ID: id, NetNS: netns}, Settings: policy.Settings{NetCPU: mode},
			Decided: map[string]time.Time{key: until},
		})
		must(t, err)
		return of
	}
	lapses := func(when string, id container.ID, want time.Time) {
		t.Helper()
		if got := is.lapse(id); !got.Equal(want) {
			t.Errorf("%s: those of %v lapse at %v, want %v", when, id, got, want)
		}
	}
	of := apply(1, 5, policy.NetCPUIsolate, at(10))
	lapses("it is about to be isolated", 1, at(10))
	is.isolated[of.Key()] = &isolation{of: of, payer: container.Container{ID: 1}}
	apply(2, 5, policy.NetCPUIsolate, at(30))
	apply(3, 5, policy.NetCPUObserve, at(40))
	apply(4, 6, policy.NetCPUCharge, at(50))
	lapses("another member is isolated for longer", 1, at(30))
	lapses("one that is not isolated", 3, time.Time{})
	lapses("one is charged for longer", 0, at(50))
	apply(4, 6, policy.NetCPUObserve, time.Time{})
	lapses("it no longer is", 0, at(30))
	apply(1, 5, policy.NetCPUObserve, time.Time{})
	lapses("the payer is to be released", 1, at(30))
	apply(2, 5, policy.NetCPUIsolate, time.Time{})
	lapses("policy itself isolates a member", 1, time.Time{})
	tenants.Remove(1)
	lapses("it has left", 1, time.Time{})
}
