package blockio

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/feature/blockio/monitor"
	"github.com/fairlead-project/fairlead/policy"
)

// The states of a reservation.
const (
	stateIdle       = "idle"         // it asks for next to nothing
	stateMet        = "met"          // it gets what it has reserved
	stateLess       = "asks less"    // it gets less, as it asks for no more
	stateShort      = "short"        // it gets less than it asks for, and nobody is in the way
	stateThrottled  = "throttled"    // it gets less, held back by its own limits
	stateStolen     = "stolen"       // it gets less, as the hypervisor has the CPUs
	stateContended  = "interference" // it gets less, and somebody is in the way
	stateLost       = "lost"         // its disk has gone
	stateBestEffort = "best effort"  // it has reserved nothing
)

// The thresholds of contention. The I_cpu of the paper is shown but does not decide: it
// misses a container that waits after it is woken.
const (
	enough      = 0.95 // part of a reservation that meets it
	waitedShare = 0.05 // of the time, for CPUs on which others ran, more than usually
	othersShare = 0.2  // of all waiting for CPUs, that others caused and not the container's own tasks
	diskShare   = 0.1  // of a disk's capacity, that others take beyond what they have reserved
	workShare   = 0.1  // of the time, that a CPU that serves the disk works for the network
	stolenShare = 0.1  // of the time, that a hypervisor has one of the CPUs
	busyShare   = 0.5  // of the time, that a container has requests under way
	part        = 0.02 // of all waiting: a container that caused less is not in the way
	least       = 1    // operations per second below which nothing is asked for
	asked       = 0.25 // part of a reservation that a container has to ask for before anybody yields a CPU to it
	mostWaiting = 0.95 // of the time, that waiting for CPUs is taken to have kept a container from asking
)

// Demand is what one reservation asked for and got in a window.
type Demand struct {
	Container container.ID
	Name      string
	Disk      monitor.Disk
	Reserved  api.BlockIOFigures             // per second
	Achieved  api.BlockIOFigures             // per second
	Under     time.Duration                  // requests were under way, added up
	Ended     time.Duration                  // the last request was completed so long before the end
	Waited    map[container.ID]time.Duration // threads that do I/O waited for CPUs, added up, by who ran there, or by what of package monitor was in the way
	Quota     string                         // the cgroup whose quota throttled it the most; "": none did
	Used      time.Duration                  // its CPU time
	Pressure  time.Duration                  // some of its tasks waited for a CPU, for whatever reason (PSI); 0: not counted

	Interrupts policy.Interrupts // what policy allows, decisions apart
	May        May
}

// Neighbour is a container, in its part of who may be in the way.
type Neighbour struct {
	Name     string
	Reserved bool         // it has a reservation: it keeps its CPUs and weights, and what it has reserved
	Yield    policy.Yield // what policy allows, decisions apart
	IO       map[monitor.Disk]api.BlockIOFigures
}

// Window is what happened in a time.
type Window struct {
	Taken      time.Time
	Length     time.Duration
	CPUs       int // of the host
	Demands    []Demand
	Neighbours map[container.ID]Neighbour
	Complete   bool // all containers that run are among Neighbours
	Capacity   map[monitor.Disk]Capacity
	Network    map[monitor.Disk]time.Duration // a CPU that serves the disk worked for the network
	Divides    map[monitor.Disk]string        // what divides the disk by weight; "": nothing
}

// Place is a container at a disk.
type Place struct {
	Container container.ID
	Disk      monitor.Disk
}

// Standing is how a reservation stands.
type Standing struct {
	State    string
	Since    time.Time
	Evidence string
	Culprit  container.ID
	Mend     string // what would have it met; "": it is not missed

	reserved api.BlockIOFigures
	held     time.Duration // of the window, by its own limits
	usual    time.Duration // that it waits for CPUs on which others run, for each request, while it is met
	known    bool          // usual is known
}

// Control decides what is done to containers in the way of reservations. It depends on
// nothing but the windows that it is given, and is not safe for concurrent use. The zero
// value knows nobody.
type Control struct {
	standing  map[Place]Standing
	acting    map[container.ID]*acting
	divisions map[monitor.Disk]*division
	helps     map[container.ID]*helping
	events    []api.BlockIOEvent
}

// maxEvents bounds what is remembered.
const maxEvents = 256

// Adopt takes over what an earlier agent did to a container since a time of day. Whether it
// is still needed is seen from now on.
func (c *Control) Adopt(id container.ID, y policy.Yield, reason string, since, now time.Time) {
	c.make()
	c.acting[id] = &acting{Action: Action{Yield: y, Reason: reason, Since: since}, needed: now, changed: now, hold: holdTime}
}

