// Package auto chooses the mode in force for containers in the mode auto. It decides from accounts,
// which say how much CPU time a container's packets took and from whom. It is pure: it reads and
// changes nothing itself, and its only clock is the time of the readings. Package netcpu passes it
// readings and turns its choices into decisions.
package auto

import (
	"maps"
	"slices"
	"time"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/feature/netcpu/account"
	"github.com/fairlead-project/fairlead/feature/netcpu/law"
	"github.com/fairlead-project/fairlead/policy"
)

// Chooser chooses the mode in force for the containers in the mode auto. It isolates a container
// while its packets rob others, and otherwise only observes it. It charges the container instead if
// no veth leads to it, or if it robs by sending, because isolation covers only received packets. It
// also charges containers that lose time to others, which gives them credit. It depends only on its
// readings, and is not safe for concurrent use. The zero value knows no container.
type Chooser struct {
	last account.Reading
	of   map[container.ID]*state
}

// state is a Chooser's state of one container.
type state struct {
	rule
	since time.Time     // of the last change
	most  time.Duration // limit of what its packets may take in a second
}

// Choice is the mode of one container.
type Choice struct {
	Container container.ID
	Mode      policy.NetCPU // observe, isolate, or charge
	Reason    string        // of the last change; "" before the first
	Since     time.Time
}

// Adopt records that an earlier agent isolated a container. The isolation is in force, and ends once
// the container's packets have been calm.
func (a *Chooser) Adopt(id container.ID, reason string, since time.Time) {
	if a.of == nil {
		a.of = make(map[container.ID]*state)
	}
	a.of[id] = &state{rule: rule{role: receiver, patience: law.Calm, reason: reason}, since: since}
}

// Alarm reports whether Next should run before the end of the second, because the packets of a container
// that does not pay seem to have taken more than they may in a second. It calls read only if there is a
// container that does not pay. The reading needs no thefts.
func (a *Chooser) Alarm(read func() (account.Reading, error)) bool {
	free := make(map[container.ID]time.Duration) // limit of Took, for containers that do not pay
	for id, x := range a.last.Accounts {
		if w := a.of[id]; w != nil && w.role != receiver && w.role != sender {
			free[id] = x.Took + w.most
		}
	}
	if len(free) == 0 {
		return false
	}
	r, err := read()
	for id, most := range free {
		if err == nil && r.Accounts[id].Took > most {
			return true
		}
	}
	return false
}

