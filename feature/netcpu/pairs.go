package netcpu

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
	shown map[cell]bool
	last  map[cell]time.Duration // of all, as of the reading before
	other time.Duration
}

type cell struct {
	victim  account.Party
	culprit container.ID
}

// split gives the entries that are series of their own, at most limit, and the
// sum of all that others have added up to since the first reading.
func (p *pairs) split(thefts []account.Theft, limit int, runs func(container.ID) bool) (show []account.Theft, other time.Duration) {
	thefts = slices.DeleteFunc(slices.Clone(thefts), func(t account.Theft) bool { return t.CPU <= 0 || ownTime(t) })
	slices.SortFunc(thefts, func(x, y account.Theft) int {
		return cmp.Or(cmp.Compare(y.CPU, x.CPU), cmp.Compare(x.Culprit, y.Culprit), cmp.Compare(x.Victim.Container, y.Victim.Container), cmp.Compare(x.Victim.Kind, y.Victim.Kind))
	})
	shown := make(map[cell]bool, limit)
	for _, first := range []bool{true, false} { // those that have a place, then new ones
		for _, t := range thefts {
			k := cell{t.Victim, t.Culprit}
			if len(shown) < limit && p.shown[k] == first && runs(t.Culprit) && runs(t.Victim.Container) {
				shown[k] = true
			}
		}
	}
	last := make(map[cell]time.Duration, len(thefts))
	for _, t := range thefts {
		k := cell{t.Victim, t.Culprit}
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

// Export implements feature.Exporter. What cannot be read is not on the page.
func (x *Accounts) Export() feature.Snapshot {
	x.reading.Lock() // until the pairs have seen the reading: they take one after the other
	defer x.reading.Unlock()
	running := x.running()
	s := feature.Snapshot{Taken: time.Now(), Help: help, Samples: x.used.samples(running)}
	r, err := x.Meter.Read()
	if err != nil {
		return s
	}
	runs := map[container.ID]bool{0: true}
	for _, c := range running {
		runs[c.ID] = true
	}
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
		if isLoss(t) {
			stolen[t.Victim.Container] += t.CPU
			taken[t.Culprit] += t.CPU
		}
	}
	for name, of := range map[string]map[container.ID]time.Duration{"netcpu_stolen_seconds_total": stolen, "netcpu_taken_seconds_total": taken} {
		delete(of, 0) // the host's is in the matrix
		for id, d := range of {
			add(id, name, d.Seconds())
		}
	}
	show, other := x.pairs.split(r.Thefts, maxPairs, func(id container.ID) bool { return runs[id] })
	for _, t := range show {
		add(0, "netcpu_theft_seconds_total", t.CPU.Seconds(), feature.Label{Name: "kind", Value: t.Victim.Kind.String()},
			party("victim", t.Victim.Container, "host"), party("culprit", t.Culprit, "system"))
	}
	if other > 0 {
		const o = "other"
		add(0, "netcpu_theft_seconds_total", other.Seconds(), feature.Label{Name: "kind", Value: o}, party("victim", 0, o), party("culprit", 0, o))
	}
	add(0, "netcpu_measured_seconds_total", r.Softirq.Seconds(), feature.Label{Name: "where", Value: "softirq"})
	add(0, "netcpu_measured_seconds_total", r.Thread.Seconds(), feature.Label{Name: "where", Value: "thread"})
	add(0, "netcpu_system_seconds_total", system.Seconds())
	add(0, "netcpu_lost_events_total", float64(r.Lost))
	return s
}

// party is a label that is a container, or the word for none.
func party(name string, id container.ID, none string) feature.Label {
	if id != 0 {
		return feature.Label{Name: name, Container: id}
	}
	return feature.Label{Name: name, Value: none}
}