func (c *Control) make() {
	if c.acting == nil {
		c.acting, c.standing, c.divisions = make(map[container.ID]*acting), make(map[Place]Standing), make(map[monitor.Disk]*division)
	}
}

// Next takes a window into account. A window without a length is not judged.
func (c *Control) Next(w Window) {
	c.make()
	if w.Length <= 0 {
		return
	}
	seen := make(map[Place]bool)
	for _, d := range w.Demands {
		at := Place{d.Container, d.Disk}
		seen[at] = true
		c.stand(w, d, at)
	}
	maps.DeleteFunc(c.standing, func(at Place, _ Standing) bool { return !seen[at] })
	c.divide(w)
	for _, id := range slices.Sorted(maps.Keys(c.acting)) {
		c.release(w, id, c.acting[id])
	}
	c.ease(w)
}

// stand judges one reservation, and acts.
func (c *Control) stand(w Window, d Demand, at Place) {
	old := c.standing[at]
	now := Standing{State: stateMet, reserved: d.Reserved, held: d.held()}
	if old.reserved == d.Reserved {
		now.usual, now.known = old.usual, old.known // else it was not this that was met so
	}
	// What holds it back for as long as a window, as its real-time budget may, ends in every other one.
	held := max(now.held, (now.held+old.held)/2)
	act := func() {}
	reads, writes := d.missed(w)
	waits, others := d.foreign(w), w.others(d)
	unusual := sum(waits) - time.Duration(float64(now.usual)*float64(d.total())*w.Length.Seconds())
	if capped := c.capped(d.Container, d.Disk); !d.busy(w) && !capped {
		others = nil // it waits neither for the disk nor for its cap there
	}
	switch {
	case d.total() < least:
		now.State = stateIdle
	case old.State == stateIdle: // it has begun within the window
	case !reads && !writes:
		c.content(w, d)
		now.met(time.Duration(float64(sum(waits)) / w.Length.Seconds() / float64(d.total())))
	case d.oneAtATime(w):
		now.State = stateShort
		now.Evidence = fmt.Sprintf("%s; it has one request under way at a time, and the disk does no more of these: %s", d.shortfall(), countText(w.Capacity[d.Disk].Depth1))
		now.Mend = "let it have more requests under way at once, or reserve no more than that"
	case held >= time.Duration(waitedShare*float64(w.Length)) && held > sum(waits):
		now.State = stateThrottled
		now.Evidence, now.Mend = d.heldBy(w)
		if now.held == 0 {
			now.Evidence, now.Mend = old.Evidence, old.Mend
		}
		if c.byHelp(d) {
			now.Mend, act = "", func() { c.assist(w, d) }
		}
	case d.Waited[monitor.Stolen] >= time.Duration(stolenShare*float64(w.Length)) && d.Waited[monitor.Stolen] > sum(waits):
		now.State = stateStolen
		now.Evidence = fmt.Sprintf("%s; the hypervisor had the CPUs of its tasks for %s in each second", d.shortfall(), perSecond(d.Waited[monitor.Stolen], w))
		now.Mend = "give this machine more CPU time at its hypervisor"
	case unusual >= time.Duration(waitedShare*float64(w.Length)) && float64(sum(waits)) >= othersShare*float64(sum(waits)+d.Waited[d.Container]) && d.asks(w, sum(waits)),
		len(waits) > 0 && c.stillBeside(w, d):
		now.State, now.Culprit = stateContended, first(waits)
		now.Evidence = fmt.Sprintf("%s; its I/O waited %s in each second for CPUs on which others ran, %s of it for %s",
			d.shortfall(), perSecond(sum(waits), w), perSecond(waits[now.Culprit], w), w.name(now.Culprit))
		if d.Pressure > 0 {
			now.Evidence += fmt.Sprintf("; some waited for %.0f%% of the time (cpu.pressure)", 100*d.Pressure.Seconds()/w.Length.Seconds())
		}
		act = func() {
			if w.crowded(d.Disk) && c.yieldDisk(w, d, others) {
				return
			}
			if c.yieldCPU(w, d, waits) && w.mostlyYield(waits) || c.assist(w, d) {
				return
			}
			c.yieldDisk(w, d, others)
		}
	case len(others) > 0:
		now.State, now.Culprit = stateContended, first(others)
		now.Evidence = fmt.Sprintf("%s; others took %.0f%% of the disk beyond what they have reserved, %.0f%% of it %s",
			d.shortfall(), 100*sum(others), 100*others[now.Culprit], w.name(now.Culprit))
		act = func() { c.yieldDisk(w, d, others) }
	case w.Network[d.Disk] >= time.Duration(workShare*float64(w.Length)) && d.asks(w, 0):
		now.State, now.Culprit = stateContended, monitor.System
		now.Evidence = fmt.Sprintf("%s; a CPU that serves the disk worked for the network for %s in each second", d.shortfall(), perSecond(w.Network[d.Disk], w))
		now.Mend = "let the network's interrupts leave its disk's CPUs: io.interrupts=auto"
		if d.Interrupts == policy.InterruptsAuto {
			now.Mend = "the network's interrupts are kept off the CPUs of its disk where that can be done"
		}
		act = func() { c.separateFor(w, d) }
	case !d.busy(w) && !c.capped(d.Container, d.Disk) && d.Waited[d.Container] < time.Duration(waitedShare*float64(w.Length)):
		now.State = stateLess
	default:
		now.State, now.Evidence = stateShort, d.shortfall()
		if d.Under >= time.Duration(busyShare*float64(w.Length)) {
			now.Evidence += fmt.Sprintf("; it had %.1f requests under way on average", d.Under.Seconds()/w.Length.Seconds())
		}
		if own := d.Waited[d.Container]; own >= time.Duration(waitedShare*float64(w.Length)) {
			now.Evidence += fmt.Sprintf("; its tasks waited %s in each second for one another", perSecond(own, w))
		}
	}
	now.Since = old.Since
	if now.State != old.State || now.Culprit != old.Culprit {
		now.Since = w.Taken
		switch {
		case now.State == stateContended:
			c.event(w, d, "interference", now.Culprit, now.Evidence)
		case old.State == stateContended:
			c.event(w, d, "over", old.Culprit, fmt.Sprintf("it is %s after %s", now.State, w.Taken.Sub(old.Since).Round(time.Millisecond)))
		}
	}
	c.standing[at] = now
	act()
	if now.missed() && now.Mend == "" {
		now.Mend = c.mend(w, d, now)
		c.standing[at] = now
	}
	if v := c.divisions[d.Disk]; v != nil {
		if now.State == stateContended {
			v.needed = w.Taken
		}
		v.again = v.again || c.capped(d.Container, d.Disk) && c.misses(d.Container, d.Disk)
	}
	for id, a := range c.acting { // whoever is held back, it is of use while this one has to do
		if a.released.IsZero() && now.State == stateContended && (d.Waited[id] > 0 || w.Neighbours[id].IO[d.Disk] != (api.BlockIOFigures{})) {
			a.needed = w.Taken
		}
	}
}

