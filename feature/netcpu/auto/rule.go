package auto

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/fairlead-project/fairlead/backoff"
	"github.com/fairlead-project/fairlead/feature/netcpu/law"
)

// A window shorter than windowMin is not judged by what it would be in a second: one burst would decide.
// It only shows who has taken a second's share already.
const windowMin = law.Window / 2

// victim is a context that lost time to a container's packets in a window.
type victim struct {
	name string // the container's, or another context's
	took time.Duration
}

// evidence is what one container's packets did in one window.
type evidence struct {
	length  time.Duration
	victims []victim      // who wanted to run
	idle    time.Duration // taken from idle CPUs, which is no loss
	peers   time.Duration // taken from the sender of the packets, which is no loss either
	network time.Duration // all that its packets cost, in any context
	sends   bool          // most of that in others' time is for what it sends
	lost    time.Duration // of its own time, to others' packets
	many    time.Duration // taken by all containers in the mode isolate, if it is one of them
}

// robbed returns the time that was taken from tasks that wanted to run.
func (e evidence) robbed() (sum time.Duration) {
	for _, v := range e.victims {
		sum += v.took
	}
	return sum
}

// role is the reason why a container is enforced.
type role int

const (
	bystander role = iota // nothing is done
	receiver              // its packets rob others
	sender                // likewise, and most of their cost is for what it sends
	robbed                // it loses time to others
)

// rule decides the role of one container. The zero value is a bystander. It depends on nothing but
// its arguments.
type rule struct {
	role     role
	reason   string        // of the last change
	calm     time.Duration // how long its packets have cost little, or it has lost little
	patience time.Duration // how long that has to last; 0: law.Calm
	free     time.Duration // how long it has been a bystander, since its last other role
	losing   time.Duration // how long it has lost much
}

// next takes one window into account, in which the container may take the share steal, and reports
// whether the role changes. A window that is too short to judge changes nothing, unless the packets of
// a container that does not pay have taken as much as they may in a second.
func (a *rule) next(e evidence, steal float64) (changed bool) {
	was := a.role
	if e.length < windowMin {
		if was == receiver || was == sender || e.robbed() <= inSecond(steal) {
			return false
		}
		e.length = time.Second
	}
	robs := share(e.robbed(), e.length) > steal
	if a.losing += e.length; share(e.lost, e.length) <= law.Loss {
		a.losing = 0
	}
	switch {
	case robs && e.sends && a.role != sender: // isolation does nothing against that
		a.begin(sender, e, e.takes(steal))
	case a.role == receiver, a.role == sender:
		a.cool(e, e.network, law.Half*steal, "its packets cost")
	case robs:
		a.begin(receiver, e, e.takes(steal))
	case share(e.many, e.length) > steal && share(e.robbed(), e.length) > law.Loss:
		a.begin(receiver, e, fmt.Sprintf("its packets took %s of a CPU from others, and those of all that may be isolated %s, more than %s",
			percent(e.robbed(), e.length), percent(e.many, e.length), limit(steal)))
	case a.role == robbed:
		a.cool(e, e.lost, law.Half*law.Loss, "others' packets took")
	case a.losing >= law.Patience:
		a.begin(robbed, e, fmt.Sprintf("others' packets took %s of a CPU from it, and more than %s for some time", percent(e.lost, e.length), limit(law.Loss)))
	default:
		a.free += e.length
	}
	return a.role != was
}

// begin ends the role of a bystander.
func (a *rule) begin(as role, e evidence, reason string) {
	if a.free += e.length; a.role == bystander { // it may have gone back too early
		a.patience = backoff.Again(a.patience, law.Calm, law.Growth*law.Calm, a.free, law.Long)
	}
	a.role, a.calm, a.reason = as, 0, reason
}

// cool ends the role once the container's network time has been low for long enough.
func (a *rule) cool(e evidence, network time.Duration, most float64, what string) {
	if share(network, e.length) > most {
		a.calm = 0
		return
	}
	if a.calm += e.length; a.calm < a.patience {
		return
	}
	a.role, a.free = bystander, 0
	a.reason = fmt.Sprintf("for %v %s at most %s of a CPU a second, in the last %s",
		a.patience, what, limit(most), percent(network, e.length))
}

// takes describes what the packets take from others, which may lose at most this share.
func (e evidence) takes(most float64) string {
	return fmt.Sprintf("its packets took %s of a CPU from others (%s; not counted: idle CPUs %s, senders %s), more than %s",
		percent(e.robbed(), e.length), e.who(), percent(e.idle, e.length), percent(e.peers, e.length), limit(most))
}

// victimsMost limits how many victims a reason names.
const victimsMost = 3

// who names the victims that lost most.
func (e evidence) who() string {
	list := slices.SortedStableFunc(slices.Values(e.victims), func(a, b victim) int { return int(b.took - a.took) })
	var parts []string
	for i, v := range list {
		if i == victimsMost {
			parts = append(parts, fmt.Sprintf("%d more", len(list)-i))
			break
		}
		parts = append(parts, fmt.Sprintf("%s %s", v.name, percent(v.took, e.length)))
	}
	return strings.Join(parts, ", ")
}

// inSecond returns the time that a share of a CPU is in a second.
func inSecond(share float64) time.Duration { return time.Duration(share * float64(time.Second)) }

func share(part, of time.Duration) float64 { return float64(part) / float64(of) }

func percent(part, of time.Duration) string { return fmt.Sprintf("%.1f %%", 100*share(part, of)) }

// limit writes a share as it was set, without rounding to the precision of the measurement.
func limit(share float64) string { return fmt.Sprintf("%.4g %%", 100*share) }
