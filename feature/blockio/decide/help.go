package decide

import (
	"cmp"
	"fmt"
	"time"

	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/backoff"
	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/policy"
)

// A container that misses its reservation for want of CPU is helped itself, without the consent
// of others. They lose what it takes, and no more.

// The pace of help, which works at once.
const (
	helpHold = 10 * time.Second // it outlives its need for so long at first
	helpStep = time.Second / 2  // after which a window shows its effect
	// seenShare is the part of the time for which a container that is helped still waits for
	// others, if there are any: it waits for a moment each time that it takes a CPU from them.
	seenShare = 0.001
)

// fits is the part of its real-time budget that a container may use before it takes turns:
// the budget is of each CPU, and a container's threads do not divide their work evenly.
const fits = 0.8

// May is what may be done for a container's own tasks, decisions apart.
type May struct {
	Help     policy.Help   // what policy says; HelpAuto: what is decided
	Weight   string        // why its weight cannot be raised; "": it can
	Turns    bool          // real time can be given in turns
	Profiled time.Duration // the budget that its reservations need by the profiles of their disks; 0: not known
	Budget   time.Duration // for real time, in each second of each CPU
	None     string        // why there is no Budget
}

// helping is what is done for one container, with its memory.
type helping struct {
	level    policy.Help // "" while nothing is done
	reason   string
	since    time.Time
	changed  time.Time     // level was last raised
	needed   time.Time     // it was last needed
	hold     time.Duration // it outlives its need for so long
	released time.Time     // zero while it is in force, or was never
	budget   time.Duration // for real time, in each second of each CPU
	used     time.Duration // CPU time in each second while nothing is missed and nothing done
	lack     string        // what is in the way of more, and what would mend it
}

func (c *Control) helpOf(id container.ID) *helping {
	c.make()
	h := c.helps[id]
	if h == nil {
		h = &helping{hold: helpHold}
		c.helps[id] = h
	}
	return h
}

// content notes what a container uses that misses nothing.
func (c *Control) content(w Window, d Demand) {
	h := c.helpOf(d.Container)
	if rate := time.Duration(float64(d.Used) / w.Length.Seconds()); h.level == "" {
		h.used = max(rate, h.used*15/16)
	}
}

// assist does more for a container itself, if there is more to do. It reports whether that
// may still help: something was done just now, or its effect has not been seen.
func (c *Control) assist(w Window, d Demand) (pending bool) {
	h := c.helpOf(d.Container)
	if !c.forContainers(w, d) {
		h.lack = ""
		return false
	}
	h.needed = w.Taken
	if h.level != "" && w.Taken.Sub(h.changed) < helpStep {
		return true
	}
	next, lack := h.next(w, d)
	if next == "" {
		prefix := "nothing may be done for it: "
		if h.level != "" {
			prefix = "all that may be done for it is not enough: "
		}
		if lack = prefix + lack; lack != h.lack {
			c.event(w, d, "unmet", d.Container, lack)
		}
		h.lack = lack
		return false
	}
	h.lack = ""
	if h.level == "" {
		if !h.released.IsZero() {
			h.hold = backoff.Again(h.hold, helpHold, maxHold, w.Taken.Sub(h.released), relapse)
		}
		h.since, h.released = w.Taken, time.Time{}
	}
	h.level, h.changed, h.reason = next, w.Taken, d.shortfall()
	c.event(w, d, "action", d.Container, fmt.Sprintf("help=%s: %s", next, h.reason))
	return true
}

// next is the next step of least harm, or why there is none.
func (h *helping) next(w Window, d Demand) (next policy.Help, lack string) {
	m := d.May
	switch {
	case m.Help == "" || m.Help == policy.HelpOff:
		return "", "policy does not let it (io.help=off)"
	case m.Help != policy.HelpAuto:
		return "", fmt.Sprintf("policy sets it (io.help=%s): io.help=auto lets more be done", m.Help)
	case h.level == "" && m.Weight == "":
		return policy.HelpWeight, ""
	case m.Budget == 0:
		return "", cmp.Or(m.None, m.Weight)
	}
	used := h.used
	if used == 0 { // it was never seen undisturbed
		used = Takes(w.Capacity[d.Disk], time.Duration(float64(d.Used)/w.Length.Seconds()), d.Achieved, d.Reserved, w.CPUs)
	}
	small := float64(used) <= fits*float64(m.Budget)*float64(w.CPUs)
	switch {
	case h.level != policy.HelpRealtime && h.level != policy.HelpTurns && small:
		h.budget = min(m.Budget, max(used*5/4, m.Profiled, LeastBudget))
		return policy.HelpRealtime, ""
	case h.level != policy.HelpTurns && m.Turns:
		h.budget = m.Budget
		return policy.HelpTurns, ""
	case h.level == policy.HelpRealtime && !m.Turns && m.Weight == "" && !small:
		return policy.HelpWeight, "" // beyond its budget its threads would wait for the rest of each period
	}
	return "", fmt.Sprintf("it uses %s of CPU time a second on %d CPUs and may be real-time for %s on each, which is all that may be given",
		used.Round(time.Millisecond), w.CPUs, m.Budget)
}