// met brings what a container usually waits for each request up to date: at once where it
// waits less, and slowly where it waits more, which may be interference that begins.
func (s *Standing) met(wait time.Duration) {
	if s.known && wait > s.usual {
		wait = s.usual + (wait-s.usual)/16
	}
	s.usual, s.known = wait, true
}

// missed reports for each direction whether the container does I/O there, and less than it
// has reserved. It compares costs: fewer but larger requests may cost as much. After its last
// request it asked for nothing.
func (d Demand) missed(w Window) (reads, writes bool) {
	capacity := w.Capacity[d.Disk]
	_, gotReads, gotWrites := capacity.Share(d.Achieved)
	_, dueReads, dueWrites := capacity.Share(d.Reserved)
	part := enough * max(1-d.Ended.Seconds()/w.Length.Seconds(), 0)
	return d.Achieved.ReadIOPS > 0 && gotReads < part*dueReads, d.Achieved.WriteIOPS > 0 && gotWrites < part*dueWrites
}

// oneAtATime says whether it has one request under way at a time, and gets as many as the
// disk does of these.
func (d Demand) oneAtATime(w Window) bool {
	n, known := w.Capacity[d.Disk].requests(d.Achieved)
	const alone = 1.1 // requests under way: there is no second one
	return known && d.total() >= least && n >= enough && d.Under <= time.Duration(alone*float64(w.Length))
}

func (d Demand) total() uint64 { return d.Achieved.ReadIOPS + d.Achieved.WriteIOPS }

// busy says whether it had requests under way for a good part of the time.
func (d Demand) busy(w Window) bool { return d.Under >= time.Duration(busyShare*float64(w.Length)) }

