package netcpu

import (
	"cmp"
	"context"
	"errors"
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
	"github.com/fairlead-project/fairlead/feature/netcpu/auto"
	"github.com/fairlead-project/fairlead/kernel/journal"
	"github.com/fairlead-project/fairlead/kernel/sched"
	"github.com/fairlead-project/fairlead/policy"
)

// Meter charges the CPU time of packets to containers. *Netcpu is one.
type Meter interface {
	// Read returns all counters since the meter was made. Errors: ErrNoAccounts.
	Read() (account.Reading, error)
}

// Accounts is what the feature says about whose packets took whose CPU time: in
// its report, on the metrics page, to containers about themselves, and in its
// decisions about those in the mode auto. Each Netcpu has one.
type Accounts struct {
	Meter      Meter
	Containers feature.Containers
	Since      time.Time // when Meter began to count

	// Threads gives the CPU time of the NAPI threads of each container that is isolated;
	// nil: nobody is.
	Threads func() map[container.ID]time.Duration

	used    usages
	modes   auto.Chooser // of Adopt and Decide
	bargain bargains

	reading sync.Mutex // one Export at a time; guards pairs
	pairs   pairs
}

// Report implements feature.Reporter.
func (x *Accounts) Report(_ context.Context, of *container.Container, _ api.Ask) (any, error) {
	return x.report(of)
}

func (x *Accounts) report(of *container.Container) (api.NetCPU, error) {
	r, err := x.Meter.Read()
	switch {
	case errors.Is(err, ErrNoAccounts):
		return api.NetCPU{}, &api.Error{Status: http.StatusServiceUnavailable, Code: "unavailable", Text: err.Error()}
	case err != nil:
		return api.NetCPU{}, fmt.Errorf("read whose packets took whose CPU time: %w", err)
	}
	running := x.running()
	n := wire(r, running, x.Containers.Lookup)
	n.Since = x.Since
	if of != nil {
		n.Accounts = slices.DeleteFunc(n.Accounts, func(a api.NetCPUAccount) bool { return a.Container != of.ID })
		n.Matrix = slices.DeleteFunc(n.Matrix, func(t api.NetCPUTheft) bool { return t.Victim != of.ID && t.Culprit != of.ID })
		if len(n.Accounts) == 0 { // has ended, and never had a packet
			n.Accounts = append(n.Accounts, api.NetCPUAccount{Container: of.ID, Name: of.Name, Ended: true})
		}
	}
	dirs := make(map[container.ID]container.Cgroup, len(running))
	for _, c := range running {
		dirs[c.ID] = c.Cgroup
	}
	for i := range n.Accounts {
		a := &n.Accounts[i]
		u := x.used.since(a.Container, dirs[a.Container])
		a.Tasks, a.Throttled, a.Periods = u.tasks.Seconds(), u.throttled.Seconds(), u.periods
		a.IsolationCost, a.IsolationSpared = x.bargain.of(a.Container)
	}
	return n, nil
}

// PacketWork implements feature.Worker.
func (x *Accounts) PacketWork() (map[container.ID][]time.Duration, error) {
	r, err := x.Meter.Read()
	return r.ByCPU, err
}

// wire puts a reading into the API's form, with the names of those who
// run, and of those who have ended as long as lookup knows them.
func wire(r account.Reading, running []container.Container, lookup func(container.ID) (container.Container, bool)) api.NetCPU {
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
		if t.CPU <= 0 || ownTime(t) {
			continue
		}
		sec := t.CPU.Seconds()
		w := api.NetCPUTheft{Kind: t.Victim.Kind.String(), Victim: t.Victim.Container, Culprit: t.Culprit, Seconds: sec}
		w.CulpritName = row(t.Culprit).Name
		if w.Victim != 0 {
			w.VictimName = row(w.Victim).Name
		}
		n.Matrix = append(n.Matrix, w)
		if !isLoss(t) {
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

// running lists the containers that run, of which usages know from now on.
func (x *Accounts) running() []container.Container {
	list := x.Containers.Running()
	x.used.only(list, x.Since)
	return list
}

// SelfReport implements feature.SelfReporter. A container is not told who else
// there is, nor what tells how busy others are.
func (x *Accounts) SelfReport(context.Context) func(container.Container, *api.SelfReports) {
	n, _ := x.report(nil) // without accounts, nothing is told
	return func(c container.Container, out *api.SelfReports) {
		i := slices.IndexFunc(n.Accounts, func(a api.NetCPUAccount) bool { return a.Container == c.ID })
		if i < 0 {
			return
		}
		a := n.Accounts[i]
		out.NetCPU = &api.SelfNetCPU{
			Since: n.Since, Taken: n.Taken, Tasks: a.Tasks, Throttled: a.Throttled, Periods: a.Periods,
			Receive: a.Receive, Send: a.Send, Stolen: a.Stolen, Work: a.Work,
		}
	}
}

// ownTime says whether work ran in the time of whom it was for.
func ownTime(t account.Theft) bool {
	return t.Victim.Container == t.Culprit && (t.Victim.Kind == account.Task || t.Victim.Kind == account.NAPI)
}

// isLoss says whether work ran in time that somebody else lost by it: a
// container's, or that of a task of the host. The kernel's threads for all
// and idle CPUs lose nothing, and neither does whoever sent the packets.
func isLoss(t account.Theft) bool {
	return !ownTime(t) && (t.Victim.Kind == account.Task || t.Victim.Kind == account.NAPI && t.Victim.Container != 0)
}

// modeKey is the policy key that says which mode is in force.
const modeKey = "fairlead.netcpu"

// Adopt implements feature.Decider: a thread that was moved for a container, and
// only for some time, was moved because auto had isolated it.
func (x *Accounts) Adopt(left []journal.Entry) (ds []policy.Decision) {
	const reason = "decided by an earlier agent, which was killed"
	for _, e := range left {
		id := container.ID(e.Owner.Container)
		if id == 0 || e.Ref.Kind != sched.KindKthread {
			continue
		}
		ds = append(ds, policy.Decision{
			Container: id, Key: modeKey, Value: string(policy.NetCPUIsolate), Expiry: e.Expiry,
			Instead: string(policy.NetCPUAuto), Reason: reason, Since: e.When,
		})
		x.modes.Adopt(id, reason, e.When)
	}
	return ds
}

// Decide implements feature.Decider.
func (x *Accounts) Decide(targets []policy.Target, complete bool) (ds []policy.Decision, err error) {
	targets = slices.DeleteFunc(targets, func(t policy.Target) bool { return t.Settings.NetCPU != policy.NetCPUAuto })
	if len(targets) == 0 {
		return nil, nil // reading the accounts costs something
	}
	r, err := x.Meter.Read()
	if err != nil {
		return nil, err
	}
	var threads map[container.ID]time.Duration
	if x.Threads != nil {
		threads = x.Threads()
	}
	choices := x.modes.Next(r, threads, targets, complete, x.nameOf)
	x.bargain.add(r.Taken, choices)
	for _, m := range choices {
		if m.Since.IsZero() {
			continue // nothing has been decided yet
		}
		ds = append(ds, policy.Decision{
			Container: m.Container, Key: modeKey, Value: string(m.Mode),
			Instead: string(policy.NetCPUAuto), Reason: m.Reason, Since: m.Since.UTC(),
		})
	}
	return ds, nil
}

func (x *Accounts) nameOf(id container.ID) string {
	if c, ok := x.Containers.Lookup(id); ok && c.Name != "" {
		return c.Name
	}
	return id.String()
}