// Takes is the CPU time that a reservation takes in each second, by what its container used for
// what it got: no less than that, and no more than all CPUs.
func Takes(c Capacity, used time.Duration, achieved, reserved api.BlockIOFigures, cpus int) time.Duration {
	got, _, _ := c.Share(achieved)
	due, _, _ := c.Share(reserved)
	if got <= 0 || due <= got {
		return used
	}
	return time.Duration(min(float64(used)*due/got, float64(cpus)*float64(time.Second)))
}

// ease ends help once other containers have not wanted its CPUs for a while, or policy forbids
// it.
func (c *Control) ease(w Window) {
	for id, h := range c.helps {
		var of *Demand
		for i, d := range w.Demands {
			if d.Container == id {
				of = &w.Demands[i]
			}
		}
		if _, known := w.Neighbours[id]; !known && w.Complete || known && of == nil && h.level == "" {
			delete(c.helps, id)
			continue
		}
		if h.level == "" || !(of != nil || w.Complete) {
			continue
		}
		if of != nil && of.total() >= least && of.seen() >= time.Duration(seenShare*float64(w.Length)) {
			h.needed = w.Taken
		}
		unseen := of != nil && of.total() >= least && !w.Detailed // whether it is needed
		if of != nil && of.May.Help == policy.HelpAuto && (unseen || w.Taken.Sub(h.needed) < h.hold) {
			continue
		}
		c.event(w, Demand{}, "release", id, fmt.Sprintf("help=%s ends after %s", h.level, w.Taken.Sub(h.since).Round(time.Second)))
		h.level, h.lack, h.released = "", "", w.Taken
	}
}

// stillBeside reports whether a container is helped and others still want its CPUs. It waits
// little for them then; but its tasks may wait for one another at one CPU while others run at
// the next, so that what it misses is for their sake.
func (c *Control) stillBeside(w Window, d Demand) bool {
	return c.helpOf(d.Container).level != "" && d.seen() >= time.Duration(seenShare*float64(w.Length)) && d.asks(w, d.seen())
}

// forContainers reports whether it is containers that have the CPUs. Against the host alone nothing
// is done: what its threads do is often the container's own I/O.
func (c *Control) forContainers(w Window, d Demand) bool {
	if c.helpOf(d.Container).level != "" {
		return d.seen() >= time.Duration(seenShare*float64(w.Length))
	}
	return d.seen() >= d.Waited[System]
}

// seen is for how long it waited for other containers. What it waits for the host is seldom
// nothing, and is tried by letting go.
func (d Demand) seen() (waits time.Duration) {
	for id, t := range d.Waited {
		if id != d.Container && IsContainer(id) {
			waits += t
		}
	}
	return waits
}

// mostlyYield reports whether yielding containers have caused most of some waiting.
func (w Window) mostlyYield(waits map[container.ID]time.Duration) bool {
	var theirs time.Duration
	for id, t := range waits {
		if w.mayAct(id) {
			theirs += t
		}
	}
	return theirs > sum(waits)/2
}

// helpAction puts what is done for a container into its Action.
func (c *Control) helpAction(out map[container.ID]Action) {
	for id, h := range c.helps {
		if h.level == "" {
			continue
		}
		a := out[id]
		if a.None() {
			a.Reason, a.Since = h.reason, h.since
		}
		a.Help, a.Budget = h.level, h.budget
		out[id] = a
	}
}

// AdoptHelp continues what was done for a container before this process began.
func (c *Control) AdoptHelp(id container.ID, level policy.Help, reason string, since, now time.Time) {
	h := c.helpOf(id)
	h.level, h.reason, h.since, h.changed, h.needed = level, reason, since, now, now
}
