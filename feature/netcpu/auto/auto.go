// Package auto chooses the mode in force for containers in the mode auto, from the accounts of the
// CPU time that their packets took, and from whom. It is pure: it reads and changes nothing itself,
// and its only clock is the time of the readings. Package netcpu passes it the readings and hands
// its choices on as decisions.
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

// Chooser chooses the mode in force for the containers in the mode auto. It observes them, and
// isolates a container while its packets rob others. It charges a container instead if that cannot
// be isolated because no veth leads to it, or if it robs by what it sends: isolation covers only
// what it receives. It also charges containers that lose time to others, which for them is a
// credit. It depends on nothing but its readings, and is not safe for concurrent use. The zero
// value knows no container.
type Chooser struct {
	last account.Reading
	of   map[container.ID]*state
}

// state is a Chooser's state of one container.
type state struct {
	rule
	since time.Time     // of the last change
	most  time.Duration // that its packets may take in a second
}

// Choice is the mode of one container.
type Choice struct {
	Container container.ID
	Mode      policy.NetCPU // observe, isolate, or charge
	Reason    string        // of the last change; "" before the first
	Since     time.Time
}

// Adopt records that an earlier agent isolated a container: the isolation is in force, and ends
// once the container's packets have been calm.
func (a *Chooser) Adopt(id container.ID, reason string, since time.Time) {
	if a.of == nil {
		a.of = make(map[container.ID]*state)
	}
	a.of[id] = &state{rule: rule{role: receiver, patience: law.Calm, reason: reason}, since: since}
}

// Alarm reports whether Next should not wait for the rest of a second: the packets of a container that
// does not pay seem to have taken more than they may in one. It calls read, which needs no thefts, only
// if there is such a container.
func (a *Chooser) Alarm(read func() (account.Reading, error)) bool {
	free := make(map[container.ID]time.Duration) // what their packets may have taken by then
	for _, x := range a.last.Accounts {
		if w := a.of[x.Container]; w != nil && w.role != receiver && w.role != sender {
			free[x.Container] = x.Took + w.most
		}
	}
	if len(free) == 0 {
		return false
	}
	r, err := read()
	return err == nil && slices.ContainsFunc(r.Accounts, func(x account.Account) bool {
		most, is := free[x.Container]
		return is && x.Took > most
	})
}

// Next takes the time since the last reading into account, and returns the mode in force for each
// container, in the order of of. A target's Settings contain the share that its container may take
// (NetCPUSteal). Next forgets containers that are not in of, except, unless of is complete,
// enforced ones: of does not contain a container before its labels are known, or if they cannot be
// read. name names the victims in reasons.
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
			e.lost, e.many = 0, d.many // it is not credited
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

// reading is the difference of two readings.
type reading struct {
	length  time.Duration
	network map[container.ID]time.Duration // all that a container's packets cost
	sends   map[container.ID]bool          // most of that in others' time is for what it sends
	thefts  []account.Theft                // from other contexts than the culprit's own
	wanted  float64                        // how often others wanted the CPU of a softirq
	many    time.Duration                  // of sumOf

	// Sums that need no room for each pair: what packets took from tasks and from ksoftirqd, and what
	// was taken from a container's tasks. They are empty if every pair had room: the pairs are read a
	// moment later, and the difference is no theft.
	took, robbed map[container.ID]time.Duration
}

// since subtracts an earlier value. One that went back, because it is another agent's or of a recycled
// slot, counts from zero.
func since(was, now time.Duration) time.Duration {
	if was > now {
		return now
	}
	return now - was
}

// between returns the difference of two readings. Without an earlier one the length is 0, and nothing is
// judged.
func between(a, b account.Reading) reading {
	d := reading{network: make(map[container.ID]time.Duration, len(b.Accounts)), sends: make(map[container.ID]bool), wanted: 1}
	if a.Taken.IsZero() {
		return d
	}
	d.length, d.took, d.robbed = b.Taken.Sub(a.Taken), make(map[container.ID]time.Duration), make(map[container.ID]time.Duration)
	before := make(map[container.ID]account.Account, len(a.Accounts))
	for _, x := range a.Accounts {
		before[x.Container] = x
	}
	for _, x := range b.Accounts {
		was := before[x.Container]
		if b.Lost > a.Lost {
			d.took[x.Container], d.robbed[x.Container] = since(was.Took, x.Took), since(was.Robbed, x.Robbed)
		}
		if was.CPU() > x.CPU() {
			was = account.Account{}
		}
		network, own := x.CPU()-was.CPU(), max(0, x.Own-was.Own)
		// What is sent in its own time is paid for: mostly by system calls of its tasks.
		d.network[x.Container], d.sends[x.Container] = network, x.SendCPU()-was.SendCPU()-own > (network-own)/2
	}
	earlier := make(map[account.Pair]time.Duration, len(a.Thefts))
	for _, t := range a.Thefts {
		earlier[account.Pair{Victim: t.Victim, Culprit: t.Culprit}] = t.CPU
	}
	var tasks, others time.Duration
	for _, t := range b.Thefts {
		t.CPU = since(earlier[account.Pair{Victim: t.Victim, Culprit: t.Culprit}], t.CPU)
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

// sumOf returns what the packets of all containers in the mode isolate took from others, without those
// which pay for their own part.
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

// evidence returns what one container's packets did.
//
// ksoftirqd and the NAPI threads of the host take their time from whatever task wants to run, if
// one does. Only the softirqs of the same time show whether one does: yes where they interrupt
// other containers' tasks; no where they hit idle CPUs, the receiver itself or the sender of the
// packets.
func (d reading) evidence(id container.ID, name func(container.ID) string) evidence {
	e := evidence{length: d.length, network: d.network[id], sends: d.sends[id]}
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

// untold adds the thefts without a pair to the evidence about a container: the table of pairs has
// room for some hundred containers. The part of ksoftirqd in them is not known, so all of them
// count like ksoftirqd's.
func (d reading) untold(id container.ID, e *evidence, took map[string]time.Duration) {
	robbed, rest := d.robbed[id], d.took[id]
	for _, t := range d.thefts {
		if t.Culprit == id && (t.Victim.Kind == account.Task || t.Victim.Kind == account.Peer || t.Victim.Kind == account.Ksoftirqd) {
			rest -= t.CPU
		}
		if t.Victim.Container == id && t.Victim.Kind == account.Peer {
			robbed -= t.CPU
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
