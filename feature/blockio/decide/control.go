package decide

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/policy"
)

// The states of a reservation.
const (
	StateIdle       = "idle"         // it asks for almost nothing
	StateMet        = "met"          // it gets what it has reserved
	StateLess       = "asks less"    // it gets less, because it asks for less
	StateShort      = "short"        // it gets less than it asks for, without interference
	StateThrottled  = "throttled"    // it gets less, because of its own limits
	StateStolen     = "stolen"       // it gets less, because the hypervisor has the CPUs
	StateContended  = "interference" // it gets less, because of a container or the host
	StateLost       = "lost"         // its disk has gone
	StateBestEffort = "best effort"  // there is no reservation
)

// The thresholds of contention. The I_cpu of the paper is shown but does not decide, because it misses
// a container that waits after it is woken.
const (
	enough      = 0.95 // part of a reservation that counts as met
	waitedShare = 0.05 // of the time: unusual waiting for CPUs on which others ran
	othersShare = 0.2  // of all waiting for CPUs: the part that others caused, not the container's own tasks
	diskShare   = 0.1  // of a disk's capacity: what others take beyond their reservations
	workShare   = 0.1  // of the time: a CPU that serves the disk works for the network
	stolenShare = 0.1  // of the time: a hypervisor has one of the CPUs
	busyShare   = 0.5  // of the time: a container has requests in flight
	part        = 0.02 // of all waiting: a container that caused less does not interfere
	least       = 1    // operations per second: a container that does fewer asks for nothing
	asked       = 0.25 // part of a reservation that a container must ask for before others yield a CPU to it
	mostWaiting = 0.95 // of the time: the most that waiting for CPUs may count as the reason for asking less
)

// Standing is the state of a reservation after a window.
type Standing struct {
	State    string
	Since    time.Time
	Evidence string
	Culprit  container.ID
	Mend     string // the remedy; "": the reservation is not missed

	reserved api.BlockIOFigures
	held     time.Duration // part of the window in which its own limits held it back
	usual    time.Duration // its wait per request for CPUs on which others run, while it is met
	known    bool          // usual is known
}

// Control decides how to act on containers that interfere with reservations. It depends only on the
// windows that it gets, and is not safe for concurrent use. The zero value is ready to use.
type Control struct {
	standing  map[Place]Standing
	acting    map[container.ID]*acting
	divisions map[Disk]*division
	helps     map[container.ID]*helping
	events    []api.BlockIOEvent
	detailed  time.Time // the last window with details
	starved   time.Time // the last window in which a container missed a reservation and stalled
}

// maxEvents limits the events between two calls of TakeEvents.
const maxEvents = 256

// Adopt continues an earlier agent's action on a container, in force since a time of day. The action
// counts as last needed at now.
func (c *Control) Adopt(id container.ID, y policy.Yield, reason string, since, now time.Time) {
	c.make()
	c.acting[id] = &acting{Action: Action{Yield: y, Reason: reason, Since: since}, needed: now, changed: now, hold: holdTime}
}

// Standings returns the state of each reservation after the last window.
func (c *Control) Standings() map[Place]Standing { return maps.Clone(c.standing) }

// TakeEvents returns the events since its last call, at most the latest maxEvents.
func (c *Control) TakeEvents() []api.BlockIOEvent {
	taken := c.events
	c.events = nil
	return taken
}

func (c *Control) make() {
	if c.acting == nil {
		c.acting, c.helps = make(map[container.ID]*acting), make(map[container.ID]*helping)
		c.standing, c.divisions = make(map[Place]Standing), make(map[Disk]*division)
	}
}

