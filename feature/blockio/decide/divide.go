package decide

import (
	"cmp"
	"fmt"
	"maps"
	"math"
	"slices"
	"time"

	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/backoff"
	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/policy"
)

const (
	aim    = 1.1 // others leave a container this many times its reservation: rates vary from second to second
	MinCap = 16  // operations per second and direction that a capped container keeps
	steps  = 8   // number of steps in which caps rise until they bind no container
)

// division shares out a disk while a reservation of it is missed, or was a short time ago. All amounts
// are shares of the disk's capacity. Reservations come first in what is usable. The containers that
// want more than they have reserved, or have reserved nothing, divide the rest. A container that wants
// more than its part is capped.
type division struct {
	usable  float64                             // the share that the disk seems able to do
	step    float64                             // by which usable rises
	due     map[container.ID]float64            // the reservations at the last division
	full    map[container.ID]api.BlockIOFigures // what capped containers did before their caps
	caps    map[container.ID]api.BlockIOFigures // the caps in force
	victim  Demand                              // the demand for which usable was last reduced
	again   bool                                // the disk must be divided again
	open    bool                                // no container is capped now
	needed  time.Time                           // when a reservation was last missed
	reduced time.Time                           // when usable was last reduced
	eased   time.Time                           // when usable was last raised; zero: not since it was reduced
	hold    time.Duration                       // a quarter of it lies between two steps
}

// doneAt returns what each container did on a disk.
func (w Window) doneAt(at Disk) map[container.ID]api.BlockIOFigures {
	out := make(map[container.ID]api.BlockIOFigures)
	for id, n := range w.Neighbours {
		if f := n.IO[at]; f != (api.BlockIOFigures{}) {
			out[id] = f
		}
	}
	for _, d := range w.Demands {
		if d.Disk == at && d.Achieved != (api.BlockIOFigures{}) {
			out[d.Container] = d.Achieved
		}
	}
	return out
}

// shares returns the parts of a disk's capacity that figures take.
func (w Window) shares(at Disk, of map[container.ID]api.BlockIOFigures) map[container.ID]float64 {
	out := make(map[container.ID]float64, len(of))
	for id, f := range of {
		out[id], _, _ = w.Capacity[at].Share(f)
	}
	return out
}

// reserved returns the shares of a disk that containers have reserved and ask for.
func (w Window) reserved(at Disk) map[container.ID]float64 {
	out := make(map[container.ID]float64)
	for _, d := range w.Demands {
		if d.Disk == at && d.total() >= least {
			out[d.Container], _, _ = w.Capacity[at].Share(d.Reserved)
		}
	}
	return out
}

// missing returns how far containers fall short of the given part of their reservations, in total.
func (w Window) missing(at Disk, of float64) (n float64) {
	got := w.shares(at, w.doneAt(at))
	for id, due := range w.reserved(at) {
		n += max(of*due-got[id], 0)
	}
	return n
}

// crowded reports whether the I/O on a disk, plus what its reservations lack, exceeds what may be
// reserved of it. It is false if the capacity is unknown.
func (w Window) crowded(at Disk) bool {
	c := w.Capacity[at]
	return !c.assumed && sum(w.shares(at, w.doneAt(at)))+w.missing(at, 1) >= c.free()
}

// mayCap reports whether a container may be capped on disks. A container with a reservation may be, but
// keeps the reservation.
func (w Window) mayCap(id container.ID) bool {
	n, known := w.Neighbours[id]
	return known && n.Yield == policy.YieldAuto
}

// capped reports whether a container is capped on a disk.
func (c *Control) capped(id container.ID, at Disk) bool {
	v := c.divisions[at]
	if v == nil {
		return false
	}
	_, is := v.caps[id]
	return is
}

// narrow reduces what others may use of a disk on which a reservation is missed: at first to what the
// capacity leaves beside all reservations, and then, while one is still missed, to half of that or
// less. It reports whether this is the first reduction.
func (c *Control) narrow(w Window, d Demand, others map[container.ID]float64) (first bool) {
	if !slices.ContainsFunc(slices.Collect(maps.Keys(others)), w.mayCap) {
		return false
	}
	at := d.Disk
	v := c.divisions[at]
	if v == nil {
		v = &division{open: true}
		c.divisions[at] = v
	}
	if v.reduced.Equal(w.Taken) {
		return false // another reservation has reduced it in this window
	}
	first = min(w.Taken.Sub(v.reduced), w.Taken.Sub(v.eased)) > relapse
	used, due := sum(w.shares(at, w.doneAt(at))), aim*sum(w.reserved(at))
	switch {
	case w.Taken.Sub(v.eased) < relapse: // the last step was too far: undo it, and try again later
		v.usable -= v.step
		v.hold = backoff.Next(v.hold, holdTime, maxHold)
	case v.open:
		v.usable, v.step, v.hold = min(used, 1), sum(others)/steps, holdTime
	default:
		v.usable = min(min(v.usable, used)-w.missing(at, aim), (v.usable+due)/2)
	}
	v.usable, v.open, v.again = max(v.usable, due), false, true
	v.victim, v.needed, v.reduced, v.eased = d, w.Taken, w.Taken, time.Time{}
	return first
}

