package netdev

import (
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/fairlead-project/fairlead/kernel/journal"
)

// The journal kinds of this package.
const (
	KindOffload  = "offload"
	KindThreaded = "threaded"
	KindRPS      = "rps"
	KindRFS      = "rfs"
	KindIFB      = "ifb"
	KindPair     = "pair"
	KindSysfs    = "sysfs"
	KindDefer    = "defer"
)

// deviceRef names a knob of one device. Its namespace is an inode, since paths come and go.
func deviceRef(kind string, ns *NS, index int, detail string) journal.Ref {
	return journal.Ref{Kind: kind, Object: fmt.Sprintf("%d/%d/%s", ns.inode, index, detail)}
}

// OpenKnob opens a knob by its entry in the journal. Errors: those of OpenAt.
func OpenKnob(find *Finder, ref journal.Ref) (journal.Knob, error) {
	return OpenAt(find, ref, true, knobOf)
}

// OpenAt opens a knob of one device by its reference, NETNS/DEVICE, or NETNS/DEVICE/DETAIL if it is
// detailed. knobOf returns the constructor of its kind, without touching the host. Errors:
// journal.ErrGone if the namespace has gone; errCutOff if that is not known.
//
// The knob keeps its namespace open until it is closed (it is an io.Closer).
func OpenAt(find *Finder, ref journal.Ref, detailed bool, knobOf func(kind, detail string) (func(*NS, int) journal.Knob, error)) (journal.Knob, error) {
	parts := strings.SplitN(ref.Object, "/", 3)
	if len(parts) < 2 || (len(parts) == 3) != detailed {
		return nil, fmt.Errorf("open knob %s %q: want NETNS/DEVICE, and a detail: %t", ref.Kind, ref.Object, detailed)
	}
	inode, err1 := strconv.ParseUint(parts[0], 10, 64)
	index, err2 := strconv.ParseUint(parts[1], 10, 31)
	knob, err3 := knobOf(ref.Kind, strings.Join(parts[2:], ""))
	err := errors.Join(err1, err2, err3)
	var ns *NS
	if err == nil {
		if ns, err = find.Open("", inode); errors.Is(err, ErrNoNS) {
			err = errors.Join(journal.ErrGone, err)
		}
	}
	if err != nil {
		return nil, fmt.Errorf("open knob %s %q: %w", ref.Kind, ref.Object, err)
	}
	return opened{knob(ns, int(index)), ns}, nil
}

// knobOf returns the constructor of a kind of knob, without touching the host.
func knobOf(kind, detail string) (func(*NS, int) journal.Knob, error) {
	switch kind {
	case KindOffload:
		group := Offload(detail)
		if group.features() == nil {
			return nil, fmt.Errorf("unknown offload %q", detail)
		}
		return func(ns *NS, index int) journal.Knob { return ns.Offload(index, group) }, nil
	case KindThreaded:
		return (*NS).Threaded, nil
	case KindDefer:
		if !slices.Contains([]Deferral{HardIRQs, FlushTimeout}, Deferral(detail)) {
			return nil, fmt.Errorf("unknown deferral %q", detail)
		}
		return func(ns *NS, index int) journal.Knob { return ns.Defer(index, Deferral(detail)) }, nil
	case KindSysfs:
		return func(ns *NS, _ int) journal.Knob { return superblock{ns} }, nil
	case KindIFB:
		return func(ns *NS, index int) journal.Knob { return ns.IFB(index, detail == ifbSent) }, nil
	case KindPair:
		return func(ns *NS, index int) journal.Knob { return ns.Pair(index, nil) }, nil
	case KindRPS, KindRFS:
		queue, err := strconv.Atoi(detail)
		if err != nil || queue < 0 {
			return nil, fmt.Errorf("bad queue %q", detail)
		}
		if kind == KindRFS {
			return func(ns *NS, index int) journal.Knob { return ns.RFS(index, queue) }, nil
		}
		return func(ns *NS, index int) journal.Knob { return ns.RPS(index, queue) }, nil
	}
	return nil, errors.New("unknown kind")
}

// opened is a knob with the namespace that was opened for it.
type opened struct {
	journal.Knob
	ns *NS
}

func (o opened) Close() error { return o.ns.Close() }

// Exposes calls Exposes of the knob, if it has one.
func (o opened) Exposes() (ref journal.Ref, before, during string, err error) {
	if x, ok := o.Knob.(journal.Exposing); ok {
		return x.Exposes()
	}
	return journal.Ref{}, "", "", nil
}

// Unfinished calls Unfinished of the knob, if it has one.
func (o opened) Unfinished(value, from, target string) bool {
	s, ok := o.Knob.(journal.Stepwise)
	return ok && s.Unfinished(value, from, target)
}
