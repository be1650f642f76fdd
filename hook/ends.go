// Package hook attaches the programs of features to the devices that a container's
// packets pass: the host ends of its veths, in any network namespace, its own devices,
// and the uplinks. It finds the devices of a container, attaches programs, keeps them
// attached, follows a device that is recreated, and detaches. order.go defines the order
// in which the programs of several features run at one device.
//
// It knows neither what a program does nor who sent a packet (package identity does).
// The agent makes one Ends for all features.
package hook

import (
	"errors"
	"time"

	"github.com/cilium/ebpf"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/kernel/bpf"
	"github.com/fairlead-project/fairlead/kernel/journal"
	"github.com/fairlead-project/fairlead/kernel/netdev"
	"github.com/fairlead-project/fairlead/kernel/qdisc"
)

// Ends attaches programs. It is safe for concurrent use.
type Ends struct {
	hooks *qdisc.Hooks
	find  *netdev.Finder
	err   error
}

// Open probes how this kernel attaches programs. proc is the root of proc. Programs that
// are filters are recorded in j.
func Open(proc string, j *journal.Journal) *Ends {
	e := &Ends{find: netdev.NewFinder(proc, time.Now)}
	e.hooks, e.err = qdisc.OpenHooks(e.find, j)
	return e
}

// Err returns why this kernel cannot attach programs, or nil.
func (e *Ends) Err() error { return e.err }

// Filters reports whether programs are filters of a clsact qdisc, as before tcx (6.6).
func (e *Ends) Filters() bool { return e.err == nil && e.hooks.Filters() }

// Left lists the programs that end with this process, for its successor.
func (e *Ends) Left() []qdisc.Left {
	if e.err != nil {
		return nil
	}
	return e.hooks.Left()
}

// Inherit takes ownership of i, the programs of the preceding process. They stay attached until Put
// attaches this process's own in their places, or until Disinherit. Call Inherit before Put.
func (e *Ends) Inherit(i *qdisc.Inherited) {
	if e.err != nil {
		i.Close()
		return
	}
	e.hooks.Inherit(i)
}

// Disinherit detaches the inherited programs that Put has not replaced.
func (e *Ends) Disinherit() error {
	if e.err != nil {
		return nil
	}
	return e.hooks.Disinherit()
}

// Stray reports whether a journal entry is a filter that a killed process left behind.
func (e *Ends) Stray(n journal.Entry) bool {
	return n.Ref.Kind == qdisc.KindFilter && (e.err != nil || e.hooks.Stray(n))
}

// Look reads what is attached to a device, in the namespace at path; with path "" it searches for the
// namespace. Errors: journal.ErrGone or netdev.ErrNoNS if the device or the namespace has gone;
// Ends.Err.
func (e *Ends) Look(at container.Device, path string) (qdisc.State, error) {
	if e.err != nil {
		return qdisc.State{}, e.err
	}
	ns, err := e.find.Open(path, at.NetNS)
	if err != nil {
		return qdisc.State{}, err
	}
	defer ns.Close()
	return e.hooks.Look(ns, at.Index)
}

// Place is where a program is attached. Device, direction and name identify it. A name
// consists of lower-case letters, digits and underscores.
type Place struct {
	container.Device
	Path   string // of the namespace; "": Put searches for it
	Egress bool   // else ingress
	Stage  qdisc.Stage
	Name   string
	Owner  journal.Owner
}

// site is the key of a place.
type site struct {
	container.Device
	egress bool
	name   string
}

// Set holds the attached programs of one user. The zero value is empty. It is not safe
// for concurrent use.
type Set struct {
	held map[site]held
}

// held is an attached program; copied is its copy, if it is one
type held struct {
	*qdisc.Attachment
	copied *bpf.Copy
}

// Len returns the number of attached programs.
func (s *Set) Len() int { return len(s.held) }

// Lost reports whether something else detached a program, which no event announces, or its device has
// gone. Put attaches the program again.
func (s *Set) Lost() bool {
	for _, a := range s.held {
		if a.Lost() {
			return true
		}
	}
	return false
}

// Put attaches a program at a place, unless it is attached already. It calls load only to attach, which
// includes the case that a new device has taken the index of a removed one, and closes the program that
// load returned. Errors: journal.ErrGone or netdev.ErrNoNS if the device or the namespace has gone;
// Ends.Err.
func (s *Set) Put(e *Ends, at Place, load func() (*ebpf.Program, error)) error {
	return s.put(e, at, func(attach func(*ebpf.Program) (*qdisc.Attachment, error)) (held, error) {
		p, err := load()
		if err != nil {
			return held{}, err
		}
		defer p.Close() // the attachment holds it
		a, err := attach(p)
		return held{Attachment: a}, err
	})
}

// PutCopy is Put for a copy of a program, which the Set closes once it has detached it.
func (s *Set) PutCopy(e *Ends, at Place, load func() (*bpf.Copy, error)) error {
	return s.put(e, at, func(attach func(*ebpf.Program) (*qdisc.Attachment, error)) (held, error) {
		c, err := load()
		if err != nil {
			return held{}, err
		}
		a, err := attach(c.Program)
		if err != nil {
			err = errors.Join(err, c.Close())
		}
		return held{Attachment: a, copied: c}, err
	})
}

func (s *Set) put(e *Ends, at Place, fill func(attach func(*ebpf.Program) (*qdisc.Attachment, error)) (held, error)) error {
	if e.err != nil {
		return e.err
	}
	key := site{at.Device, at.Egress, at.Name}
	if a, ok := s.held[key]; ok {
		err := a.Hold()
		if !errors.Is(err, journal.ErrGone) {
			return err
		}
		if err := s.drop(key); err != nil {
			return err
		}
	}
	ns, err := e.find.Open(at.Path, at.NetNS)
	if err != nil {
		return err
	}
	defer ns.Close()
	a, err := fill(func(p *ebpf.Program) (*qdisc.Attachment, error) {
		return e.hooks.Attach(qdisc.Hook{NS: ns, Index: at.Index, Egress: at.Egress, Stage: at.Stage, Name: at.Name}, p, at.Owner)
	})
	if err != nil {
		return err
	}
	if s.held == nil {
		s.held = make(map[site]held)
	}
	s.held[key] = a
	return nil
}

// Vary sets the variables of all copies with this name.
func (s *Set) Vary(name string, vars bpf.Vars) error {
	var errs []error
	for key, a := range s.held {
		if key.name == name && a.copied != nil {
			errs = append(errs, a.copied.Set(vars))
		}
	}
	return errors.Join(errs...)
}

// Drop detaches the programs of matching places. It continues after an error, and ignores devices that
// have gone.
func (s *Set) Drop(match func(d container.Device, egress bool, name string) bool) error {
	var errs []error
	for key := range s.held {
		if match(key.Device, key.egress, key.name) {
			errs = append(errs, s.drop(key))
		}
	}
	return errors.Join(errs...)
}

func (s *Set) drop(key site) error {
	a := s.held[key]
	delete(s.held, key)
	err := a.Close()
	if a.copied != nil {
		err = errors.Join(err, a.copied.Close())
	}
	return err
}

// Close detaches all programs. The set can be used again.
func (s *Set) Close() error {
	return s.Drop(func(container.Device, bool, string) bool { return true })
}
