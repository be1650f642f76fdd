package agent

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"net/http"
	"slices"
	"sync"
	"time"

	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/feature"
	"github.com/fairlead-project/fairlead/feature/netcpu/account"
)

// accounts is what the agent knows of whose packets took whose CPU time: a
// meter in the kernel, and since when it counts. It is nil in an agent without.
type accounts struct {
	meter meter
	since time.Time

	mu    sync.Mutex // one Read at a time; guards pairs
	pairs pairs
}

func (x *accounts) read() (account.Reading, error) {
	if x != nil {
		x.mu.Lock()
		defer x.mu.Unlock()
	}
	return x.readLocked()
}

// readLocked is read for who holds x.mu.
func (x *accounts) readLocked() (account.Reading, error) {
	unavailable := func(why string) error {
		return &api.Error{Status: http.StatusServiceUnavailable, Code: "unavailable", Text: why}
	}
	if x == nil {
		return account.Reading{}, unavailable("network CPU time is not accounted for: not available in this build")
	}
	r, err := x.meter.Read()
	switch {
	case noAccounts(err):
		return r, unavailable(err.Error())
	case err != nil:
		return r, fmt.Errorf("read whose packets took whose CPU time: %w", err)
	}
	return r, nil
}

// NetCPU says whose packets took whose CPU time: of all, or of and from the
// container that ref names.
func (a *Agent) NetCPU(_ context.Context, ref string) (api.NetCPU, error) {
	var only container.Container
	if ref != "" {
		c, _, err := a.find(ref)
		if err != nil {
			return api.NetCPU{}, err
		}
		only = c
	}
	r, err := a.accounts.read()
	if err != nil {
		return api.NetCPU{}, err
	}
	running := a.set.Snapshot().Containers
	n := wireNetCPU(r, running, a.set.Lookup)
	n.Since = a.accounts.since
	if ref != "" {
		n.Accounts = slices.DeleteFunc(n.Accounts, func(x api.NetCPUAccount) bool { return x.Container != only.ID })
		n.Matrix = slices.DeleteFunc(n.Matrix, func(t api.NetCPUTheft) bool { return t.Victim != only.ID && t.Culprit != only.ID })
		if len(n.Accounts) == 0 { // has ended, and never had a packet
			n.Accounts = append(n.Accounts, api.NetCPUAccount{Container: only.ID, Name: only.Name, Ended: true})
		}
	}
	dirs := make(map[container.ID]container.Cgroup, len(running))
	for _, c := range running {
		dirs[c.ID] = c.Cgroup
	}
	if w := a.worker("netcpu"); w != nil {
		enforced(n.Accounts, w.feature.Snapshot().Samples)
		n.Uplinks = uplinksOf(w.feature)
	}
	for i := range n.Accounts {
		a.usages.fill(&n.Accounts[i], dirs[n.Accounts[i].Container])
	}
	return n, nil
}

// enforced fills in what the feature does about containers, which it says in samples.
func enforced(accounts []api.NetCPUAccount, samples []feature.Sample) {
	ledger := func(x *api.NetCPUAccount) *api.NetCPULedger {
		if x.Ledger == nil {
			x.Ledger = new(api.NetCPULedger)
		}
		return x.Ledger
	}
	of := make(map[container.ID]*api.NetCPUAccount, len(accounts))
	for i := range accounts {
		of[accounts[i].Container] = &accounts[i]
	}
	for _, s := range samples {
		x := of[s.Container]
		if x == nil {
			continue
		}
		switch s.Name {
		case "netcpu_early_dropped_packets_total", "netcpu_quota_dropped_packets_total":
			x.Dropped = max(x.Dropped, uint64(s.Value)) // the first has the second in it
		case "netcpu_balance_seconds":
			ledger(x).Balance = s.Value
		case "netcpu_limit_factor":
			ledger(x).Factor = s.Value
		case "netcpu_charged_seconds_total":
			ledger(x).Charged = s.Value
		case "netcpu_credited_seconds_total":
			ledger(x).Credited = s.Value
		case "netcpu_forgiven_seconds_total":
			ledger(x).Forgiven = s.Value
		}
	}
}