// Next judges the time since the last reading and returns the mode in force for each container, in the
// order of of. Settings.NetCPUSteal of a target is the share of a CPU that its container may take. Next
// forgets containers that are not in of. Unless of is complete, it remembers enforced ones: of lacks a
// container until its labels are known, and if they cannot be read. name returns the names of victims
// for reasons.
func (a *Chooser) Next(r account.Reading, of []policy.Target, complete bool, name func(container.ID) string) []Choice {
	d := between(a.last, r)
	if a.last.Taken.IsZero() || d.length >= windowMin || len(of) == 0 {
		a.last = r
	}
	d.many = d.sumOf(of)
	next := make(map[container.ID]*state, len(of))
	out := make([]Choice, 0, len(of))
	for _, t := range of {
		c, steal := t.Container, stealOf(t)
		w := a.of[c.ID]
		if w == nil {
			w = &state{}
		}
		next[c.ID], w.most = w, inSecond(steal)
		e := d.evidence(c.ID, name)
		if t.Settings.NetCPU == policy.NetCPUIsolate {
			e.lost, e.many = 0, d.many // isolate gives no credit for lost time
		}
		if w.next(e, steal) {
			w.since = r.Taken
		}
		m := Choice{Container: c.ID, Mode: policy.NetCPUObserve, Reason: w.reason, Since: w.since}
		if w.role != bystander {
			m.Mode = enforcement(t, w.role)
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

// stealOf returns the share of a CPU that a container's packets may take from others.
func stealOf(t policy.Target) float64 {
	if s := t.Settings.NetCPUSteal; s != nil {
		return *s
	}
	return law.Steal
}

// enforcement returns the mode that limits a container's packets.
func enforcement(t policy.Target, r role) policy.NetCPU {
	if t.Settings.NetCPU == policy.NetCPUIsolate {
		return policy.NetCPUIsolate
	}
	c := t.Container
	if r == receiver && !c.HostNetwork && slices.ContainsFunc(c.Interfaces, container.Interface.HasHostEnd) {
		return policy.NetCPUIsolate
	}
	return policy.NetCPUCharge
}

// reading is the difference of two readings, without thefts from the culprit's own contexts.
type reading struct {
	account.Reading
	length time.Duration
	wanted float64       // how often others wanted the CPU of a softirq
	many   time.Duration // result of sumOf
}

// between returns the difference of two readings. Without an earlier reading the length is 0, and there
// is no evidence.
func between(a, b account.Reading) reading {
	d := reading{wanted: 1}
	if a.Taken.IsZero() {
		return d
	}
	d.Reading, d.length = b.Since(a), b.Taken.Sub(a.Taken)
	var tasks, others time.Duration
	for of, took := range d.Thefts {
		own := of.Victim.Container == of.Culprit && of.Culprit != account.System
		switch {
		case of.Victim.Kind == account.Idle, of.Victim.Kind == account.Peer, own && of.Victim.Kind == account.Task:
			others += took
		case of.Victim.Kind == account.Task:
			tasks += took
		}
		if own {
			delete(d.Thefts, of)
		}
	}
	if tasks+others > 0 {
		d.wanted = float64(tasks) / float64(tasks+others)
	}
	return d
}

// sumOf returns the time that packets of containers in the mode isolate took from others. It leaves out
// containers that took more than their own limit, because they pay anyway.
func (d reading) sumOf(of []policy.Target) (sum time.Duration) {
	for _, t := range of {
		if t.Settings.NetCPU == policy.NetCPUIsolate {
			if r := d.evidence(t.Container.ID, container.ID.String).robbed(); r <= inSecond(stealOf(t)*max(1, d.length.Seconds())) {
				sum += r
			}
		}
	}
	return sum
}

// evidence returns the effects of one container's packets.
//
// ksoftirqd and the host's NAPI threads take time from any task that wants to run. Softirqs of the same
// time show how often one does: they interrupt tasks of other containers if one wants to run, and
// otherwise idle CPUs, the receiver or the sender.
func (d reading) evidence(id container.ID, name func(container.ID) string) evidence {
	x := d.Accounts[id]
	// The container pays for packets that it sends in its own time, mostly in system calls.
	e := evidence{length: d.length, network: x.CPU(), sends: x.SendCPU()-x.Own > (x.CPU()-x.Own)/2}
	sum := make(map[string]time.Duration)
	for of, took := range d.Thefts {
		if of.Culprit != id {
			if of.Victim.Container == id && of.Victim.Kind == account.Task {
				e.lost += took
			}
			continue
		}
		switch v := of.Victim; {
		case v.Kind == account.Peer:
			e.peers += took
		case v.Kind == account.Idle:
			e.idle += took
		case v.Kind == account.Ksoftirqd, v.Kind == account.NAPI && v.Container == account.System:
			lost := time.Duration(float64(took) * d.wanted)
			e.idle += took - lost
			sum["those who waited for "+v.Kind.String()+" threads"] += lost
		case v.Container == account.System:
			sum["tasks of the host"] += took
		default:
			sum[name(v.Container)] += took
		}
	}
	d.untold(id, &e, sum)
	for _, who := range slices.Sorted(maps.Keys(sum)) {
		e.victims = append(e.victims, victim{who, sum[who]})
	}
	return e
}

// untold adds the thefts that have no pair to the evidence about a container: the table of pairs has
// room for some hundred containers. ksoftirqd's part in them is unknown, so all of them count like
// ksoftirqd's. It adds nothing if every pair had room: pairs are read a moment after the accounts, so
// a difference is then no theft.
func (d reading) untold(id container.ID, e *evidence, took map[string]time.Duration) {
	if d.Lost == 0 {
		return
	}
	robbed, rest := d.Accounts[id].Robbed, d.Accounts[id].Took
	for of, cpu := range d.Thefts {
		if of.Culprit == id && (of.Victim.Kind == account.Task || of.Victim.Kind == account.Peer || of.Victim.Kind == account.Ksoftirqd) {
			rest -= cpu
		}
		if of.Victim.Container == id && of.Victim.Kind == account.Peer {
			robbed -= cpu
		}
	}
	e.lost = max(e.lost, robbed)
	if rest <= 0 {
		return
	}
	lost := time.Duration(float64(rest) * d.wanted)
	e.idle += rest - lost
	took["others, not told apart"] += lost
}
