package netcpu

import (
	"errors"
	"time"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/kernel/journal"
	"github.com/fairlead-project/fairlead/kernel/netdev"
)

// controlEvery is how long a window of control is.
const controlEvery = time.Second

// counted is what reshape last read of one tenant.
type counted struct {
	at           time.Time
	small, super uint64
}

// controlLoop looks at what came in each window, and acts on it, until stop is
// closed.
func (n *Netcpu) controlLoop(stop <-chan struct{}, done chan<- struct{}) {
	defer close(done)
	tick := time.NewTicker(controlEvery)
	defer tick.Stop()
	var trouble trouble
	for {
		select {
		case <-stop:
			return
		case now := <-tick.C:
			err := n.look(now)
			if windows := trouble.tell(now, err); windows > 0 {
				n.cfg.Log.Warn("following the traffic", "feature", name, "windows", windows, "err", err)
			}
		}
	}
}

// tellEvery is how often the log may say that something went wrong in a window: a
// container can bring that about in each.
const tellEvery = time.Minute

// trouble decides which errors of controlLoop are told. Their texts differ from one
// window to the next, so that time alone bounds them.
type trouble struct {
	told    time.Time // the last time
	windows int       // with an error since
}

// tell takes one window into account, and gives in how many something went wrong
// since that was last told: 0 if there is nothing to tell now.
func (t *trouble) tell(now time.Time, err error) (windows int) {
	if err == nil {
		return 0
	}
	t.windows++
	if !t.told.IsZero() && now.Sub(t.told) < tellEvery {
		return 0
	}
	windows = t.windows
	t.told, t.windows = now, 0
	return windows
}

// look takes one window into account.
func (n *Netcpu) look(now time.Time) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	err := errors.Join(n.reweigh(), n.renew())
	if n.early == nil {
		return err // nothing is counted
	}
	length := now.Sub(n.looked)
	n.looked = now
	return errors.Join(err, n.reshape(now), n.assignQueues(length))
}

// reshape gives each tenant the shape of packets that its traffic asks for.
func (n *Netcpu) reshape(now time.Time) error {
	var errs []error
	for _, t := range n.tenants {
		if t.early == nil {
			continue
		}
		c, err := n.early.read(t.early)
		if err != nil {
			errs = append(errs, err)
			continue
		}
		last := t.counted
		t.counted = counted{now, c.Small, c.Super}
		if last.at.IsZero() {
			continue
		}
		before := t.control
		want := t.control.next(window{now.Sub(last.at), c.Small - last.small, c.Super - last.super})
		if want == before.shape {
			continue
		}
		if want == super {
			off, err := n.switchedOff(t)
			if !off {
				t.control = control{}
				errs = append(errs, passing(err))
				continue
			}
		}
		if err := n.setShape(t, want); err != nil && !errors.Is(err, journal.ErrGone) {
			t.control = before // so that the next window tries again
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

// setShape switches TSO at the host ends of a tenant's devices.
func (n *Netcpu) setShape(t *tenant, s shape) error {
	// While the ring is not used nothing may be dropped on its account: so
	// first the count goes, or comes last.
	if s == super {
		if err := n.early.ring(t.early, false); err != nil {
			return err
		}
	}
	for _, dev := range t.members[t.owner].Interfaces {
		if !ownNAPI(dev) {
			continue
		}
		if err := n.setTSO(dev.Host, s, t.owner); err != nil {
			return err
		}
	}
	if s == single {
		return n.early.ring(t.early, true)
	}
	return nil
}

// switchedOff says whether TSO is off at any host end of a tenant on our account.
// Where it was off before there are no super-packets to be had.
func (n *Netcpu) switchedOff(t *tenant) (bool, error) {
	var errs []error
	for _, dev := range t.members[t.owner].Interfaces {
		if !ownNAPI(dev) {
			continue
		}
		off := false
		err := n.withTSO(dev.Host, func(knob journal.Knob) error {
			_, off = n.turned(knob)
			return nil
		})
		if off {
			return true, nil
		}
		errs = append(errs, err)
	}
	return false, errors.Join(errs...)
}

// turned gives the note of a knob that this feature has turned.
func (n *Netcpu) turned(k journal.Knob) (journal.Entry, bool) {
	e, ok := n.cfg.Journal.Entry(k.Ref())
	return e, ok && e.Owner.Feature == name
}

// setTSO switches TSO at the host end of a veth off for single packets. For super
// it goes back to what it was, which may have been a part of it, or nothing.
func (n *Netcpu) setTSO(end container.HostEnd, s shape, id container.ID) error {
	return n.withTSO(end, func(knob journal.Knob) error {
		if s == single {
			return n.turn(knob, netdev.Off, id)
		}
		e, ok := n.turned(knob)
		if !ok {
			return nil
		}
		return n.turn(knob, e.Before, id)
	})
}

func (n *Netcpu) withTSO(end container.HostEnd, do func(journal.Knob) error) error {
	host, err := n.find.Open(end.NSPath, end.NetNS)
	if err != nil {
		return err
	}
	defer host.Close()
	return do(host.Offload(end.Index, netdev.TSO))
}