// wireNetCPU puts a reading into the API's form, with the names of those who
// run, and of those who have ended as long as lookup knows them.
func wireNetCPU(r account.Reading, running []container.Container, lookup func(container.ID) (container.Container, bool)) api.NetCPU {
	rows := map[container.ID]*api.NetCPUAccount{0: {Name: "system"}}
	for _, c := range running {
		rows[c.ID] = &api.NetCPUAccount{Container: c.ID, Name: c.Name}
	}
	row := func(id container.ID) *api.NetCPUAccount {
		x := rows[id]
		if x == nil {
			c, _ := lookup(id)
			x = &api.NetCPUAccount{Container: id, Name: c.Name, Ended: true}
			rows[id] = x
		}
		return x
	}
	n := api.NetCPU{
		Taken: r.Taken, Softirq: r.Softirq.Seconds(), Thread: r.Thread.Seconds(), Lost: r.Lost,
		Accounts: []api.NetCPUAccount{}, Matrix: []api.NetCPUTheft{},
	}
	charged := r.Gone
	for _, acc := range r.Accounts {
		x := row(acc.Container)
		for kind := range account.Protocols {
			x.Work = appendWork(x.Work, "receive", kind.String(), acc.Receive[kind])
			x.Work = appendWork(x.Work, "send", kind.String(), acc.Send[kind])
			x.Receive += acc.Receive[kind].CPU.Seconds()
			x.Send += acc.Send[kind].CPU.Seconds()
			charged += acc.Receive[kind].CPU + acc.Send[kind].CPU
		}
		x.Own = acc.Own.Seconds()
		slices.SortFunc(x.Work, func(p, q api.NetCPUWork) int { return cmp.Compare(q.Seconds, p.Seconds) })
	}
	n.Charged = charged.Seconds()

	by := make(map[container.ID]map[container.ID]float64) // victim, culprit
	for _, t := range r.Thefts {
		if t.CPU <= 0 || own(t) {
			continue
		}
		sec := t.CPU.Seconds()
		w := api.NetCPUTheft{Kind: t.Victim.Kind.String(), Victim: t.Victim.Container, Culprit: t.Culprit, Seconds: sec}
		w.CulpritName = row(t.Culprit).Name
		if w.Victim != 0 {
			w.VictimName = row(w.Victim).Name
		}
		n.Matrix = append(n.Matrix, w)
		if !felt(t) {
			continue
		}
		row(t.Culprit).Taken += sec
		if v := t.Victim.Container; v != 0 {
			row(v).Stolen += sec
			if by[v] == nil {
				by[v] = make(map[container.ID]float64)
			}
			by[v][t.Culprit] += sec
		}
	}
	slices.SortStableFunc(n.Matrix, func(x, y api.NetCPUTheft) int { return cmp.Compare(y.Seconds, x.Seconds) })
	for v, culprits := range by {
		x := row(v)
		for _, id := range slices.Sorted(maps.Keys(culprits)) {
			x.StolenBy = append(x.StolenBy, api.NetCPUCulprit{Container: id, Name: row(id).Name, Seconds: culprits[id]})
		}
		slices.SortStableFunc(x.StolenBy, func(p, q api.NetCPUCulprit) int { return cmp.Compare(q.Seconds, p.Seconds) })
	}

	n.System = *rows[0]
	delete(rows, 0)
	for _, x := range rows {
		if !x.Ended || x.Network() > 0 || x.Stolen > 0 {
			n.Accounts = append(n.Accounts, *x)
		}
	}
	api.SortNetCPU(n.Accounts)
	return n
}

func appendWork(to []api.NetCPUWork, direction, protocol string, w account.Work) []api.NetCPUWork {
	if w.Packets == 0 && w.CPU == 0 {
		return to
	}
	x := api.NetCPUWork{Direction: direction, Protocol: protocol, Seconds: w.CPU.Seconds(), Packets: w.Packets, Bytes: w.Bytes}
	if w.Packets > 0 {
		x.Each = float64(w.CPU.Nanoseconds()) / float64(w.Packets)
	}
	return append(to, x)
}

// selfNetCPU gives a container's own row without what it says of others; nil
// where nothing is measured.
func selfNetCPU(n api.NetCPU, id container.ID) *api.SelfNetCPU {
	i := slices.IndexFunc(n.Accounts, func(x api.NetCPUAccount) bool { return x.Container == id })
	if i < 0 {
		return nil
	}
	x := n.Accounts[i]
	return &api.SelfNetCPU{
		Since: n.Since, Taken: n.Taken, Tasks: x.Tasks, Throttled: x.Throttled, Periods: x.Periods,
		Receive: x.Receive, Send: x.Send, Stolen: x.Stolen, Work: x.Work,
	}
}