// divide updates the caps when what is usable of a disk changes, and at once when its reservations
// change.
func (c *Control) divide(w Window) {
	for at, v := range c.divisions {
		switch {
		case !slices.ContainsFunc(w.Demands, func(d Demand) bool { return d.Disk == at }):
			c.uncap(at, v, nil)
			delete(c.divisions, at)
			continue
		case v.open:
			if min(w.Taken.Sub(v.reduced), w.Taken.Sub(v.eased)) > 2*maxHold {
				delete(c.divisions, at)
			}
			continue
		}
		due := w.reserved(at)
		switch {
		case v.again, !maps.Equal(due, v.due), slices.ContainsFunc(slices.Collect(maps.Keys(v.caps)), func(id container.ID) bool { return !w.mayCap(id) }):
		case min(w.Taken.Sub(v.needed), w.Taken.Sub(v.eased)) >= v.hold/4:
			v.usable, v.eased = v.usable+v.step, w.Taken
		default:
			continue
		}
		v.due, v.again = due, false
		c.apportion(w, at, v)
	}
}

// apportion caps the containers that want more than their part of a disk.
func (c *Control) apportion(w Window, at Disk, v *division) {
	did := w.doneAt(at)
	maps.Copy(did, v.full)
	want, claims, left := w.shares(at, did), make(map[container.ID]float64), v.usable
	for id, due := range v.due {
		left -= aim * due
		if c.misses(id, at) {
			delete(want, id) // not capped while it misses its own reservation
		}
	}
	for id, share := range want {
		switch more := share - aim*v.due[id]; {
		case more <= 0:
		case w.mayCap(id):
			claims[id] = more
		default:
			left -= more
		}
	}
	caps, full := make(map[container.ID]api.BlockIOFigures), make(map[container.ID]api.BlockIOFigures)
	for id, part := range parts(left, claims) {
		if part < claims[id]-rounding {
			full[id] = did[id]
			caps[id] = scaled(did[id], w.reservedBy(id, at), (aim*v.due[id]+part)/want[id])
		}
	}
	c.uncap(at, v, caps)
	was := v.caps
	v.caps, v.full, v.open = caps, full, len(caps) == 0
	took := w.shares(at, w.doneAt(at))
	for _, id := range slices.Sorted(maps.Keys(caps)) {
		if was[id] == caps[id] {
			continue
		}
		a := c.act(w, id)
		if a.Caps == nil {
			a.Caps = make(map[Disk]api.BlockIOFigures)
		}
		a.Caps[at] = caps[id]
		switch {
		case v.eased.Equal(w.Taken):
			c.event(w, Demand{Disk: at}, "release", id, CapText(caps[id]))
		case v.reduced.Equal(w.Taken):
			why := fmt.Sprintf("it took %.0f%% of the disk while %q had %s", 100*took[id], v.victim.Name, v.victim.shortfall())
			c.did(w, v.victim, id, a, why, CapText(caps[id]))
		default:
			c.did(w, Demand{Disk: at}, id, a, "reservations of the disk have changed", CapText(caps[id]))
		}
	}
}

// uncap removes the caps on a disk, except from the containers in still.
func (c *Control) uncap(at Disk, v *division, still map[container.ID]api.BlockIOFigures) {
	for id := range v.caps {
		_, capped := still[id]
		if a := c.acting[id]; a != nil && !capped {
			delete(a.Caps, at)
		}
	}
}

// misses reports whether a container misses its reservation of a disk.
func (c *Control) misses(id container.ID, at Disk) bool {
	return c.standing[Place{id, at}].Missed()
}

// parts divides left among claims with max-min fairness: no container gets more than its claim, and all
// that get less get the same.
func parts(left float64, claims map[container.ID]float64) map[container.ID]float64 {
	out := make(map[container.ID]float64, len(claims))
	smallest := slices.SortedFunc(maps.Keys(claims), func(a, b container.ID) int {
		return cmp.Or(cmp.Compare(claims[a], claims[b]), cmp.Compare(a, b))
	})
	for i, id := range smallest {
		out[id] = min(claims[id], max(left, 0)/float64(len(smallest)-i))
		left -= out[id]
	}
	return out
}

