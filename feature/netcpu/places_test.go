package netcpu

import (
	"errors"
	"testing"
	"time"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/feature"
	"github.com/fairlead-project/fairlead/feature/netcpu/account"
	"github.com/fairlead-project/fairlead/policy"
	"github.com/fairlead-project/fairlead/tenant/identity"
)

// ledgers is an accountant with eight accounts.
type ledgers map[container.ID]bool

func (l ledgers) Room() int { return 8 }
func (l ledgers) Watch(m identity.Member) error {
	if !l[m.ID] && len(l) == l.Room() {
		return account.ErrSlots
	}
	l[m.ID] = true
	return nil
}
func (l ledgers) Demand(account.Need) error    { return nil }
func (l ledgers) Forget(id container.ID) error { delete(l, id); return nil }

// In any order of arrival, cgroups that a local user creates give up accounts to containers, and
// containers that are only observed give up theirs to containers with a mode that needs one.
func TestPlaces(t *testing.T) {
	l := make(ledgers)
	p := places{l, make(map[container.ID]claim)}
	add := func(id container.ID, as claim) error { return p.watch(identity.Member{ID: id}, as) }
	for id := range container.ID(100) {
		if err := add(100+id, bare); id < 2 && err != nil || id >= 2 && !errors.Is(err, feature.ErrPartly) {
			t.Fatalf("bare cgroup %d: %v", id, err)
		}
	}
	for id := range container.ID(8) { // two replace bare ones
		if err := add(200+id, observed); err != nil {
			t.Fatalf("container %d: %v", id, err)
		}
	}
	if err := add(300, observed); !errors.Is(err, account.ErrSlots) {
		t.Errorf("one more that is only observed: %v", err)
	}
	for id := range container.ID(8) {
		if err := add(400+id, asked); err != nil {
			t.Fatalf("container %d that is charged: %v", id, err)
		}
		if !l[400] || len(l) != 8 || len(p.of) != 8 {
			t.Fatalf("%d accounts of %d", len(l), len(p.of))
		}
	}
	if err := add(500, asked); !errors.Is(err, account.ErrSlots) {
		t.Errorf("one more that is charged: %v", err)
	}
	if err := add(407, observed); err != nil { // it keeps its account, with a smaller claim now
		t.Error(err)
	}
	if err := add(500, asked); err != nil || l[407] {
		t.Errorf("in its place: %v", err)
	}
}

func TestClaimOf(t *testing.T) {
	scope, docker := container.Container{Source: container.CgroupSource}, container.Container{Source: "docker"}
	for _, x := range []struct {
		c       container.Container
		mode    policy.NetCPU
		decided bool
		steal   float64
		want    claim
		need    account.Need
	}{
		{scope, policy.NetCPUObserve, false, 0.03, bare, account.Shown}, {scope, policy.NetCPUCharge, false, 0.03, acted, account.Acted},
		{docker, policy.NetCPUObserve, false, 0.001, observed, account.Shown}, {docker, policy.NetCPUAuto, false, 0.03, asked, account.Watched},
		{docker, policy.NetCPUIsolate, true, 0.03, acted, account.Acted}, {docker, policy.NetCPUObserve, true, 0.03, asked, account.Watched},
		{docker, policy.NetCPUObserve, true, 0.001, acted, account.Acted},
	} {
		of := policy.Target{Container: x.c, Settings: policy.Settings{NetCPU: x.mode, NetCPUSteal: &x.steal}}
		if x.decided {
			of.Decided = map[string]time.Time{modeKey: time.Now()}
		}
		got := claimOf(of)
		if p := (places{of: map[container.ID]claim{1: got, 2: bare}}); got != x.want || p.need() != x.need {
			t.Errorf("%s, %s, %v: %v, needs %v", x.c.Source, x.mode, x.decided, got, p.need())
		}
	}
}
