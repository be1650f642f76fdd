// Package decide decides who may reserve block I/O, whether a reservation is met, who is in
// the way, and what is done about that. It is pure: it works from the windows, capacities and
// times that the caller passes, and reads neither the kernel, nor files, nor a clock.
//
// Package blockio calls it, and puts its decisions in force. Package monitor measures in its
// terms.
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

// Ids in place of a container's.
const (
	System container.ID = 0                  // everything outside of containers
	Unseen container.ID = math.MaxUint64 - 1 // too many others ran while a task waited
)

// Ids in place of a culprit's: what made a task wait, whichever task ran meanwhile.
const (
	Quota    container.ID = math.MaxUint64 - 2 // the CPU quota of its cgroup, or of one above, was used up
	Realtime container.ID = math.MaxUint64 - 3 // its real-time budget was used up
	Stolen   container.ID = math.MaxUint64 - 4 // the hypervisor had the CPU, also while the task itself ran
)

// IsContainer reports whether an id is a container's, and not one of the above.
func IsContainer(id container.ID) bool { return id != System && id < Stolen }

// Disk is a whole disk, by its device number.
type Disk struct{ Major, Minor uint32 }

// String returns the form of the kernel's files, such as 254:0.
func (d Disk) String() string { return fmt.Sprintf("%d:%d", d.Major, d.Minor) }

// Place is a container at a disk.
type Place struct {
	Container container.ID
	Disk      Disk
}

// Demand is what a container asked for and got of one reservation during a window.
type Demand struct {
	Container container.ID
	Name      string
	Disk      Disk
	Reserved  api.BlockIOFigures // per second
	Achieved  api.BlockIOFigures // per second
	Under     time.Duration      // sum of the times that its requests were under way
	Ended     time.Duration      // from the completion of its last request to the end of the window

	// Waited is how long its threads that do I/O waited for CPUs, summed up over the threads, by
	// who ran there. Quota, Realtime, Stolen and Unseen are keys, too.
	Waited   map[container.ID]time.Duration
	Quota    string        // the cgroup that throttled it the most; "" if none did
	Used     time.Duration // its CPU time
	Pressure time.Duration // at least one of its tasks waited for a CPU (PSI)
	Stalls   bool          // Pressure is counted

	Interrupts policy.Interrupts // what policy allows, before decisions
	May        May
}

// Neighbour is a container that may be in the way of others.
type Neighbour struct {
	Name     string
	Reserved bool         // it has a reservation: it keeps its CPUs, its weight, and what it has reserved
	Yield    policy.Yield // what policy allows, before decisions
	IO       map[Disk]api.BlockIOFigures
}

// Window is what happened on the host between two readings.
type Window struct {
	Taken      time.Time
	Length     time.Duration
	Detailed   bool          // Waited is known; else it is empty
	Stolen     time.Duration // by the hypervisor, summed up over the CPUs
	CPUs       int           // of the host
	Demands    []Demand
	Neighbours map[container.ID]Neighbour
	Complete   bool // Neighbours has all running containers
	Capacity   map[Disk]Capacity
	Network    map[Disk]time.Duration // time that a CPU which serves the disk worked for the network
	Divides    map[Disk]string        // what divides the disk by weight; "" if nothing does
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

// oneAtATime reports whether it has one request under way at a time, and gets as many as the
// disk does of these.
func (d Demand) oneAtATime(w Window) bool {
	n, known := w.Capacity[d.Disk].requests(d.Achieved)
	const alone = 1.1 // requests under way: there is no second one
	return known && d.total() >= least && n >= enough && d.Under <= time.Duration(alone*float64(w.Length))
}

func (d Demand) total() uint64 { return d.Achieved.ReadIOPS + d.Achieved.WriteIOPS }

// busy reports whether it had requests under way for a good part of the time.
func (d Demand) busy(w Window) bool { return d.Under >= time.Duration(busyShare*float64(w.Length)) }

// asks reports whether it has use for more of what it misses: it had requests under way, or
// it would have asked for a good part of what it has reserved if it had not waited for so long.
func (d Demand) asks(w Window, waited time.Duration) bool {
	capacity, left := w.Capacity[d.Disk], 1-min(waited.Seconds()/w.Length.Seconds(), mostWaiting)
	_, gotReads, gotWrites := capacity.Share(d.Achieved)
	_, dueReads, dueWrites := capacity.Share(d.Reserved)
	reads, writes := d.missed(w)
	return d.busy(w) || reads && gotReads/left >= asked*dueReads || writes && gotWrites/left >= asked*dueWrites
}

// foreign returns how long it waited while others ran, by container.
func (d Demand) foreign() map[container.ID]time.Duration {
	out := maps.Clone(d.Waited)
	maps.DeleteFunc(out, func(id container.ID, t time.Duration) bool {
		return id == d.Container || id != System && !IsContainer(id) || t < time.Millisecond
	})
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

// Details cost a load at the disk some of its IOPS, so that they are measured only while a
// reservation may be missed for want of a CPU, and else for a moment now and then.
const (
	detailEvery = 5 * time.Second // at the least: what a container usually waits, and whether help is still needed
	detailAfter = 5 * time.Second // a reservation was last missed
	stallShare  = 0.01            // of the time, that tasks are stalled: less costs no reservation a twentieth
)

// Lacks reports whether a window without details is to have some before it is judged.
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

// Watches reports whether details are to be measured on, after the last window.
func (c *Control) Watches(now time.Time) bool { return now.Sub(c.starved) < detailAfter }

// starved reports whether it misses its reservation, and its tasks were stalled: for a CPU, by a
// quota, or by the hypervisor.
func (d Demand) starved(w Window) bool {
	reads, writes := d.missed(w)
	least := time.Duration(stallShare * float64(w.Length))
	return (reads || writes) && (!d.Stalls || d.Pressure >= least || w.Stolen >= least)
}

// noteDetails notes when a window had details, and when it needed them.
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
