package netcpu_test

import (
	"slices"
	"testing"
	"time"

	"github.com/fairlead-project/fairlead/feature/netcpu/account"
	"github.com/fairlead-project/fairlead/kernel/cgroup"
	"github.com/fairlead-project/fairlead/kernel/journal"
	"github.com/fairlead-project/fairlead/policy"
	"github.com/fairlead-project/fairlead/sandbox"
)

// A flood that costs more than a container has is charged to it, and what is
// beyond is dropped; in the end everything is as its owner has it.
func TestChargeFlood(t *testing.T) {
	const quota, period = 20 * time.Millisecond, 100 * time.Millisecond
	h := newHost(t, sandbox.CPU{Quota: quota, Period: period})
	limit := func() cgroup.Bandwidth {
		b, err := cgroup.ReadBandwidth(h.container.Cgroup.CPU)
		must(t, err)
		return b
	}
	owners := limit()
	if owners.Quota != quota || owners.Period != period {
		t.Fatalf("the sandbox has %+v", owners)
	}
	sample := func(name string) float64 {
		for _, s := range h.netcpu.Snapshot().Samples {
			if s.Name == name && s.Container == h.container.ID {
				return s.Value
			}
		}
		return 0
	}
	must(t, h.netcpu.Apply(t.Context(), h.target(policy.NetCPUCharge)))
	must(t, h.netcpu.Apply(t.Context(), h.target(policy.NetCPUCharge)))
	h.start(h.box, "udp-recv", "--listen", ":9000")
	h.start(h.wire, "udp-send", "--to", "10.66.0.2:9000")
	// Seen at one time, as it goes back up whenever less comes.
	until(t, "the quota is lowered, with a note of it", func() bool {
		return limit().Quota < owners.Quota && slices.ContainsFunc(h.notes(), func(e journal.Entry) bool { return e.Ref.Kind == cgroup.KindFile })
	})
	until(t, "packets are dropped", func() bool { return sample("netcpu_quota_dropped_packets_total") > 0 })
	// What is forgiven would have cost others more than it has at all.
	if sample("netcpu_charged_seconds_total") == 0 {
		t.Errorf("%+v, journal %+v", h.netcpu.Snapshot().Samples, h.notes())
	}

	must(t, h.netcpu.Apply(t.Context(), h.target(policy.NetCPUIsolate)))
	if got := limit(); got != owners {
		t.Errorf("isolated, the quota is %+v", got)
	}
	must(t, h.netcpu.Apply(t.Context(), h.target(policy.NetCPUCharge)))
	until(t, "it is lowered again", func() bool { return limit().Quota < owners.Quota })
	must(t, h.netcpu.Apply(t.Context(), h.target(policy.NetCPUObserve)))
	if got := limit(); got != owners || len(h.notes()) != 0 {
		t.Errorf("quota %+v and journal %+v in the end", got, h.notes())
	}
	must(t, h.netcpu.Apply(t.Context(), h.target(policy.NetCPUCharge)))
	until(t, "once more", func() bool { return limit().Quota < owners.Quota })
	must(t, h.netcpu.Close())
	if got := limit(); got != owners || len(h.notes()) != 0 {
		t.Errorf("quota %+v and journal %+v after close", got, h.notes())
	}
}

func until(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(30 * time.Second); !ok(); time.Sleep(20 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("waited in vain until %s", what)
		}
	}
}

// What is dropped at the uplink on a container's account is in its account, too,
// though no veth tells whose it was.
func TestDropsAreCharged(t *testing.T) {
	h := newHost(t, sandbox.CPU{Quota: 5 * time.Millisecond, Period: 100 * time.Millisecond})
	must(t, h.netcpu.Apply(t.Context(), h.target(policy.NetCPUCharge)))
	h.start(h.box, "udp-recv", "--listen", ":9000")
	h.start(h.wire, "udp-send", "--to", "10.66.0.2:9000")
	dropped := func() (n float64) {
		for _, s := range h.netcpu.Snapshot().Samples {
			if s.Name == "netcpu_quota_dropped_packets_total" {
				n += s.Value
			}
		}
		return n
	}
	cpu := func() (own, system time.Duration) {
		r, err := h.netcpu.Read()
		must(t, err)
		for _, a := range r.Accounts {
			switch a.Container {
			case h.container.ID:
				own = a.CPU()
			case account.System:
				system = a.CPU()
			}
		}
		return own, system
	}
	until(t, "packets are dropped", func() bool { return dropped() > 1000 })
	before, own, system := dropped(), time.Duration(0), time.Duration(0)
	o, s := cpu()
	until(t, "some more are", func() bool { return dropped() > before+50_000 })
	own, system = cpu()
	t.Logf("of %.0f dropped and the others: its own %v, the system's %v", dropped()-before, own-o, system-s)
	if own -= o; own < 3*(system-s) {
		t.Errorf("of what came in, %v are its own and %v are nobody's", own, system-s)
	}
}