// reservedBy returns what a container has reserved of a disk.
func (w Window) reservedBy(id container.ID, at Disk) api.BlockIOFigures {
	for _, d := range w.Demands {
		if d.Container == id && d.Disk == at {
			return d.Reserved
		}
	}
	return api.BlockIOFigures{}
}

// scaled returns a cap at a part of what a container did, but never below its reservation. The cap is
// in operations, or in bytes where only bytes are reserved, because the container is free to choose the
// size of its requests.
func scaled(did, reserved api.BlockIOFigures, by float64) api.BlockIOFigures {
	part := func(n, reserved uint64) uint64 { return max(uint64(math.Round(float64(n)*by)), reserved) }
	f := api.BlockIOFigures{ReadIOPS: max(part(did.ReadIOPS, reserved.ReadIOPS), MinCap), WriteIOPS: max(part(did.WriteIOPS, reserved.WriteIOPS), MinCap)}
	if reserved.ReadIOPS == 0 && reserved.ReadBytes > 0 {
		f.ReadIOPS, f.ReadBytes = 0, part(did.ReadBytes, reserved.ReadBytes)
	}
	if reserved.WriteIOPS == 0 && reserved.WriteBytes > 0 {
		f.WriteIOPS, f.WriteBytes = 0, part(did.WriteBytes, reserved.WriteBytes)
	}
	return f
}

func CapText(f api.BlockIOFigures) string {
	text := func(ops, bytes uint64, what, done string) string {
		if bytes > 0 {
			return fmt.Sprintf("%d bytes %s", bytes, done)
		}
		return fmt.Sprintf("%d %s", ops, what)
	}
	return fmt.Sprintf("at most %s and %s a second", text(f.ReadIOPS, f.ReadBytes, "reads", "read"), text(f.WriteIOPS, f.WriteBytes, "writes", "written"))
}

// The pace of actions.
const (
	patience = 3 * time.Second // an action gets this long to work before a harder one
	holdTime = 30 * time.Second
	maxHold  = 10 * time.Minute
	relapse  = 15 * time.Second // an action needed again this soon after its release is held twice as long
)

// LastWeight replaces a container's usual weight of 100 on disks that divide by weight.
const LastWeight = 1

// Action lists the measures applied to one container, and for it. The zero value is none.
type Action struct {
	Yield  policy.Yield // YieldIdle, YieldQuota, or ""
	Weight uint32       // at disks that divide by weight; 0: its own
	Caps   map[Disk]api.BlockIOFigures
	Apart  bool          // the network's interrupts are kept off the CPUs of its disks
	Help   policy.Help   // the help for its own tasks; "": none
	Budget time.Duration // the real-time budget of the help
	Reason string
	Since  time.Time
}

// None reports whether nothing is done to the container. Help does not count.
func (a Action) None() bool { return a.Yield == "" && a.Weight == 0 && len(a.Caps) == 0 && !a.Apart }

// acting is an Action with its history.
type acting struct {
	Action
	needed   time.Time     // when it was last needed
	changed  time.Time     // when it was last made harder
	hold     time.Duration // how long it outlives its need
	released time.Time     // zero while it is in force
}

// yieldCPU holds back the containers that ran during the waits, if policy allows it. It reports whether
// that may still help: it acted just now, or a short time ago.
func (c *Control) yieldCPU(w Window, d Demand, waits map[container.ID]time.Duration) (pending bool) {
	// From least harm to most. YieldQuota is the last step.
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

// yieldDisk holds back containers that take more of the disk than they have reserved, if policy allows
// it. Where the disk divides by weight, it first lowers the weights of containers without reservations,
// one by one, the largest user first. Then it caps all of them. It reports whether the measure is new,
// so that its effect cannot show yet.
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
			return false // the weight needs time to work
		}
	}
	return c.narrow(w, d, others)
}

// mayAct reports whether Control may act on a container: it has no reservation, and policy lets it
// yield.
func (w Window) mayAct(id container.ID) bool {
	return w.mayCap(id) && !w.Neighbours[id].Reserved
}

// act returns the action on a container. A released action starts again.
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

// release ends the actions on a container once they are no longer needed or allowed. Caps end with the
// division of their disk.
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

// Actions returns the actions in force, by container.
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

// separateFor keeps the network's interrupts off the CPUs of a reservation's disk.
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