// asks says whether it has use for more of what it misses: it had requests under way, or
// it would have asked for a good part of what it has reserved if it had not waited for so long.
func (d Demand) asks(w Window, waited time.Duration) bool {
	capacity, left := w.Capacity[d.Disk], 1-min(waited.Seconds()/w.Length.Seconds(), mostWaiting)
	_, gotReads, gotWrites := capacity.Share(d.Achieved)
	_, dueReads, dueWrites := capacity.Share(d.Reserved)
	reads, writes := d.missed(w)
	return d.busy(w) || reads && gotReads/left >= asked*dueReads || writes && gotWrites/left >= asked*dueWrites
}

// held is how long its threads waited because of its own limits.
func (d Demand) held() time.Duration { return d.Waited[monitor.Quota] + d.Waited[monitor.Realtime] }

// heldBy says which of its own limits held it back, and what would mend that.
func (d Demand) heldBy(w Window) (evidence, mend string) {
	if own := d.Waited[monitor.Realtime]; own > d.Waited[monitor.Quota] {
		return fmt.Sprintf("%s; its I/O waited %s in each second as its real-time budget was used up", d.shortfall(), perSecond(own, w)),
			"give io.realtime as much as its I/O needs (auto), or end it"
	}
	of := cmp.Or(d.Quota, "its cgroup or of one above")
	return fmt.Sprintf("%s; its I/O waited %s in each second as the CPU quota of %s was used up", d.shortfall(), perSecond(d.Waited[monitor.Quota], w), of),
		"raise the CPU quota of " + of
}

// foreign returns how long it waited while others ran, by container.
func (d Demand) foreign(w Window) map[container.ID]time.Duration {
	out := make(map[container.ID]time.Duration)
	for id, t := range d.Waited {
		if id != d.Container && (id == monitor.System || !monitor.Nobody(id)) && t >= time.Millisecond {
			out[id] = t
		}
	}
	return out
}

// others are the shares of the disk that other containers take beyond what they have
// reserved of it, if together they take enough to be in the way.
func (w Window) others(d Demand) map[container.ID]float64 {
	out, reserved := w.shares(d.Disk, w.doneAt(d.Disk)), w.reserved(d.Disk)
	delete(out, d.Container)
	for id := range out {
		if out[id] -= reserved[id]; out[id] <= 0 {
			delete(out, id)
		}
	}
	if sum(out) < diskShare {
		return nil
	}
	return out
}

func (w Window) name(id container.ID) string {
	if id == monitor.System {
		return "the host"
	}
	return fmt.Sprintf("%q (%s)", w.Neighbours[id].Name, id)
}

// shortfall says what is missed.
func (d Demand) shortfall() string {
	var parts []string
	for _, x := range []struct {
		got, due uint64
		what     string
	}{
		{d.Achieved.ReadIOPS, d.Reserved.ReadIOPS, "reads"}, {d.Achieved.WriteIOPS, d.Reserved.WriteIOPS, "writes"},
		{d.Achieved.ReadBytes, d.Reserved.ReadBytes, "bytes read"}, {d.Achieved.WriteBytes, d.Reserved.WriteBytes, "bytes written"},
	} {
		if x.due > 0 {
			parts = append(parts, fmt.Sprintf("%d of %d %s a second", x.got, x.due, x.what))
		}
	}
	return strings.Join(parts, ", ")
}

func (c *Control) event(w Window, d Demand, what string, culprit container.ID, text string) {
	c.events = append(c.events, api.BlockIOEvent{
		Time: w.Taken, Victim: d.Container, Name: d.Name, Disk: d.Disk.String(), What: what, Culprit: culprit, Text: text,
	})
	c.events = c.events[max(len(c.events)-maxEvents, 0):]
}

func sum[N time.Duration | float64](of map[container.ID]N) (n N) {
	for _, x := range of {
		n += x
	}
	return n
}

// byShare lists who has the most first, containers before the host.
func byShare[N time.Duration | float64](of map[container.ID]N) []container.ID {
	return slices.SortedFunc(maps.Keys(of), func(a, b container.ID) int {
		return cmp.Or(cmp.Compare(of[b], of[a]), cmp.Compare(a, b))
	})
}

// first is who has most of it. That is a container, unless the host alone has more than
// all of them: what kernel threads do is done for somebody.
func first[N time.Duration | float64](of map[container.ID]N) container.ID {
	order := byShare(of)
	if len(order) > 1 && order[0] == monitor.System && of[monitor.System] <= sum(of)/2 {
		return order[1]
	}
	return order[0]
}

// perSecond says how long in each second of a window.
func perSecond(d time.Duration, w Window) time.Duration {
	return time.Duration(float64(d) / w.Length.Seconds()).Round(time.Millisecond)
}
