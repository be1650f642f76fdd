// Package auto chooses the mode of the containers whose mode is auto, from the
// accounts of whose packets took whose CPU time. It is pure: it reads and changes
// nothing itself, and it knows no time but that of the readings. Package netcpu
// gives it the readings and hands its choice on as decisions.
package auto

import (
	"maps"
	"slices"
	"time"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/feature/netcpu/account"
	"github.com/fairlead-project/fairlead/policy"
)

// Chooser chooses the mode that is in force for the containers in the mode auto: it
// observes them, and while one's packets rob others, isolates it. One that
// cannot be isolated, as no veth leads to it, is charged instead, and so is one
// that robs by what it sends: isolation is of what is received. Those who lose
// time to it are charged as well, which for them is a credit. It depends on
// nothing but the readings that it is given, and is not safe for concurrent use.
// The zero value knows no container.
type Chooser struct {
	last    account.Reading
	threads map[container.ID]time.Duration
	of      map[container.ID]*state
}

// state is what a Chooser keeps of one container.
type state struct {
	rule
	since time.Time // of the last change
}

// Choice is the mode of one container.
type Choice struct {
	Container container.ID
	Mode      policy.NetCPU // observe, isolate, or charge
	Reason    string        // of the last change; "" before the first
	Since     time.Time

	// Of the last window, while it is isolated: what that cost the container, and what its
	// packets would have taken from others, both CPU time.
	Cost, Spared time.Duration
}

// Adopt takes over that a container was isolated before the first reading:
// it is enforced already, and goes back when its packets have been calm.
func (a *Chooser) Adopt(id container.ID, reason string, since time.Time) {
	if a.of == nil {
		a.of = make(map[container.ID]*state)
	}
	a.of[id] = &state{rule: rule{role: receiver, patience: calmFor, reason: reason}, since: since}
}

// Next takes into account what happened since the last reading, and says what is
// in force now, in the order of of: of each the container and, in its Settings,
// what it may take (NetCPUSteal). Containers that are not in of are forgotten;
// but unless of is complete, not those that are enforced: whose labels are not known
// yet, or not to be had, is not in it.
// name is used to say who was robbed.
// threads is the CPU time of each container's NAPI threads so far.
func (a *Chooser) Next(r account.Reading, threads map[container.ID]time.Duration, of []policy.Target, complete bool, name func(container.ID) string) []Choice {
	d := between(a.last, r)
	d.threads = make(map[container.ID]time.Duration, len(threads))
	for id, ran := range threads {
		d.threads[id] = max(0, ran-a.threads[id])
	}
	a.last, a.threads = r, threads
	next := make(map[container.ID]*state, len(of))
	out := make([]Choice, 0, len(of))
	for _, t := range of {
		c, steal := t.Container, usualSteal
		if t.Settings.NetCPUSteal != nil {
			steal = *t.Settings.NetCPUSteal
		}
		w := a.of[c.ID]
		if w == nil {
			w = &state{}
		}
		next[c.ID] = w
		if w.next(d.evidence(c.ID, name), steal).changed {
			w.since = r.Taken
		}
		m := Choice{Container: c.ID, Mode: policy.NetCPUObserve, Reason: w.reason, Since: w.since}
		if w.role != bystander {
			m.Mode = enforcement(c, w.role)
		}
		if m.Mode == policy.NetCPUIsolate {
			m.Cost, m.Spared = w.bargain.extra, w.bargain.spared
		}
		out = append(out, m)
	}
	for id, w := range a.of {
		if !complete && w.role != bystander && next[id] == nil {
			next[id] = w
		}
	}
	a.of = next
	return out
}

// enforcement is what can be done about a container's packets.
func enforcement(c container.Container, r role) policy.NetCPU {
	if r == receiver && !c.HostNetwork && slices.ContainsFunc(c.Interfaces, container.Interface.HasHostEnd) {
		return policy.NetCPUIsolate
	}
	return policy.NetCPUCharge
}

