package decide

import (
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/backoff"
	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/policy"
)

// The pace of actions.
const (
	patience = 3 * time.Second // with an action, before a harder one
	holdTime = 30 * time.Second
	maxHold  = 10 * time.Minute
	relapse  = 15 * time.Second // an action needed again so soon after its release is held twice as long
)

// LastWeight is what is left to a container of the usual 100, at disks that divide by weight.
const LastWeight = 1

// Action is what is done to one container, and for it. The zero value is nothing.
type Action struct {
	Yield  policy.Yield // YieldIdle, YieldQuota, or ""
	Weight uint32       // at disks that divide by weight; 0: its own
	Caps   map[Disk]api.BlockIOFigures
	Apart  bool          // the network's interrupts are kept off its disks' CPUs
	Help   policy.Help   // what is done for itself; "": nothing
	Budget time.Duration // of that for real time
	Reason string
	Since  time.Time
}

// none reports whether nothing is done to the container.
func (a Action) None() bool { return a.Yield == "" && a.Weight == 0 && len(a.Caps) == 0 && !a.Apart }

// acting is an Action with its memory.
type acting struct {
	Action
	needed   time.Time     // it was last needed
	changed  time.Time     // it was last made harder
	hold     time.Duration // it outlives its need for so long
	released time.Time     // zero while it is in force
}

// yieldCPU holds back the containers that ran meanwhile, if policy allows it. It reports
// whether that may still help: something was done just now, or a moment ago.
func (c *Control) yieldCPU(w Window, d Demand, waits map[container.ID]time.Duration) (pending bool) {
	// The order of least harm; nothing follows the last.
	harder := map[policy.Yield]policy.Yield{"": policy.YieldIdle, policy.YieldIdle: policy.YieldQuota}
	for _, id := range slices.Sorted(maps.Keys(waits)) {
		if !w.mayAct(id) || float64(waits[id]) < part*float64(sum(waits)) {
			continue
		}
		a := c.act(w, id)
		if a.Yield != "" && w.Taken.Sub(a.changed) < patience {
			pending = true
			continue
		}
		if next := harder[a.Yield]; next != "" {
			pending = true
			a.Yield = next
			why := fmt.Sprintf("%q waited for it: %s in each second; %s", d.Name, perSecond(waits[id], w), d.shortfall())
			c.did(w, d, id, a, why, "yield="+string(next))
		}
	}
	return pending
}

// yieldDisk holds back containers that take more of the disk than they have reserved, if policy
// allows it: the one that takes most by its weight, where the disk divides by weight and it
// has reserved nothing; and then all of them by caps. It reports whether that is new, so
// that its effect is still to be seen.
func (c *Control) yieldDisk(w Window, d Demand, others map[container.ID]float64) (first bool) {
	for _, id := range byShare(others) {
		by := w.Divides[d.Disk]
		if by == "" || !w.mayAct(id) {
			continue
		}
		a := c.act(w, id)
		if a.Weight == 0 {
			a.Weight = LastWeight
			why := fmt.Sprintf("it took %.0f%% of the disk while %q had %s", 100*others[id], d.Name, d.shortfall())
			c.did(w, d, id, a, why, fmt.Sprintf("weight %d, by %s", a.Weight, by))
			return true
		}
		if len(a.Caps) == 0 && w.Taken.Sub(a.changed) < patience {
			return false // it takes a moment to work
		}
	}
	return c.narrow(w, d, others)
}

// mayAct reports whether anything may be done to a container: it has reserved nothing, and
// policy lets it yield.
func (w Window) mayAct(id container.ID) bool {
	return w.mayCap(id) && !w.Neighbours[id].Reserved
}

// act gives what is done to a container, begun anew where it was released.
func (c *Control) act(w Window, id container.ID) *acting {
	a := c.acting[id]
	if a == nil {
		a = &acting{hold: holdTime}
		c.acting[id] = a
	}
	if !a.released.IsZero() {
		a.hold = backoff.Again(a.hold, holdTime, maxHold, w.Taken.Sub(a.released), relapse)
		a.released, a.Since = time.Time{}, w.Taken
	}
	return a
}

func (c *Control) did(w Window, d Demand, id container.ID, a *acting, why, what string) {
	a.Reason, a.changed, a.needed = why, w.Taken, w.Taken
	if a.Since.IsZero() {
		a.Since = w.Taken
	}
	c.event(w, d, "action", id, what+": "+why)
}

// release ends what is done to a container when it is no longer needed or allowed. Caps end as the
// division of the disk does.
func (c *Control) release(w Window, id container.ID, a *acting) {
	n, known := w.Neighbours[id]
	switch {
	case !known:
		if w.Complete { // else its runtime may not have reported it yet
			delete(c.acting, id)
		}
		return
	case !a.released.IsZero():
		if w.Taken.Sub(a.released) > 2*maxHold {
			delete(c.acting, id)
		}
		return
	}
	if n.Yield != policy.YieldAuto || n.Reserved || len(w.Demands) == 0 {
		a.Yield, a.Weight = "", 0
	}
	if !slices.ContainsFunc(w.Demands, func(d Demand) bool { return d.Container == id && d.Interrupts == policy.InterruptsAuto }) {
		a.Apart = false
	}
	if w.Taken.Sub(a.needed) >= a.hold {
		a.Yield, a.Weight, a.Apart = "", 0, false
	}
	if a.None() {
		c.event(w, Demand{}, "release", id, fmt.Sprintf("after %s", w.Taken.Sub(a.Since).Round(time.Second)))
		*a = acting{hold: a.hold, released: w.Taken, needed: a.needed}
	}
}

// Actions are what is done now, by container.
func (c *Control) Actions() map[container.ID]Action {
	out := make(map[container.ID]Action)
	for id, a := range c.acting {
		if a.released.IsZero() && !a.None() {
			out[id] = a.Action
		}
	}
	c.helpAction(out)
	return out
}

// separateFor keeps the network's interrupts apart for the sake of a reservation.
func (c *Control) separateFor(w Window, d Demand) {
	if d.Interrupts != policy.InterruptsAuto {
		return
	}
	if a := c.act(w, d.Container); !a.Apart {
		a.Apart = true
		why := fmt.Sprintf("the network took %s in each second of a CPU that serves %s; %s", perSecond(w.Network[d.Disk], w), d.Disk, d.shortfall())
		c.did(w, d, d.Container, a, why, "interrupts=apart")
	}
}
