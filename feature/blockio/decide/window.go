// Package decide decides who may reserve block I/O, whether a reservation is met, who interferes with
// it, and how to act on that. It is pure: it works from the windows, capacities and times that the
// caller passes, and reads neither the kernel, nor files, nor a clock.
//
// Package blockio calls it, and puts its decisions in force. Package monitor uses its types.
package decide

import (
	"fmt"
	"maps"
	"math"
	"time"

	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/policy"
)

// Ids that stand for something other than a container.
const (
	System container.ID = 0                  // everything outside of containers
	Unseen container.ID = math.MaxUint64 - 1 // more tasks ran during a wait than can be recorded
)

// Ids of culprits that are not tasks: causes of a wait, whichever task ran meanwhile.
const (
	Quota    container.ID = math.MaxUint64 - 2 // the CPU quota of its cgroup, or of a parent, was used up
	Realtime container.ID = math.MaxUint64 - 3 // its real-time budget was used up
	Stolen   container.ID = math.MaxUint64 - 4 // the hypervisor had the CPU, even while the task itself ran
)

// IsContainer reports whether an id is a container's rather than one of the above.
func IsContainer(id container.ID) bool { return id != System && id < Stolen }

// Disk is a whole disk, by its device number.
type Disk struct{ Major, Minor uint32 }

// String formats the number as the kernel's files do, for example 254:0.
func (d Disk) String() string { return fmt.Sprintf("%d:%d", d.Major, d.Minor) }

// Place identifies a container's I/O on one disk.
type Place struct {
	Container container.ID
	Disk      Disk
}

// Demand is what a container asked for and got of one reservation in a window.
type Demand struct {
	Container container.ID
	Name      string
	Disk      Disk
	Reserved  api.BlockIOFigures // per second
	Achieved  api.BlockIOFigures // per second
	Under     time.Duration      // sum of the times that its requests were in flight
	Ended     time.Duration      // from the completion of its last request to the end of the window

	// Waited is how long its threads that do I/O waited for CPUs, summed over the threads, by the
	// container that ran there. Quota, Realtime, Stolen and Unseen are keys, too.
	Waited   map[container.ID]time.Duration
	Quota    string        // the cgroup that throttled it the most; "" if none did
	Used     time.Duration // its CPU time
	Pressure time.Duration // at least one of its tasks waited for a CPU (PSI)
	Stalls   bool          // Pressure is counted

	Interrupts policy.Interrupts // what policy allows, before decisions
	May        May
}

// Neighbour is a container that may interfere with others.
type Neighbour struct {
	Name     string
	Reserved bool         // it has a reservation: it keeps its CPUs, its weight and its reservation
	Yield    policy.Yield // what policy allows, before decisions
	IO       map[Disk]api.BlockIOFigures
}

// Window is what happened on the host between two readings.
type Window struct {
	Taken      time.Time
	Length     time.Duration
	Detailed   bool          // Waited is known; else it is empty
	Stolen     time.Duration // by the hypervisor, summed over the CPUs
	CPUs       int           // of the host
	Demands    []Demand
	Neighbours map[container.ID]Neighbour
	Complete   bool // Neighbours has all running containers
	Capacity   map[Disk]Capacity
	Network    map[Disk]time.Duration // time that a CPU that serves the disk worked for the network
	Divides    map[Disk]string        // the mechanism that divides the disk by weight; "" if there is none
}

// missed reports for each direction whether the container does I/O there, but less than it has
// reserved. It compares costs, because fewer but larger requests may cost as much. The time after its
// last request does not count: it asked for nothing then.
func (d Demand) missed(w Window) (reads, writes bool) {
	capacity := w.Capacity[d.Disk]
	_, gotReads, gotWrites := capacity.Share(d.Achieved)
	_, dueReads, dueWrites := capacity.Share(d.Reserved)
	part := enough * max(1-d.Ended.Seconds()/w.Length.Seconds(), 0)
	return d.Achieved.ReadIOPS > 0 && gotReads < part*dueReads, d.Achieved.WriteIOPS > 0 && gotWrites < part*dueWrites
}

// oneAtATime reports whether the container has one request in flight at a time, and gets as many of
// these as the disk does.
func (d Demand) oneAtATime(w Window) bool {
	n, known := w.Capacity[d.Disk].requests(d.Achieved)
	const alone = 1.1 // requests in flight: fewer than two
	return known && d.total() >= least && n >= enough && d.Under <= time.Duration(alone*float64(w.Length))
}

func (d Demand) total() uint64 { return d.Achieved.ReadIOPS + d.Achieved.WriteIOPS }

// busy reports whether it had requests in flight for a large part of the time.
func (d Demand) busy(w Window) bool { return d.Under >= time.Duration(busyShare*float64(w.Length)) }

// asks reports whether it could use more of what it misses: it had requests in flight, or, had it not
// waited, it would have asked for a good part of its reservation.
func (d Demand) asks(w Window, waited time.Duration) bool {
	capacity, left := w.Capacity[d.Disk], 1-min(waited.Seconds()/w.Length.Seconds(), mostWaiting)
	_, gotReads, gotWrites := capacity.Share(d.Achieved)
	_, dueReads, dueWrites := capacity.Share(d.Reserved)
	reads, writes := d.missed(w)
	return d.busy(w) || reads && gotReads/left >= asked*dueReads || writes && gotWrites/left >= asked*dueWrites
}

// foreign returns how long it waited while others ran, by container and for System.
func (d Demand) foreign() map[container.ID]time.Duration {
	out := maps.Clone(d.Waited)
	maps.DeleteFunc(out, func(id container.ID, t time.Duration) bool {
		return id == d.Container || id != System && !IsContainer(id) || t < time.Millisecond
	})
	return out
}

// others returns the shares of the disk that other containers take beyond their reservations, or nil if
// their sum is too small to interfere.
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

// Details cost an I/O load some of its IOPS. So they are measured only while a reservation may be
// missed for want of CPU, and otherwise for a short time at intervals.
const (
	detailEvery = 5 * time.Second // the longest interval: keeps usual waits up to date, and shows whether help is still needed
	detailAfter = 5 * time.Second // how long details stay on after a missed reservation
	stallShare  = 0.01            // of the time: tasks that stall for less cost no reservation a twentieth
)

// Lacks reports whether a window without details needs some before Next judges it.
func (c *Control) Lacks(w Window) bool {
	if w.Length <= 0 || w.Detailed {
		return false
	}
	due := w.Taken.Sub(c.detailed) >= detailEvery
	for _, d := range w.Demands {
		s := c.standing[Place{d.Container, d.Disk}]
		if d.starved(w) || d.total() >= least && (due || !s.known || s.reserved != d.Reserved) {
			return true
		}
	}
	return false
}

// Watches reports whether details must stay on after the last window.
func (c *Control) Watches(now time.Time) bool { return now.Sub(c.starved) < detailAfter }

// starved reports whether it misses its reservation and its tasks stalled: for a CPU, because of a
// quota, or because of the hypervisor.
func (d Demand) starved(w Window) bool {
	reads, writes := d.missed(w)
	least := time.Duration(stallShare * float64(w.Length))
	return (reads || writes) && (!d.Stalls || d.Pressure >= least || w.Stolen >= least)
}

// noteDetails records when a window last had details, and when one last needed them.
func (c *Control) noteDetails(w Window) {
	if w.Detailed {
		c.detailed = w.Taken
	}
	for _, d := range w.Demands {
		if d.starved(w) {
			c.starved = w.Taken
		}
	}
}
