package netcpu

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"slices"
	"time"

	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/feature"
	"github.com/fairlead-project/fairlead/feature/netcpu/account"
)

// measurement holds the counters of the accounts and the scheduler, and the measures in force, at one
// moment. Report, SelfReport and Export are projections of it.
type measurement struct {
	account.Reading
	inForce
	running []container.Container
	used    map[container.ID]usage // of the running containers
	// CPU time that containers and tasks of the host (0) have lost to packets of others: by victim and
	// culprit, and summed by victim and by culprit.
	stolenBy      map[container.ID]map[container.ID]time.Duration
	stolen, taken map[container.ID]time.Duration
}

// measure takes a measurement. If the Meter fails, it returns the Meter's error and all other parts.
func (x *Accounts) measure() (measurement, error) {
	r := measurement{
		running:  x.Containers.Running(),
		used:     make(map[container.ID]usage),
		stolenBy: make(map[container.ID]map[container.ID]time.Duration),
		stolen:   make(map[container.ID]time.Duration),
		taken:    make(map[container.ID]time.Duration),
	}
	x.used.only(r.running, x.Since)
	for _, c := range r.running {
		r.used[c.ID] = x.used.since(c, x.Proc)
	}
	if x.InForce != nil {
		r.inForce = x.InForce()
	}
	var err error
	if r.Reading, err = x.Meter.Read(); err != nil {
		return r, err
	}
	for of, d := range r.Thefts {
		if d <= 0 || !of.Loss() {
			continue
		}
		victim := of.Victim.Container
		if r.stolenBy[victim] == nil {
			r.stolenBy[victim] = make(map[container.ID]time.Duration)
		}
		r.stolenBy[victim][of.Culprit] += d
		r.stolen[victim] += d
		r.taken[of.Culprit] += d
	}
	return r, nil
}

// Report implements feature.Reporter.
func (x *Accounts) Report(_ context.Context, of *container.Container, _ api.Ask) (any, error) {
	r, err := x.measure()
	switch {
	case errors.Is(err, ErrNoAccounts):
		return nil, &api.Error{Status: http.StatusServiceUnavailable, Code: "unavailable", Text: err.Error()}
	case err != nil:
		return nil, fmt.Errorf("read whose packets took whose CPU time: %w", err)
	}
	n := x.wire(r)
	if of != nil {
		n.Accounts = slices.DeleteFunc(n.Accounts, func(a api.NetCPUAccount) bool { return a.Container != api.ID(of.ID) })
		n.Matrix = slices.DeleteFunc(n.Matrix, func(t api.NetCPUTheft) bool { return t.Victim != api.ID(of.ID) && t.Culprit != api.ID(of.ID) })
		if len(n.Accounts) == 0 { // the container has ended and never had a packet
			n.Accounts = append(n.Accounts, api.NetCPUAccount{Container: api.ID(of.ID), Name: of.Name, Ended: true})
		}
	}
	return n, nil
}

