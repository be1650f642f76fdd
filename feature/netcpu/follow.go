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
	for {
		select {
		case <-stop:
			return
		case now := <-tick.C:
			if err := n.look(now); err != nil {
				n.cfg.Log.Warn("following the traffic", "feature", name, "err", err)
			}
		}
	}
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

func (n *Netcpu) setTSO(end container.HostEnd, s shape, id container.ID) error {
	host, err := n.find.Open(end.NSPath, end.NetNS)
	if err != nil {
		return err
	}
	defer host.Close()
	value := netdev.Off
	if s == super {
		value = netdev.TSO.On()
	}
	return n.turn(host.Offload(end.Index, netdev.TSO), value, id)
}
