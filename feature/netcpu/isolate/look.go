package isolate

import (
	"errors"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/kernel/cgroup"
	"github.com/fairlead-project/fairlead/kernel/journal"
	"github.com/fairlead-project/fairlead/kernel/netdev"
	"github.com/fairlead-project/fairlead/kernel/sched"
)

// This file reads what plan.go needs, and changes nothing.

// device is a device that is, or can be, polled on its own.
type device struct {
	ns    *netdev.NS
	index int
	name  string
	rps   []receiveQueue
	end   *hostEnd // of a container's veth; nil for an uplink
}

// receiveQueue is the CPU mask of one queue's RPS: the present one, and the operator's.
type receiveQueue struct{ mask, given string }

// hostEnd is the host end of a veth.
type hostEnd struct {
	ns          *netdev.NS // to be closed
	index       int
	switchedOff bool   // TSO, by us,
	before      string // and its earlier value
}

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
			break // a veth is made with a queue for each CPU and uses one; sysfs shows only those in use
		}
		if err != nil {
			return d, err
		}
		d.rps = append(d.rps, receiveQueue{mask, is.cfg.Journal.Given(knob.Ref(), mask)})
	}
	return d, nil
}

// lookAtVeth reads the state of a container's device and its host end, which the caller closes.
func (is *Isolator) lookAtVeth(ns *netdev.NS, dev container.Interface) (device, error) {
	d, err := is.lookAt(ns, dev.Index, dev.Name)
	if err != nil {
		return d, err
	}
	d.end, err = is.lookAtEnd(dev.Host)
	return d, err
}

// lookAtEnd reads the state of the host end of a veth. The caller closes it.
func (is *Isolator) lookAtEnd(end container.HostEnd) (*hostEnd, error) {
	ns, err := is.cfg.Find.Open(end.NSPath, end.NetNS)
	if err != nil {
		return nil, err
	}
	e, turned := is.turned(ns.Offload(end.Index, netdev.TSO))
	return &hostEnd{ns: ns, index: end.Index, switchedOff: turned, before: e.Before}, nil
}

func (e *hostEnd) close() error { return e.ns.Close() }

// weight is the CPU weight of a cgroup.
type weight struct {
	knob  journal.Knob
	takes cgroup.WeightRange
	now   string
	given string // by its owner
	mine  bool   // turned for this container
}

func (is *Isolator) lookAtWeight(dir string, id container.ID) (weight, error) {
	knob, takes := cgroup.WeightKnob(dir, is.v2())
	now, err := knob.Read()
	w := weight{knob: knob, takes: takes, now: now, given: now}
	if e, turned := is.turned(knob); turned {
		w.mine = e.Owner == is.by(id)
	}
	w.given = is.cfg.Journal.Given(knob.Ref(), now)
	return w, err
}

// planFor returns the plan for a thread and its place.
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
		at.nice = "" // it is not in the fair class
	}
	return append(placing(proc, is.cfg.Layout, t, at), pacing(proc, t, slice, at.nice)...), nil
}

// turned returns the entry of a knob that this feature has turned.
func (is *Isolator) turned(k journal.Knob) (journal.Entry, bool) {
	return is.cfg.Journal.Entry(k.Ref(), is.cfg.Feature)
}
