package netcpu

import (
	"path/filepath"
	"testing"
	"time"

	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/feature/netcpu/account"
	"github.com/fairlead-project/fairlead/feature/netcpu/charge"
	"github.com/fairlead-project/fairlead/feature/netcpu/drop"
	"github.com/fairlead-project/fairlead/feature/netcpu/ledger"
	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/internal/testkit/topology"
	"github.com/fairlead-project/fairlead/kernel/cgroup"
	"github.com/fairlead-project/fairlead/kernel/journal"
)

// read is a meter with a fixed reading.
type read account.Reading

func (r read) Read() (account.Reading, error) { return account.Reading(r), nil }

// from is a theft of a culprit's packets from a victim.
func from(victim, culprit container.ID) account.Pair {
	return account.Pair{Victim: account.Party{Kind: account.Task, Container: victim}, Culprit: culprit}
}

// The report contains the ledger of each container, and the uplinks at which packets are dropped.
func TestReport(t *testing.T) {
	rx := [account.Protocols]account.Work{account.UDP: {CPU: time.Second, Packets: 1000}}
	x := &Accounts{
		Meter: read{
			Accounts: map[container.ID]account.Account{7: {Receive: rx}},
			Thefts:   map[account.Pair]time.Duration{from(8, 7): time.Second, from(7, 8): 2 * time.Second},
		},
		Containers: topology.Containers{{ID: 7}, {ID: 8}},
	}
	b := charge.Booked{State: ledger.State{Balance: -time.Second, Charged: 4 * time.Second, Credited: 3 * time.Second, Forgiven: 2 * time.Second}, Factor: 0.5}
	x.InForce = func() inForce {
		return inForce{
			Drops: map[container.ID]drop.Counters{7: {Dropped: 5, Beyond: 3}}, Ledgers: map[container.ID]charge.Booked{7: b},
			Points: []drop.Point{{Netns: 9, Device: "eth0", By: drop.ByTC, Why: "no driver"}},
		}
	}
	report, err := x.Report(t.Context(), nil, api.Ask{})
	testkit.Must(t, err)
	got := report.(api.NetCPU)
	testkit.Same(t, "uplinks", []api.NetCPUUplink{{Device: "eth0", NetNS: 9, DropsBy: "tc", Why: "no driver"}}, got.Uplinks)
	if len(got.Accounts) != 2 || got.Accounts[0].Container != 7 || got.Accounts[0].Dropped != 5 || got.Accounts[0].QuotaDropped != 3 || got.Accounts[1].Dropped != 0 || got.Accounts[1].Ledger != nil {
		t.Fatalf("%+v", got.Accounts)
	}
	want := &api.NetCPULedger{Balance: -1, Factor: 0.5, Charged: 4, Credited: 3, Forgiven: 2}
	testkit.Same(t, "ledger", want, got.Accounts[0].Ledger)
}

// Every sample on the metrics page is explained.
func TestSamplesAreExplained(t *testing.T) {
	dir := testkit.Tree(t, map[string]string{"cgroup.procs": "", "cpu.max": "100000 100000\n", "cpu.weight": "100\n", "cpu.idle": "0\n", "cpu.stat": "usage_usec 1\n"})
	j, err := journal.Open(t.TempDir(), "")
	testkit.Must(t, err)
	defer j.Close()
	c := container.Container{ID: 7, Cgroup: container.Cgroup{V2: dir, CPU: dir}}
	ch := charge.New(charge.Config{
		Feature: name, Layout: cgroup.Layout{V2: filepath.Dir(dir), CPU: filepath.Dir(dir)}, Journal: j, Failed: func(error) {},
		Accounts: func() (account.Reading, error) { return account.Reading{}, nil },
	})
	defer ch.Close()
	testkit.Must(t, ch.Add(c, 0))
	x := &Accounts{
		Meter:      read{Accounts: map[container.ID]account.Account{7: {Send: [account.Protocols]account.Work{account.TCP: {CPU: 1, Packets: 1}}}}, Thefts: map[account.Pair]time.Duration{from(8, 7): 1}},
		Containers: topology.Containers{c, {ID: 8}},
	}
	export, ledgers := x.Export(), inForce{Ledgers: ch.Ledgers()}.samples(nil)
	if len(export.Samples) == 0 || len(ledgers) == 0 {
		t.Error("nothing is exported")
	}
	for _, s := range append(export.Samples, ledgers...) {
		if help[s.Name] == "" || export.Help[s.Name] == "" {
			t.Errorf("%s is not explained", s.Name)
		}
	}
}