// SelfReport implements feature.SelfReporter. It shows a container neither which other containers
// exist nor how busy they are.
func (x *Accounts) SelfReport(context.Context) func(container.Container, *api.SelfReports) {
	var n api.NetCPU // empty without accounts
	if r, err := x.measure(); err == nil {
		n = x.wire(r)
	}
	return func(c container.Container, out *api.SelfReports) {
		i := slices.IndexFunc(n.Accounts, func(a api.NetCPUAccount) bool { return a.Container == api.ID(c.ID) })
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

// wire converts a measurement into the API's form. It names running containers, and ended ones as
// long as Containers knows them.
func (x *Accounts) wire(r measurement) api.NetCPU {
	rows := map[container.ID]*api.NetCPUAccount{0: {Name: "system"}}
	for _, c := range r.running {
		rows[c.ID] = &api.NetCPUAccount{Container: api.ID(c.ID), Name: c.Name}
	}
	row := func(id container.ID) *api.NetCPUAccount {
		a := rows[id]
		if a == nil {
			c, _ := x.Containers.Lookup(id)
			a = &api.NetCPUAccount{Container: api.ID(id), Name: c.Name, Ended: true}
			rows[id] = a
		}
		return a
	}
	n := api.NetCPU{
		Since: x.Since, Taken: r.Taken, Softirq: r.Softirq.Seconds(), Thread: r.Thread.Seconds(), Lost: r.Lost,
		Accounts: []api.NetCPUAccount{}, Matrix: []api.NetCPUTheft{},
	}
	charged := r.Gone
	for id, acc := range r.Accounts {
		a := row(id)
		for kind := range account.Protocols {
			a.Work = appendWork(a.Work, "receive", kind.String(), acc.Receive[kind])
			a.Work = appendWork(a.Work, "send", kind.String(), acc.Send[kind])
			a.Receive += acc.Receive[kind].CPU.Seconds()
			a.Send += acc.Send[kind].CPU.Seconds()
			charged += acc.Receive[kind].CPU + acc.Send[kind].CPU
		}
		a.Own = acc.Own.Seconds()
		slices.SortFunc(a.Work, func(p, q api.NetCPUWork) int { return cmp.Compare(q.Seconds, p.Seconds) })
	}
	n.Charged = charged.Seconds()

	for _, of := range ranked(r.Thefts) {
		w := api.NetCPUTheft{Kind: of.Victim.Kind.String(), Victim: api.ID(of.Victim.Container), Culprit: api.ID(of.Culprit), Seconds: r.Thefts[of].Seconds()}
		w.CulpritName = row(of.Culprit).Name
		if w.Victim != 0 {
			w.VictimName = row(of.Victim.Container).Name
		}
		n.Matrix = append(n.Matrix, w)
	}
	for culprit, d := range r.taken {
		row(culprit).Taken = d.Seconds()
	}
	for victim, culprits := range r.stolenBy {
		if victim == 0 {
			continue // the matrix has the host's loss
		}
		a := row(victim)
		a.Stolen = r.stolen[victim].Seconds()
		for _, id := range slices.Sorted(maps.Keys(culprits)) {
			a.StolenBy = append(a.StolenBy, api.NetCPUCulprit{Container: api.ID(id), Name: row(id).Name, Seconds: culprits[id].Seconds()})
		}
		slices.SortStableFunc(a.StolenBy, func(p, q api.NetCPUCulprit) int { return cmp.Compare(q.Seconds, p.Seconds) })
	}

	n.System = *rows[0]
	delete(rows, 0)
	for id, a := range rows {
		if a.Ended && a.Network() <= 0 && a.Stolen <= 0 {
			continue
		}
		u := r.used[id]
		a.Tasks, a.Throttled, a.Periods, a.Quota = u.tasks.Seconds(), u.throttled.Seconds(), u.periods, u.quota
		if u.counted {
			w := u.waited.Seconds()
			lost, active := u.lost.Seconds(), u.active.Seconds()
			a.Waited, a.WaitedCPUs, a.Active = &w, &lost, active
		}
		r.wire(a)
		n.Accounts = append(n.Accounts, *a)
	}
	for _, p := range r.Points {
		n.Uplinks = append(n.Uplinks, api.NetCPUUplink{Device: p.Device, NetNS: p.Netns, DropsBy: p.By, Why: p.Why})
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

// Export implements feature.Exporter. It omits counters that cannot be read.
func (x *Accounts) Export() feature.Snapshot {
	x.exporting.Lock() // held until pairs has the reading, so that pairs gets readings in order
	defer x.exporting.Unlock()
	r, err := x.measure()
	s := feature.Snapshot{Taken: time.Now(), Help: help, Samples: r.usage()}
	if err == nil {
		s.Samples = append(s.Samples, r.samples(&x.pairs)...)
	}
	return s
}

// usage returns the samples of the scheduler's counters.
func (r measurement) usage() (to []feature.Sample) {
	for _, c := range r.running {
		of := r.used[c.ID]
		if of.tasks == 0 {
			continue // unknown: the container has just ended
		}
		to = append(to,
			feature.Sample{Container: c.ID, Name: "netcpu_tasks_seconds_total", Value: of.tasks.Seconds()},
			feature.Sample{Container: c.ID, Name: "netcpu_throttled_seconds_total", Value: of.throttled.Seconds()})
	}
	return to
}

// samples returns the samples of the accounts. pairs chooses the series of the matrix.
func (r measurement) samples(pairs *pairs) (to []feature.Sample) {
	runs := map[container.ID]bool{0: true}
	for _, c := range r.running {
		runs[c.ID] = true
	}
	add := func(id container.ID, name string, v float64, labels ...feature.Label) {
		to = append(to, feature.Sample{Container: id, Name: name, Labels: labels, Value: v})
	}
	var system time.Duration
	for id, acc := range r.Accounts {
		for protocol := range account.Protocols {
			for _, way := range []struct {
				name string
				account.Work
			}{{"receive", acc.Receive[protocol]}, {"send", acc.Send[protocol]}} {
				if way.Packets == 0 && way.CPU == 0 {
					continue
				}
				if id == 0 {
					system += way.CPU
				}
				labels := []feature.Label{{Name: "direction", Value: way.name}, {Name: "protocol", Value: protocol.String()}}
				add(id, "netcpu_seconds_total", way.CPU.Seconds(), labels...)
				add(id, "netcpu_packets_total", float64(way.Packets), labels...)
			}
		}
	}
	for name, of := range map[string]map[container.ID]time.Duration{"netcpu_stolen_seconds_total": r.stolen, "netcpu_taken_seconds_total": r.taken} {
		for id, d := range of {
			if id != 0 { // the matrix has the host's
				add(id, name, d.Seconds())
			}
		}
	}
	show, other := pairs.split(r.Thefts, maxPairs, func(id container.ID) bool { return runs[id] })
	for _, of := range show {
		add(0, "netcpu_theft_seconds_total", r.Thefts[of].Seconds(), feature.Label{Name: "kind", Value: of.Victim.Kind.String()},
			party("victim", of.Victim.Container, "host"), party("culprit", of.Culprit, "system"))
	}
	if other > 0 {
		const o = "other"
		add(0, "netcpu_theft_seconds_total", other.Seconds(), feature.Label{Name: "kind", Value: o}, party("victim", 0, o), party("culprit", 0, o))
	}
	add(0, "netcpu_measured_seconds_total", r.Softirq.Seconds(), feature.Label{Name: "where", Value: "softirq"})
	add(0, "netcpu_measured_seconds_total", r.Thread.Seconds(), feature.Label{Name: "where", Value: "thread"})
	add(0, "netcpu_system_seconds_total", system.Seconds())
	add(0, "netcpu_lost_events_total", float64(r.Lost))
	return to
}

// party returns a label that names a container, or has the value none for ID 0.
func party(name string, id container.ID, none string) feature.Label {
	if id != 0 {
		return feature.Label{Name: name, Container: id}
	}
	return feature.Label{Name: name, Value: none}
}
