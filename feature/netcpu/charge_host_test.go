package netcpu_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/feature/netcpu/account"
	"github.com/fairlead-project/fairlead/feature/netcpu/drop"
	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/kernel/cgroup"
	"github.com/fairlead-project/fairlead/lab/load"
	"github.com/fairlead-project/fairlead/lab/sandbox"
	"github.com/fairlead-project/fairlead/policy"
)

// With the reserve T, packets are dropped once no more than T of the budget is left: with T 0 none
// of the packets that cost a small part of it are dropped, with 99 % some are.
func TestReserve(t *testing.T) {
	t.Parallel()
	h := newHost(t, sandbox.CPU{Quota: 100 * time.Millisecond, Period: 100 * time.Millisecond})
	// There is no receiver: its tasks' time would be subtracted from the budget, too.
	board := h.start(h.wire, "udp-send", "--to", "10.66.0.2:9000", "--rate", "10000")
	apply := func(reserve float64) {
		t.Helper()
		target := h.target(policy.NetCPUCharge)
		target.Settings.NetCPUReserve = &reserve
		must(t, h.netcpu.Apply(t.Context(), target))
	}
	sent := func() func() bool {
		began := board.Read()
		return func() bool { return board.Read().Since(began).Ops > 5_000 }
	}
	apply(0.99)
	until(t, "packets are dropped with a T of 99 %", func() bool { return h.beyond() > 0 })
	apply(0)
	until(t, "none of the packets of a while is dropped with a T of 0", func() bool {
		was, done := h.beyond(), sent()
		until(t, "packets are sent", done)
		return h.beyond() == was
	})
}

// Invalid quotas that the kernel accepts, during traffic: the quota in force remains one that it
// accepts, and the owner's is restored.
func TestAbsurdQuotas(t *testing.T) {
	t.Parallel()
	h := newHost(t, sandbox.CPU{})
	h.start(h.box, "udp-recv", "--listen", ":9000")
	h.start(h.wire, "udp-send", "--to", "10.66.0.2:9000", "--rate", "2000")
	for _, cpu := range []sandbox.CPU{
		{Quota: time.Millisecond, Period: time.Millisecond},                   // the shortest period
		{Quota: time.Millisecond, Period: time.Second},                        // the kernel's minimum
		{Quota: 1000 * time.Second, Period: time.Second},                      // a thousand CPUs
		{Quota: time.Second, Period: time.Millisecond},                        // and in the shortest period
		{Quota: 1001 * time.Microsecond, Period: 100*time.Millisecond + 1000}, // odd values
	} {
		must(t, h.box.Limit(cpu))
		owners := limitsOf(t, h.container.Cgroup.CPU)
		h.apply(h.container, policy.NetCPUCharge)
		until(t, "packets are charged", func() bool { return h.netcpu.InForce().Ledgers[h.container.ID].Charged > 0 })
		b, err := cgroup.ReadBandwidth(h.container.Cgroup.CPU)
		if err != nil || !b.Limited || b.Period != owners.Period || b.Quota < time.Millisecond && b.Quota < owners.Quota {
			t.Errorf("%+v: %+v, %v", cpu, b, err)
		}
		must(t, h.netcpu.Remove(t.Context(), h.container.ID))
		if got := limitsOf(t, h.container.Cgroup.CPU); got != owners || len(h.notes()) != 0 {
			t.Errorf("%+v: %+v and journal %+v afterwards, want %+v", cpu, got, h.notes(), owners)
		}
	}
}

// limits is the CPU limit of a cgroup.
type limits struct {
	cgroup.Bandwidth
	weight uint64
}

func limitsOf(t *testing.T, dir string) limits {
	t.Helper()
	b, err := cgroup.ReadBandwidth(dir)
	must(t, err)
	w, err := cgroup.Weight(dir)
	must(t, err)
	return limits{b, w}
}

var until = testkit.Await

// Packets that an uplink drops because a container's ring is full are in its account, too, although
// no veth identifies their owner. TestXDPDropsAreCharged has those beyond a budget.
func TestDropsAreCharged(t *testing.T) {
	testkit.InFull(t)
	h := newHost(t, oneCPU)
	board := h.start(h.box, "udp-recv", "--listen", ":9000")
	h.apply(h.container, policy.NetCPUIsolate)
	for range 8 { // they keep its thread from emptying the ring
		h.start(h.box, "burn")
	}
	h.chargedDrops(early)
	until(t, "its thread brings it some", func() bool { return board.Read().Since(load.Reading{}).Ops > 0 })
}

// The drops of each kind, for a container.
func early(c drop.Counters) uint64   { return c.Dropped }
func byQuota(c drop.Counters) uint64 { return c.Beyond }

// accounts returns the accounts of all containers.
func (h *host) accounts() map[container.ID]account.Account {
	h.t.Helper()
	r, err := h.netcpu.Meter.Read()
	must(h.t, err)
	return r.Accounts
}

// cost returns what a container's packets have cost.
func (h *host) cost(c container.Container) time.Duration { return h.accounts()[c.ID].CPU() }

// addsUp checks that the accounts add up to the separately measured time, except for packets that
// arrive during the reading, and for a softirq in progress: if the hypervisor takes the CPU away in
// the middle of a softirq, that is not measured before it ends.
func (h *host) addsUp(when string) account.Reading {
	h.t.Helper()
	var r account.Reading
	testkit.AwaitNone(h.t, func() string {
		began := time.Now()
		var err error
		r, err = h.netcpu.Meter.Read()
		must(h.t, err)
		took := time.Since(began)
		sum := r.Gone
		for _, a := range r.Accounts {
			sum += a.CPU()
		}
		total := r.Softirq + r.Thread
		if (sum - total).Abs() <= total/50+2*took {
			return ""
		}
		return fmt.Sprintf("%s: the accounts add up to %v of %v, read in %v", when, sum, total, took)
	})
	return r
}
