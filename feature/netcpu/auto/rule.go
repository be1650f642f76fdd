package auto

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/fairlead-project/fairlead/backoff"
	"github.com/fairlead-project/fairlead/feature/netcpu/law"
)

// windowMin is the shortest window whose rates count. In a shorter one a single burst would decide. It
// only shows whether a container has already taken its share of a whole second.
const windowMin = law.Window / 2

// victim is a context that lost time to a container's packets in a window.
type victim struct {
	name string // name of the container or of another context
	took time.Duration
}

// evidence holds the effects of one container's packets in one window.
type evidence struct {
	length  time.Duration
	victims []victim      // contexts that wanted to run
	idle    time.Duration // time from idle CPUs, which is no loss
	peers   time.Duration // time from the senders of the packets, which is no loss either
	network time.Duration // time of its packets in any context
	sends   bool          // most of network in others' time went into packets that it sends
	lost    time.Duration // its own time that went into others' packets
	many    time.Duration // time that all containers in the mode isolate took, if it is one of them
}

// robbed returns the time that the packets took from tasks that wanted to run.
func (e evidence) robbed() (sum time.Duration) {
	for _, v := range e.victims {
		sum += v.took
	}
	return sum
}

// role is the reason why a container is enforced.
type role int

const (
	bystander role = iota // not enforced
	receiver              // its packets rob others
	sender                // its packets rob others, and most of their cost is for sending
	robbed                // it loses time to others
)

// rule decides the role of one container. It depends only on its arguments. The zero value is a
// bystander.
type rule struct {
	role     role
	reason   string        // of the last change
	calm     time.Duration // for which its packets have cost little, or it has lost little
	patience time.Duration // calm that ends the role; 0: law.Calm
	free     time.Duration // as a bystander, since its last other role
	losing   time.Duration // for which it has lost much
}

// next judges one window and reports whether the role changes. steal is the share of a CPU that the
// container may take. A window that is too short changes nothing, unless the container does not pay and
// its packets have taken more than their share of a second.
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
	case robs && e.sends && a.role != sender: // isolation does not cover sending
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
	if a.free += e.length; a.role == bystander { // its last role may have ended too early
		a.patience = backoff.Again(a.patience, law.Calm, law.Growth*law.Calm, a.free, law.Long)
	}
	a.role, a.calm, a.reason = as, 0, reason
}

// cool ends the role once the network time has been low for long enough.
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

// takes describes how much the packets took from others, and the share that they may take.
func (e evidence) takes(most float64) string {
	return fmt.Sprintf("its packets took %s of a CPU from others (%s; not counted: idle CPUs %s, senders %s), more than %s",
		percent(e.robbed(), e.length), e.who(), percent(e.idle, e.length), percent(e.peers, e.length), limit(most))
}

// victimsMost limits how many victims a reason names.
const victimsMost = 3

// who names the victims that lost the most.
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

// inSecond returns the CPU time in a second for a share of a CPU.
func inSecond(share float64) time.Duration { return time.Duration(share * float64(time.Second)) }

func share(part, of time.Duration) float64 { return float64(part) / float64(of) }

func percent(part, of time.Duration) string { return fmt.Sprintf("%.1f %%", 100*share(part, of)) }

// limit formats a share as it was set, without rounding to the precision of the measurement.
func limit(share float64) string { return fmt.Sprintf("%.4g %%", 100*share) }
