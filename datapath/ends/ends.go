// Package ends brings the programs of features to the devices at which a container's
// packets can be met: the host ends of its veths, in whichever network namespace they
// are, devices of its own, and the uplinks. It finds the devices of a container,
// attaches, holds what is attached, follows a device that was made anew, and lets go.
// In which order the programs of several features run at one device is said in
// order.go.
//
// It knows nothing of what a program does, and of packets (package identity does).
// The agent makes one Ends, and the features attach by it.
package ends

import (
	"errors"
	"path/filepath"
	"strconv"
	"time"

	"github.com/cilium/ebpf"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/kernel/journal"
	"github.com/fairlead-project/fairlead/kernel/netdev"
	"github.com/fairlead-project/fairlead/kernel/qdisc"
)

// Device is a network device: the inode of its namespace, and its index in there.
// A rename leaves it what it is.
type Device struct {
	NetNS uint64
	Index int
}

// End is a device at which packets of a container can be met.
type End struct {
	Device
	Name string
	Path string // to its namespace
	// Host says that it is the host's end of a pair: it receives what the container
	// sends. Otherwise it is the container's device itself.
	Host bool
	// Trusted says of a host end that no container can have made its namespace.
	Trusted bool
	Inside  container.Interface // the container's device
}

// Of lists the ends of a container, one for each of its devices: the host end where
// the device has one that was found, else the device itself. proc is the root of proc.
func Of(c container.Container, proc string) []End {
	var list []End
	for _, dev := range c.Interfaces {
		e := End{
			Device: Device{c.NetNS, dev.Index}, Name: dev.Name, Inside: dev,
			Path: filepath.Join(proc, strconv.Itoa(c.PID), "ns", "net"),
		}
		if h := dev.Host; h.NetNS != 0 {
			e.Device, e.Name, e.Path, e.Host, e.Trusted = Device{h.NetNS, h.Index}, h.Name, h.NSPath, true, h.Trusted
		}
		list = append(list, e)
	}
	return list
}

// Ends attaches programs. It is safe for concurrent use.
type Ends struct {
	hooks *qdisc.Hooks
	find  *netdev.Finder
	err   error
}

// Open finds out, by trying, how programs are attached on this kernel. proc is the
// root of proc. Where programs are filters, they are noted in j.
func Open(proc string, j *journal.Journal) *Ends {
	e := &Ends{find: netdev.NewFinder(proc, time.Now)}
	e.hooks, e.err = qdisc.OpenHooks(e.find, j)
	return e
}

// Err says why no program can be attached on this kernel, nil where they can.
func (e *Ends) Err() error { return e.err }

// Filters says whether programs are attached by filters of a clsact qdisc, as the
// kernel has no tcx (6.6).
func (e *Ends) Filters() bool { return e.err == nil && e.hooks.Filters() }

// Stray says whether an entry of the journal is of a filter that a process which was
// killed has left.
func (e *Ends) Stray(n journal.Entry) bool {
	return n.Ref.Kind == qdisc.KindFilter && (e.err != nil || e.hooks.Stray(n))
}

// Place is where a program is to be. Of two places of one device, direction and name,
// which are lower-case letters, digits and underlines, there is only one.
type Place struct {
	Device
	Path   string // to the namespace; "": it is looked for
	Egress bool   // else ingress
	Stage  qdisc.Stage
	Name   string
	Owner  journal.Owner
}

// site tells places apart.
type site struct {
	Device
	egress bool
	name   string
}

// Set is the programs that one user has at devices. The zero value is empty. It is
// not safe for concurrent use.
type Set struct {
	held map[site]*qdisc.Attachment
}

// Len is how many programs are attached.
func (s *Set) Len() int { return len(s.held) }

// Lost says whether somebody has detached one of the programs, of which nothing else
// tells, or its device has gone: Put attaches it again.
func (s *Set) Lost() bool {
	for _, a := range s.held {
		if a.Lost() {
			return true
		}
	}
	return false
}

// Put sees to it that a program is at a place. Where it is there it stays: load is
// called only if it is not, or if its device has gone and another has its number. The
// program that load gives is closed. Errors: journal.ErrGone or netdev.ErrNoNS, for a
// device, or a namespace, that has gone; Ends.Err.
func (s *Set) Put(e *Ends, at Place, load func() (*ebpf.Program, error)) error {
	if e.err != nil {
		return e.err
	}
	key := site{at.Device, at.Egress, at.Name}
	if a := s.held[key]; a != nil {
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
	p, err := load()
	if err != nil {
		return err
	}
	defer p.Close() // what it is attached to holds it
	a, err := e.hooks.Attach(qdisc.Hook{NS: ns, Index: at.Index, Egress: at.Egress, Stage: at.Stage, Name: at.Name}, p, at.Owner)
	if err != nil {
		return err
	}
	if s.held == nil {
		s.held = make(map[site]*qdisc.Attachment)
	}
	s.held[key] = a
	return nil
}

// Replace puts another program in the place of all that have a name. No packet passes
// in between. Where it fails, there is none then, and Put attaches one again.
func (s *Set) Replace(name string, p *ebpf.Program) error {
	var errs []error
	for key, a := range s.held {
		if key.name != name {
			continue
		}
		if err := a.Replace(p); err != nil {
			errs = append(errs, err, s.drop(key))
		}
	}
	return errors.Join(errs...)
}

// Drop detaches the programs of places that match: by device, direction and name. It
// goes on after an error. It never fails because a device has gone.
func (s *Set) Drop(match func(d Device, egress bool, name string) bool) error {
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
	return a.Close()
}

// Close detaches all programs. The set can be used again.
func (s *Set) Close() error {
	return s.Drop(func(Device, bool, string) bool { return true })
}