// Next processes a window. It ignores a window without length.
func (c *Control) Next(w Window) {
	c.make()
	if w.Length <= 0 {
		return
	}
	c.noteDetails(w)
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

// stand judges one reservation, and acts on the result.
func (c *Control) stand(w Window, d Demand, at Place) {
	old := c.standing[at]
	now := Standing{State: StateMet, reserved: d.Reserved, held: d.Waited[Quota] + d.Waited[Realtime]}
	if old.reserved == d.Reserved {
		now.usual, now.known = old.usual, old.known // the usual wait belongs to this reservation alone
	}
	// A limit that holds it back for as long as a window, as its real-time budget may, can end in every
	// other window only.
	held := max(now.held, (now.held+old.held)/2)
	act := func() {}
	reads, writes := d.missed(w)
	waits, others := d.foreign(), w.others(d)
	unusual := sum(waits) - time.Duration(float64(now.usual)*float64(d.total())*w.Length.Seconds())
	if capped := c.capped(d.Container, d.Disk); !d.busy(w) && !capped {
		others = nil // it waits neither for the disk nor for its cap there
	}
	switch {
	case d.total() < least:
		now.State = StateIdle
	case old.State == StateIdle: // it began within the window
	case !reads && !writes:
		c.content(w, d)
		if w.Detailed {
			now.met(time.Duration(float64(sum(waits)) / w.Length.Seconds() / float64(d.total())))
		}
	case d.oneAtATime(w):
		now.State = StateShort
		now.Evidence = fmt.Sprintf("%s; it has one request under way at a time, and the disk does no more of these: %s", d.shortfall(), countText(w.Capacity[d.Disk].Depth1))
		now.Mend = "let it have more requests under way at once, or reserve no more than that"
	case held >= time.Duration(waitedShare*float64(w.Length)) && held > sum(waits):
		now.State = StateThrottled
		now.Evidence, now.Mend = d.heldBy(w)
		if now.held == 0 {
			now.Evidence, now.Mend = old.Evidence, old.Mend
		}
		if c.helpOf(d.Container).level == policy.HelpRealtime && d.Waited[Realtime] > d.Waited[Quota] { // its help's budget is too small
			now.Mend, act = "", func() { c.assist(w, d) }
		}
	case d.Waited[Stolen] >= time.Duration(stolenShare*float64(w.Length)) && d.Waited[Stolen] > sum(waits):
		now.State = StateStolen
		now.Evidence = fmt.Sprintf("%s; the hypervisor had the CPUs of its tasks for %s in each second", d.shortfall(), perSecond(d.Waited[Stolen], w))
		now.Mend = "give this machine more CPU time at its hypervisor"
	case unusual >= time.Duration(waitedShare*float64(w.Length)) && float64(sum(waits)) >= othersShare*float64(sum(waits)+d.Waited[d.Container]) && d.asks(w, sum(waits)),
		len(waits) > 0 && c.stillBeside(w, d):
		now.State, now.Culprit = StateContended, first(waits)
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
		now.State, now.Culprit = StateContended, first(others)
		now.Evidence = fmt.Sprintf("%s; others took %.0f%% of the disk beyond what they have reserved, %.0f%% of it %s",
			d.shortfall(), 100*sum(others), 100*others[now.Culprit], w.name(now.Culprit))
		act = func() { c.yieldDisk(w, d, others) }
	case w.Network[d.Disk] >= time.Duration(workShare*float64(w.Length)) && d.asks(w, 0):
		now.State, now.Culprit = StateContended, System
		now.Evidence = fmt.Sprintf("%s; a CPU that serves the disk worked for the network for %s in each second", d.shortfall(), perSecond(w.Network[d.Disk], w))
		now.Mend = "let the network's interrupts leave its disk's CPUs: io.interrupts=auto"
		if d.Interrupts == policy.InterruptsAuto {
			now.Mend = "the network's interrupts are kept off the CPUs of its disk where that can be done"
		}
		act = func() { c.separateFor(w, d) }
	case !d.busy(w) && !c.capped(d.Container, d.Disk) && d.Waited[d.Container] < time.Duration(waitedShare*float64(w.Length)):
		now.State = StateLess
	default:
		now.State, now.Evidence = StateShort, d.shortfall()
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
		case now.State == StateContended:
			c.event(w, d, "interference", now.Culprit, now.Evidence)
		case old.State == StateContended:
			c.event(w, d, "over", old.Culprit, fmt.Sprintf("it is %s after %s", now.State, w.Taken.Sub(old.Since).Round(time.Millisecond)))
		}
	}
	c.standing[at] = now
	act()
	if now.Missed() && now.Mend == "" {
		now.Mend = c.mend(w, d, now)
		c.standing[at] = now
	}
	if v := c.divisions[d.Disk]; v != nil {
		if now.State == StateContended {
			v.needed = w.Taken
		}
		v.again = v.again || c.capped(d.Container, d.Disk) && c.misses(d.Container, d.Disk)
	}
	for id, a := range c.acting { // whichever container is held back, that is useful as long as this reservation needs it
		if a.released.IsZero() && now.State == StateContended && (d.Waited[id] > 0 || w.Neighbours[id].IO[d.Disk] != (api.BlockIOFigures{})) {
			a.needed = w.Taken
		}
	}
}

// met updates the usual wait per request: down at once, but up only slowly, because a longer wait may
// be the beginning of interference.
func (s *Standing) met(wait time.Duration) {
	if s.known && wait > s.usual {
		wait = s.usual + (wait-s.usual)/16
	}
	s.usual, s.known = wait, true
}

