package netcpu

import (
	"fmt"
	"slices"
	"strings"
	"time"
)

// The rules of the mode auto, in parts of a CPU over a window of a second or so.
const (
	// usualSteal is what a container's packets may take from others who want to
	// run, unless policy says otherwise; the share that its neighbours notice.
	usualSteal = 0.03
	// calmPart is what all of its packets may cost, in parts of that, before it
	// goes back. While it is isolated it robs nobody, which says nothing about
	// what it would do.
	calmPart = 0.5

	calmFor     = 10 * time.Second  // of little network before it goes back
	calmLongest = 160 * time.Second // what that grows to for one that comes again
	calmForget  = 60 * time.Second  // without isolation until it is short again

	// windowMin is the least that is judged: of less, one burst would decide.
	windowMin = 500 * time.Millisecond
)

// victim is somebody whose time went into a container's packets in a window.
type victim struct {
	name string // of the container, or of what else it was
	took time.Duration
}

// evidence is what one container's packets did in one window.
type evidence struct {
	length  time.Duration
	victims []victim      // who wanted to run
	idle    time.Duration // taken from idle CPUs, which is nobody's loss
	network time.Duration // all that its packets cost, wherever it was
	sent    time.Duration // the part of that for what it sent
}

// robbed is the time that was taken from those who wanted to run.
func (e evidence) robbed() (sum time.Duration) {
	for _, v := range e.victims {
		sum += v.took
	}
	return sum
}

// decision says what is done about a container, and why.
type decision struct {
	isolate bool
	changed bool // by this window
	reason  string
}

// auto decides whether one container is isolated. The zero value says that it is
// not. It depends on nothing but what it is told.
type auto struct {
	isolated bool
	sends    bool          // when it began, sending was what cost most
	reason   string        // of the last change
	calm     time.Duration // how long its packets have cost little
	patience time.Duration // how long they have to; 0: calmFor
	free     time.Duration // how long it has not been isolated, since it was
}

// next takes one window into account, in which the container may take the share
// steal. Windows that are too short to judge, or that have no length, change
// nothing.
func (a *auto) next(e evidence, steal float64) decision {
	if e.length < windowMin {
		return decision{isolate: a.isolated, reason: a.reason}
	}
	was := a.isolated
	if a.isolated {
		a.cool(e, calmPart*steal)
	} else {
		a.watch(e, steal)
	}
	return decision{isolate: a.isolated, changed: a.isolated != was, reason: a.reason}
}

// watch looks for theft.
func (a *auto) watch(e evidence, most float64) {
	a.free += e.length
	if a.free >= calmForget {
		a.patience = 0
	}
	if share(e.robbed(), e.length) <= most {
		return
	}
	switch {
	case a.patience == 0:
		a.patience = calmFor
	default: // it went back too early
		a.patience = min(2*a.patience, calmLongest)
	}
	a.isolated, a.calm = true, 0
	a.sends = e.sent > e.network/2
	a.reason = fmt.Sprintf("its packets took %s of a CPU from others (%s; idle CPUs not counted: %s), more than %s",
		percent(e.robbed(), e.length), e.who(), percent(e.idle, e.length), limit(most))
}

// cool looks for the end of the traffic.
func (a *auto) cool(e evidence, most float64) {
	if share(e.network, e.length) > most {
		a.calm = 0
		return
	}
	if a.calm += e.length; a.calm < a.patience {
		return
	}
	a.isolated, a.free = false, 0
	a.reason = fmt.Sprintf("for %v its packets cost at most %s of a CPU a second, in the last %s",
		a.patience, limit(most), percent(e.network, e.length))
}

// victimsMost is how many victims a reason names.
const victimsMost = 3

// who names those who lost most.
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

func share(part, of time.Duration) float64 { return float64(part) / float64(of) }

func percent(part, of time.Duration) string { return fmt.Sprintf("%.1f %%", 100*share(part, of)) }

// limit writes a share as it was set, not rounded to what is measured.
func limit(share float64) string { return fmt.Sprintf("%.4g %%", 100*share) }
