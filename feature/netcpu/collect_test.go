package netcpu

import (
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/feature/netcpu/account"
)

// read is a meter that has read this.
type read account.Reading

func (r read) Read() (account.Reading, error) { return account.Reading(r), nil }

// running are the containers of a host on which nothing ends.
type running []container.Container

func (r running) Snapshot() container.Snapshot { return container.Snapshot{Containers: r} }
func (r running) Lookup(id container.ID) (c container.Container, ok bool) {
	i := slices.IndexFunc(r, func(c container.Container) bool { return c.ID == id })
	if i < 0 {
		return c, false
	}
	return r[i], true
}

// The report says of each container what its ledger has booked, and at which
// uplinks packets are dropped. Every sample on the metrics page is explained.
func TestReport(t *testing.T) {
	r := newChargeRig(t, true, "cpu.max", "100000 100000\n")
	must(t, r.add(r.container(), 0))
	r.rounds(20, 20*ms, 0)
	rx := [account.Protocols]account.Work{account.UDP: {CPU: time.Second, Packets: 1000}}
	n := &Netcpu{charger: r.charger, shown: []Door{{Netns: 9, Device: "eth0", By: ByTC, Why: "no driver"}}, Accounts: &Accounts{
		Meter: read{
			Accounts: []account.Account{{Container: webID, Receive: rx}},
			Thefts:   []account.Theft{from(account.Task, 8, webID), from(account.Task, webID, 8)},
		},
		Containers: running{r.container(), {ID: 8}},
	}}
	for i := range n.Meter.(read).Thefts {
		n.Meter.(read).Thefts[i].CPU = time.Duration(i+1) * time.Second
	}

	out, err := n.Report(t.Context(), nil, api.Ask{})
	must(t, err)
	got := out.(api.NetCPU)
	if diff := cmp.Diff([]api.NetCPUUplink{{Device: "eth0", NetNS: 9, DropsBy: "tc", Why: "no driver"}}, got.Uplinks); diff != "" {
		t.Errorf("uplinks (-want +got):\n%s", diff)
	}
	if len(got.Accounts) != 2 || got.Accounts[0].Container != webID || got.Accounts[1].Ledger != nil {
		t.Fatalf("%+v", got.Accounts)
	}
	b := r.ledgers()[webID]
	want := &api.NetCPULedger{Balance: b.Balance.Seconds(), Factor: b.factor, Charged: b.Charged.Seconds(), Forgiven: b.Forgiven.Seconds()}
	if diff := cmp.Diff(want, got.Accounts[0].Ledger); diff != "" || b.Charged == 0 || b.factor >= 1 {
		t.Errorf("ledger (-want +got):\n%s", diff)
	}

	export := n.Export()
	if len(export.Samples) == 0 {
		t.Error("nothing is exported")
	}
	for _, s := range append(export.Samples, r.samples(nil)...) {
		if export.Help[s.Name] == "" {
			t.Errorf("%s is not explained", s.Name)
		}
	}
}