// heldBy returns which of the container's own limits held it back, and the remedy.
func (d Demand) heldBy(w Window) (evidence, mend string) {
	if own := d.Waited[Realtime]; own > d.Waited[Quota] {
		return fmt.Sprintf("%s; its I/O waited %s in each second as its real-time budget was used up", d.shortfall(), perSecond(own, w)),
			"let its help be decided (io.help=auto), or give io.realtime as much as its I/O needs"
	}
	of := cmp.Or(d.Quota, "its cgroup or of one above")
	return fmt.Sprintf("%s; its I/O waited %s in each second as the CPU quota of %s was used up", d.shortfall(), perSecond(d.Waited[Quota], w), of),
		"raise the CPU quota of " + of
}

func (w Window) name(id container.ID) string {
	if id == System {
		return "the host"
	}
	return fmt.Sprintf("%q (%s)", w.Neighbours[id].Name, id)
}

// shortfall describes what the reservation lacks.
func (d Demand) shortfall() string {
	var parts []string
	for i, due := range each(&d.Reserved) {
		if *due > 0 {
			parts = append(parts, fmt.Sprintf("%d of %d %s a second", *each(&d.Achieved)[i], *due, counted[i]))
		}
	}
	return strings.Join(parts, ", ")
}

func (c *Control) event(w Window, d Demand, what string, culprit container.ID, text string) {
	c.events = append(c.events, api.BlockIOEvent{
		Time: w.Taken, Victim: api.ID(d.Container), Name: d.Name, Disk: d.Disk.String(), What: what, Culprit: api.ID(culprit), Text: text,
	})
	c.events = c.events[max(len(c.events)-maxEvents, 0):]
}

func sum[N time.Duration | float64](of map[container.ID]N) (n N) {
	for _, x := range of {
		n += x
	}
	return n
}

// byShare sorts containers by their value, the largest first.
func byShare[N time.Duration | float64](of map[container.ID]N) []container.ID {
	return slices.SortedFunc(maps.Keys(of), func(a, b container.ID) int {
		return cmp.Or(cmp.Compare(of[b], of[a]), cmp.Compare(a, b))
	})
}

// first returns the container with the largest value. It returns the host only if the host has more
// than all containers together, because kernel threads work on behalf of containers.
func first[N time.Duration | float64](of map[container.ID]N) container.ID {
	order := byShare(of)
	if len(order) > 1 && order[0] == System && of[System] <= sum(of)/2 {
		return order[1]
	}
	return order[0]
}

// perSecond converts a duration in a window to one per second.
func perSecond(d time.Duration, w Window) time.Duration {
	return time.Duration(float64(d) / w.Length.Seconds()).Round(time.Millisecond)
}

// Missed reports whether a reservation does not hold: its container asks for more than it gets.
func (s Standing) Missed() bool {
	return !slices.Contains([]string{"", StateMet, StateIdle, StateLess}, s.State)
}

// mend returns the remedy for a missed reservation, or the action that is being taken, after the
// actions of this window.
func (c *Control) mend(w Window, d Demand, s Standing) string {
	switch h := c.helpOf(d.Container); {
	case h.lack != "" && s.State == StateContended:
		return h.lack + "; " + c.mendOthers(w, d, s)
	case h.level != "":
		return "it is helped itself (io.help)"
	}
	return c.mendOthers(w, d, s)
}

// mendOthers is mend without the help for the container itself.
func (c *Control) mendOthers(w Window, d Demand, s Standing) string {
	own := d.Waited[d.Container] >= time.Duration(waitedShare*float64(w.Length))
	switch {
	case s.State != StateContended && own:
		return "give it more CPUs, or let fewer of its threads compute"
	case s.State != StateContended:
		return "reserve no more than the disk does of what it asks for (fairlead io calibrate measures the disk)"
	case s.Culprit == System:
		return "see what the host does there: fairlead io -v"
	}
	n, a := w.Neighbours[s.Culprit], c.acting[s.Culprit]
	switch {
	case a != nil && a.released.IsZero() && !a.None():
		return fmt.Sprintf("%s is held back for it", w.name(s.Culprit))
	case n.Reserved:
		return fmt.Sprintf("move it or %s to another host or disk: both have reserved I/O", w.name(s.Culprit))
	case n.Yield != policy.YieldAuto:
		return fmt.Sprintf("let %s yield: io.yield=auto", w.name(s.Culprit))
	}
	return fmt.Sprintf("move it or %s to another host or disk", w.name(s.Culprit))
}
