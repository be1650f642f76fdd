package blockio

import (
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/feature/blockio/monitor"
	"github.com/fairlead-project/fairlead/policy"
)

// The pace of actions.
const (
	patience = 3 * time.Second // with an action, before a harder one
	settling = 2 * time.Second // of a cap, before a lower one
	holdTime = 30 * time.Second
	maxHold  = 10 * time.Minute
	relapse  = 15 * time.Second // an action needed again so soon after its release is held twice as long
)

// The strength of actions at disks.
const (
	lastWeight = 1  // of the usual 100
	minCap     = 16 // operations per second and direction that a container keeps
	steps      = 8  // in which a cap is raised to what the container did before it
)

// Action is what is done to one container. The zero value is nothing.
type Action struct {
	Yield  policy.Yield // YieldIdle, YieldQuota, or ""
	Weight uint32       // at disks that divide by weight; 0: its own
	Caps   map[monitor.Disk]api.BlockIOFigures
	Apart  bool // the network's interrupts are kept off its disks' CPUs
	Reason string
	Since  time.Time
}

func (a Action) none() bool { return a.Yield == "" && a.Weight == 0 && len(a.Caps) == 0 && !a.Apart }

// acting is an Action with its memory.
type acting struct {
	Action
	full     map[monitor.Disk]api.BlockIOFigures // what it did before it was capped
	needed   time.Time                           // it was last needed
	changed  time.Time                           // it was last made harder
	eased    time.Time                           // a cap was last raised
	hold     time.Duration                       // it outlives its need for so long
	released time.Time                           // zero while it is in force
}

// harder is the order of least harm at the CPU; nothing follows the last.
func harder(y policy.Yield) policy.Yield {
	return map[policy.Yield]policy.Yield{"": policy.YieldIdle, policy.YieldIdle: policy.YieldQuota}[y]
}

// yieldCPU holds back the containers that ran meanwhile, if policy allows it. It reports
// whether that may still help: something was done just now, or a moment ago.
func (c *Control) yieldCPU(w Window, d Demand, waits map[container.ID]time.Duration) (pending bool) {
	for _, id := range slices.Sorted(maps.Keys(waits)) {
		if !w.mayAct(id) || float64(waits[id]) < part*float64(sum(waits)) {
			continue
		}
		a := c.act(w, id)
		if a.Yield != "" && w.Taken.Sub(a.changed) < patience {
			pending = true
			continue
		}
		if next := harder(a.Yield); next != "" {
			pending = true
			a.Yield = next
			why := fmt.Sprintf("%q waited for it: %s in each second; %s", d.Name, perSecond(waits[id], w), d.shortfall())
			c.did(w, d, id, a, why, "yield="+string(next))
		}
	}
	return pending
}

// yieldDisk holds back the container that takes most of the disk, of those that policy
// lets yield: by its weight where the disk divides by weight, and then by caps.
func (c *Control) yieldDisk(w Window, d Demand, others map[container.ID]float64) {
	for _, id := range byShare(others) {
		if !w.mayAct(id) {
			continue
		}
		a := c.act(w, id)
		why := fmt.Sprintf("it took %.0f%% of the disk while %q had %s", 100*others[id], d.Name, d.shortfall())
		limit, capped := a.Caps[d.Disk]
		switch by := w.Divides[d.Disk]; {
		case by != "" && a.Weight == 0:
			a.Weight = lastWeight
			c.did(w, d, id, a, why, fmt.Sprintf("weight %d, by %s", a.Weight, by))
			return
		case !capped && a.Weight != 0 && w.Taken.Sub(a.changed) < patience, capped && w.Taken.Sub(a.changed) < settling:
			return // it takes a moment to work
		}
		next := half(limit)
		switch {
		case !capped:
			limit = w.Neighbours[id].IO[d.Disk]
			next = half(limit)
		case w.Taken.Sub(a.eased) < relapse: // the last step was too far: go back, and try again later
			next = stepped(limit, a.full[d.Disk], -1)
			a.eased, a.hold = time.Time{}, min(2*a.hold, maxHold)
		}
		if next == limit {
			continue // it has next to nothing already
		}
		if a.Caps == nil {
			a.Caps, a.full = make(map[monitor.Disk]api.BlockIOFigures), make(map[monitor.Disk]api.BlockIOFigures)
		}
		if !capped {
			a.full[d.Disk] = limit
		}
		a.Caps[d.Disk] = next
		c.did(w, d, id, a, why, capText(next))
		return
	}
}

