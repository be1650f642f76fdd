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

// A container that misses its reservation for want of CPU gets help for its own tasks, without the
// consent of others. They lose the CPU time that it takes, and no more.

// The pace of help, which takes effect at once.
const (
	helpHold = 10 * time.Second // how long help outlives its need at first
	helpStep = time.Second / 2  // a window this long after a change shows its effect
	// seenShare is a part of the time. A helped container that waits at least that long for others still
	// competes with them: it waits a moment each time that it takes a CPU from them.
	seenShare = 0.001
)

// fits is the part of its real-time budget that a container may use before it takes turns. The budget
// is per CPU, and a container's threads do not spread their work evenly.
const fits = 0.8

// May lists the help that a container's own tasks may get, without decisions.
type May struct {
	Help     policy.Help   // the policy; HelpAuto: Control decides
	Weight   string        // why its weight cannot be raised; "": it can
	Turns    bool          // the kernel allows real time in turns
	Profiled time.Duration // the budget that its reservations need by the profiles of their disks; 0: unknown
	Budget   time.Duration // for real time, in each second of each CPU
	None     string        // why there is no Budget
}

// helping is the help for one container, with its history.
type helping struct {
	level    policy.Help // "" without help
	reason   string
	since    time.Time
	changed  time.Time     // when level was last raised
	needed   time.Time     // when it was last needed
	hold     time.Duration // how long it outlives its need
	released time.Time     // zero while it is in force, or if it never was
	budget   time.Duration // for real time, in each second of each CPU
	used     time.Duration // CPU time per second without a missed reservation and without help
	lack     string        // what prevents more help, and the remedy
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

// content records the CPU use of a container that misses nothing.
func (c *Control) content(w Window, d Demand) {
	h := c.helpOf(d.Container)
	if rate := time.Duration(float64(d.Used) / w.Length.Seconds()); h.level == "" {
		h.used = max(rate, h.used*15/16)
	}
}

// assist raises the help for a container, if a further level exists. It reports whether help may still
// work: it was raised just now, or its effect has not shown yet.
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

// next returns the next level, in order of least harm, or why there is none.
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
	if used == 0 { // no undisturbed window so far
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
		return policy.HelpWeight, "" // the budget would make its threads wait for the rest of each period
	}
	return "", fmt.Sprintf("it uses %s of CPU time a second on %d CPUs and may be real-time for %s on each, which is all that may be given",
		used.Round(time.Millisecond), w.CPUs, m.Budget)
}

// Takes returns the CPU time per second that a reservation takes, projected from what the container
// used and got: at least used, and at most all CPUs.
func Takes(c Capacity, used time.Duration, achieved, reserved api.BlockIOFigures, cpus int) time.Duration {
	got, _, _ := c.Share(achieved)
	due, _, _ := c.Share(reserved)
	if got <= 0 || due <= got {
		return used
	}
	return time.Duration(min(float64(used)*due/got, float64(cpus)*float64(time.Second)))
}

// ease ends help once other containers have not wanted its CPUs for some time, or policy forbids it.
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
		unseen := of != nil && of.total() >= least && !w.Detailed // the window cannot show whether help is needed
		if of != nil && of.May.Help == policy.HelpAuto && (unseen || w.Taken.Sub(h.needed) < h.hold) {
			continue
		}
		c.event(w, Demand{}, "release", id, fmt.Sprintf("help=%s ends after %s", h.level, w.Taken.Sub(h.since).Round(time.Second)))
		h.level, h.lack, h.released = "", "", w.Taken
	}
}

// stillBeside reports whether a container is helped while others still want its CPUs. It waits little
// for them then, but its tasks may wait for one another on one CPU while others run on the next. So
// others still cause what it misses.
func (c *Control) stillBeside(w Window, d Demand) bool {
	return c.helpOf(d.Container).level != "" && d.seen() >= time.Duration(seenShare*float64(w.Length)) && d.asks(w, d.seen())
}

// forContainers reports whether containers have the CPUs it waits for. There is no help against the
// host alone, because the host's threads often do the container's own I/O.
func (c *Control) forContainers(w Window, d Demand) bool {
	if c.helpOf(d.Container).level != "" {
		return d.seen() >= time.Duration(seenShare*float64(w.Length))
	}
	return d.seen() >= d.Waited[System]
}

// seen returns how long it waited for other containers. It leaves out the host, for which a container
// nearly always waits a little: the end of help shows whether that matters.
func (d Demand) seen() (waits time.Duration) {
	for id, t := range d.Waited {
		if id != d.Container && IsContainer(id) {
			waits += t
		}
	}
	return waits
}

// mostlyYield reports whether containers that may be made to yield caused most of the waiting.
func (w Window) mostlyYield(waits map[container.ID]time.Duration) bool {
	var theirs time.Duration
	for id, t := range waits {
		if w.mayAct(id) {
			theirs += t
		}
	}
	return theirs > sum(waits)/2
}

// helpAction adds the help for containers to their Actions.
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

// AdoptHelp continues the help that an earlier agent gave a container.
func (c *Control) AdoptHelp(id container.ID, level policy.Help, reason string, since, now time.Time) {
	h := c.helpOf(id)
	h.level, h.reason, h.since, h.changed, h.needed = level, reason, since, now, now
}
