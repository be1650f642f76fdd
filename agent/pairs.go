package agent

import (
	"cmp"
	"slices"
	"time"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/feature"
	"github.com/fairlead-project/fairlead/feature/netcpu/account"
)

// maxPairs bounds the series of the matrix on the metrics page.
const maxPairs = 500

// pairs chooses which entries of the matrix are series of their own: the
// largest. One that has a place keeps it until one of its containers ends, and
// what goes into the sum of the others stays there, so that no counter ever
// goes back. Its zero value is ready.
type pairs struct {
	shown map[pair]bool
	last  map[pair]time.Duration // of all, as of the reading before
	other time.Duration
}

type pair struct {
	victim  account.Party
	culprit container.ID
}

// split gives the entries that are series of their own, at most limit, and the
// sum of all that others have added up to since the first reading.
func (p *pairs) split(thefts []account.Theft, limit int, runs func(container.ID) bool) (show []account.Theft, other time.Duration) {
	thefts = slices.DeleteFunc(slices.Clone(thefts), func(t account.Theft) bool { return t.CPU <= 0 || own(t) })
	slices.SortFunc(thefts, func(x, y account.Theft) int {
		return cmp.Or(cmp.Compare(y.CPU, x.CPU), cmp.Compare(x.Culprit, y.Culprit), cmp.Compare(x.Victim.Container, y.Victim.Container), cmp.Compare(x.Victim.Kind, y.Victim.Kind))
	})
	shown := make(map[pair]bool, limit)
	for _, first := range []bool{true, false} { // those that have a place, then new ones
		for _, t := range thefts {
			k := pair{t.Victim, t.Culprit}
			if len(shown) < limit && p.shown[k] == first && runs(t.Culprit) && runs(t.Victim.Container) {
				shown[k] = true
			}
		}
	}
	last := make(map[pair]time.Duration, len(thefts))
	for _, t := range thefts {
		k := pair{t.Victim, t.Culprit}
		last[k] = t.CPU
		if shown[k] {
			show = append(show, t)
			continue
		}
		if before := p.last[k]; t.CPU >= before {
			p.other += t.CPU - before
		} else {
			p.other += t.CPU
		}
	}
	p.shown, p.last = shown, last
	return show, p.other
}

// snapshot puts a reading into samples for the metrics page. What cannot be
// read is not on it.
//
//	netcpu_seconds_total, netcpu_packets_total  by container (none: the system),
//	                             direction and protocol
//	netcpu_stolen_seconds_total  the container's time that went into the packets
//	                             of others
//	netcpu_taken_seconds_total   time of others that went into the container's
//	netcpu_theft_seconds_total   by kind, victim and culprit: the matrix
//	netcpu_measured_seconds_total  packet work as a whole, in softirqs and in
//	                             NAPI threads
//	netcpu_system_seconds_total  that of packets of no container
//	netcpu_lost_events_total     events that were not counted
func (x *accounts) snapshot(runs func(container.ID) bool) feature.Snapshot {
	if x == nil {
		return feature.Snapshot{}
	}
	x.mu.Lock() // until the pairs have seen the reading: they take one after the other
	defer x.mu.Unlock()
	r, err := x.readLocked()
	if err != nil {
		return feature.Snapshot{}
	}
	s := feature.Snapshot{Taken: r.Taken}
	add := func(id container.ID, name string, v float64, labels ...feature.Label) {
		s.Samples = append(s.Samples, feature.Sample{Container: id, Name: name, Labels: labels, Value: v})
	}
	var system time.Duration
	for _, acc := range r.Accounts {
		for protocol := range account.Protocols {
			for _, way := range []struct {
				name string
				account.Work
			}{{"receive", acc.Receive[protocol]}, {"send", acc.Send[protocol]}} {
				if way.Packets == 0 && way.CPU == 0 {
					continue
				}
				if acc.Container == 0 {
					system += way.CPU
				}
				labels := []feature.Label{{Name: "direction", Value: way.name}, {Name: "protocol", Value: protocol.String()}}
				add(acc.Container, "netcpu_seconds_total", way.CPU.Seconds(), labels...)
				add(acc.Container, "netcpu_packets_total", float64(way.Packets), labels...)
			}
		}
	}
	stolen, taken := make(map[container.ID]time.Duration), make(map[container.ID]time.Duration)
	for _, t := range r.Thefts {
		if felt(t) {
			stolen[t.Victim.Container] += t.CPU
			taken[t.Culprit] += t.CPU
		}
	}
	for id, d := range stolen {
		if id != 0 { // the host's loss is in the matrix
			add(id, "netcpu_stolen_seconds_total", d.Seconds())
		}
	}
	for id, d := range taken {
		if id != 0 {
			add(id, "netcpu_taken_seconds_total", d.Seconds())
		}
	}
	show, other := x.pairs.split(r.Thefts, maxPairs, runs)
	for _, t := range show {
		add(0, "netcpu_theft_seconds_total", t.CPU.Seconds(), feature.Label{Name: "kind", Value: t.Victim.Kind.String()},
			party1("victim", t.Victim.Container, "host"), party1("culprit", t.Culprit, "system"))
	}
	if other > 0 {
		const o = "other"
		add(0, "netcpu_theft_seconds_total", other.Seconds(), feature.Label{Name: "kind", Value: o}, party1("victim", 0, o), party1("culprit", 0, o))
	}
	add(0, "netcpu_measured_seconds_total", r.Softirq.Seconds(), feature.Label{Name: "where", Value: "softirq"})
	add(0, "netcpu_measured_seconds_total", r.Thread.Seconds(), feature.Label{Name: "where", Value: "thread"})
	add(0, "netcpu_system_seconds_total", system.Seconds())
	add(0, "netcpu_lost_events_total", float64(r.Lost))
	return s
}

// party1 is a label that is a container, or the word for none.
func party1(name string, id container.ID, none string) feature.Label {
	if id != 0 {
		return feature.Label{Name: name, Container: id}
	}
	return feature.Label{Name: name, Value: none}
}
