package isolate

import (
	"errors"

	"github.com/fairlead-project/fairlead/kernel/journal"
	"github.com/fairlead-project/fairlead/kernel/netdev"
	"github.com/fairlead-project/fairlead/kernel/sched"
)

// This file reads the state that plan.go needs. It changes nothing.

// device is a device that has, or can have, NAPIs.
type device struct {
	ns    *netdev.NS
	index int
	name  string
	rps   []receiveQueue
	tso   journal.Knob // at the host end of a container's veth; nil for an uplink
}

// receiveQueue holds the RPS CPU mask of one queue: the present one and the operator's.
type receiveQueue struct{ mask, given string }

// lookAt reads the state of a device.
func (is *Isolator) lookAt(ns *netdev.NS, index int, name string) (device, error) {
	d := device{ns: ns, index: index, name: name}
	link, err := ns.Link(index)
	if err != nil {
		return d, err
	}
	for q := range link.RxQueues {
		knob := ns.RPS(index, q)
		mask, err := knob.Read()
		if q > 0 && errors.Is(err, journal.ErrGone) {
			break // a veth has a queue for each CPU but uses one; sysfs shows only queues in use
		}
		if err != nil {
			return d, err
		}
		d.rps = append(d.rps, receiveQueue{mask, is.cfg.Journal.Given(knob.Ref(), mask)})
	}
	return d, nil
}

// planFor returns the plan that puts a thread in its place.
func (is *Isolator) planFor(t sched.Thread, at place) ([]journal.Setting, error) {
	proc := is.cfg.Roots.Proc
	slice, err := sched.Slice(proc, t).Read()
	if err != nil {
		return nil, err
	}
	nice, err := sched.Nice(proc, t).Read()
	if err != nil {
		return nil, err
	}
	if nice == sched.NoNice {
		at.nice = "" // the thread is not in the fair class
	}
	return append(placing(proc, is.cfg.Layout, t, at), pacing(proc, t, slice, at.nice)...), nil
}