func capText(f api.BlockIOFigures) string {
	return fmt.Sprintf("at most %d reads and %d writes a second", f.ReadIOPS, f.WriteIOPS)
}

func half(f api.BlockIOFigures) api.BlockIOFigures {
	return api.BlockIOFigures{ReadIOPS: max(f.ReadIOPS/2, minCap), WriteIOPS: max(f.WriteIOPS/2, minCap)}
}

// stepped is a cap one step up (+1) or down (-1).
func stepped(f, full api.BlockIOFigures, by int64) api.BlockIOFigures {
	step := func(n, full uint64) uint64 { return uint64(max(int64(n)+by*int64(max(full/steps, 1)), minCap)) }
	return api.BlockIOFigures{ReadIOPS: step(f.ReadIOPS, full.ReadIOPS), WriteIOPS: step(f.WriteIOPS, full.WriteIOPS)}
}

// mayAct says whether anything may be done to a container: it has reserved nothing, and
// policy lets it yield.
func (w Window) mayAct(id container.ID) bool {
	n, known := w.Neighbours[id]
	return known && !n.Reserved && n.Yield == policy.YieldAuto
}

// act gives what is done to a container, begun anew where it was released.
func (c *Control) act(w Window, id container.ID) *acting {
	a := c.acting[id]
	if a == nil {
		a = &acting{hold: holdTime}
		c.acting[id] = a
	}
	if !a.released.IsZero() {
		if a.hold *= 2; w.Taken.Sub(a.released) > relapse {
			a.hold = holdTime
		}
		a.hold = min(a.hold, maxHold)
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

// release ends what is done to a container when nobody needs it any more, or when it is
// not allowed any more. Caps are raised in steps, so that what is left of the disk is
// found by trying; all else ends at once.
func (c *Control) release(w Window, id container.ID, a *acting) {
	n, known := w.Neighbours[id]
	switch {
	case !known:
		if w.Complete { // else it may only be that its runtime has not told of it yet
			delete(c.acting, id)
		}
		return
	case !a.released.IsZero():
		if w.Taken.Sub(a.released) > 2*maxHold {
			delete(c.acting, id)
		}
		return
	}
	held := n.Yield == policy.YieldAuto && !n.Reserved && len(w.Demands) > 0
	if !held {
		a.Yield, a.Weight, a.Caps = "", 0, nil
	}
	if !slices.ContainsFunc(w.Demands, func(d Demand) bool { return d.Container == id && d.Interrupts == policy.InterruptsAuto }) {
		a.Apart = false
	}
	if w.Taken.Sub(a.needed) >= a.hold {
		a.Yield, a.Weight, a.Apart = "", 0, false
	}
	c.ease(w, id, a)
	if a.none() {
		c.event(w, Demand{}, "release", id, fmt.Sprintf("after %s", w.Taken.Sub(a.Since).Round(time.Second)))
		*a = acting{hold: a.hold, released: w.Taken, needed: a.needed}
	}
}

// ease raises the caps of a container by a step, once they were not needed for a quarter
// of its hold.
func (c *Control) ease(w Window, id container.ID, a *acting) {
	last := a.needed
	if a.eased.After(last) {
		last = a.eased
	}
	if len(a.Caps) == 0 || w.Taken.Sub(last) < a.hold/4 {
		return
	}
	a.eased = w.Taken
	for at, f := range a.Caps {
		full := a.full[at]
		if f = stepped(f, full, 1); f.ReadIOPS >= full.ReadIOPS && f.WriteIOPS >= full.WriteIOPS {
			delete(a.Caps, at)
			continue
		}
		a.Caps[at] = f
		c.event(w, Demand{Disk: at}, "release", id, capText(f))
	}
}

// Actions are what is done now, by container.
func (c *Control) Actions() map[container.ID]Action {
	out := make(map[container.ID]Action)
	for id, a := range c.acting {
		if a.released.IsZero() && !a.none() {
			out[id] = a.Action
		}
	}
	return out
}