// reading is the difference of two readings.
type reading struct {
	length  time.Duration
	network map[container.ID]time.Duration // all that a container's packets cost
	sent    map[container.ID]time.Duration // the part of that for what it sent
	bytes   map[container.ID]uint64        // of them
	threads map[container.ID]time.Duration // CPU time of its NAPI threads
	thefts  []account.Theft                // of what is somebody else's
	wanted  float64                        // how often somebody wanted the CPU that a softirq took
	exact   sums                           // of what thefts may not have in full
}

// between subtracts. Accounts that went back, as they are another agent's or of a
// slot that was used again, count from zero; without a reading before there is
// no length, by which nothing is judged.
func between(a, b account.Reading) reading {
	d := reading{network: make(map[container.ID]time.Duration, len(b.Accounts)), sent: make(map[container.ID]time.Duration), bytes: make(map[container.ID]uint64), wanted: 1}
	if a.Taken.IsZero() {
		return d
	}
	d.length, d.exact = b.Taken.Sub(a.Taken), grown(a, b)
	for _, x := range b.Accounts {
		d.network[x.Container], d.sent[x.Container], d.bytes[x.Container] = x.CPU(), x.SendCPU(), x.Bytes()
	}
	for _, x := range a.Accounts {
		if was := x.CPU(); was <= d.network[x.Container] {
			d.network[x.Container] -= was
			d.sent[x.Container] -= min(x.SendCPU(), d.sent[x.Container])
			d.bytes[x.Container] -= min(x.Bytes(), d.bytes[x.Container])
		}
	}
	type pair struct {
		victim  account.Party
		culprit container.ID
	}
	before := make(map[pair]time.Duration, len(a.Thefts))
	for _, t := range a.Thefts {
		before[pair{t.Victim, t.Culprit}] = t.CPU
	}
	var tasks, others time.Duration
	for _, t := range b.Thefts {
		if was := before[pair{t.Victim, t.Culprit}]; was <= t.CPU {
			t.CPU -= was
		}
		if t.CPU == 0 {
			continue
		}
		own := t.Victim.Container == t.Culprit && t.Culprit != account.System
		switch {
		case t.Victim.Kind == account.Idle, t.Victim.Kind == account.Peer, own && t.Victim.Kind == account.Task:
			others += t.CPU
		case t.Victim.Kind == account.Task:
			tasks += t.CPU
		}
		if !own {
			d.thefts = append(d.thefts, t)
		}
	}
	if tasks+others > 0 {
		d.wanted = float64(tasks) / float64(tasks+others)
	}
	return d
}

// evidence is what one container's packets did.
//
// ksoftirqd and the NAPI threads of the host take their time at the expense of
// whoever wants to run, if anybody does. Whether somebody does nothing says of
// them but the softirqs of the same time: where these interrupt others' tasks,
// somebody does, and where they come upon idle CPUs, upon the receiver itself or
// upon whoever sent the packets, nobody.
func (d reading) evidence(id container.ID, name func(container.ID) string) evidence {
	e := evidence{length: d.length, network: d.network[id], sent: d.sent[id], receive: d.network[id] - d.sent[id], threads: d.threads[id], bytes: d.bytes[id]}
	sum := make(map[string]time.Duration)
	for _, t := range d.thefts {
		if t.Culprit != id {
			if t.Victim.Container == id && t.Victim.Kind == account.Task {
				e.lost += t.CPU
			}
			continue
		}
		switch v := t.Victim; {
		case v.Kind == account.Peer:
			e.peers += t.CPU
		case v.Kind == account.Idle:
			e.idle += t.CPU
		case v.Kind == account.Ksoftirqd, v.Kind == account.NAPI && v.Container == account.System:
			lost := time.Duration(float64(t.CPU) * d.wanted)
			e.idle += t.CPU - lost
			sum["those who waited for "+v.Kind.String()+" threads"] += lost
		case v.Container == account.System:
			sum["tasks of the host"] += t.CPU
		default:
			sum[name(v.Container)] += t.CPU
		}
	}
	d.untold(id, &e, sum)
	for _, who := range slices.Sorted(maps.Keys(sum)) {
		e.victims = append(e.victims, victim{who, sum[who]})
	}
	return e
}
