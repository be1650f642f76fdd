// Package netcpu makes the CPU time that a container's packets cost the
// container's own (Iron, NSDI 2018).
//
// In this build it does so in one way, the mode isolate: the container's
// receive processing runs in NAPI kernel threads, and those threads live in
// the container's own cpu cgroup, so that the scheduler charges and limits it
// like anything else the container does. What comes before the container (NIC
// poll, bridge) runs in threads too: of the container whose packets a queue
// brings, or of a group of its own; and a packet that the container has no time
// for is dropped there.
//
// It is not a traffic shaper: it never looks at how many bytes a container is
// due. Package agent calls it, as a feature.Feature. README.md beside this
// file says what is changed on the host and what it was measured to give.
package netcpu

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"path/filepath"
	"sync"
	"sync/atomic"
	"time"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/feature"
	"github.com/fairlead-project/fairlead/kernel"
	"github.com/fairlead-project/fairlead/kernel/cgroup"
	"github.com/fairlead-project/fairlead/kernel/journal"
	"github.com/fairlead-project/fairlead/kernel/netdev"
	"github.com/fairlead-project/fairlead/kernel/probe"
	"github.com/fairlead-project/fairlead/policy"
)

// name is the feature's name and the owner of its journal entries.
const name = "netcpu"

// Config is what New needs.
type Config struct {
	Roots   kernel.Roots
	Journal *journal.Journal
	Log     *slog.Logger // for what goes wrong with nobody to return it to; nil: no log

	// NetNS is a path to the host's network namespace, where its uplinks are;
	// "" is the namespace of this process.
	NetNS string
}

// Netcpu is the feature. See feature.Feature for how it may be called.
type Netcpu struct {
	cfg     Config
	layout  cgroup.Layout
	support probe.Verdict
	// throttled says that the kernel stops a kernel thread whose group has
	// used up its quota; where it does not, weight has to do it.
	throttled bool
	early     *early // nil where the kernel cannot run it

	mu      sync.Mutex
	tenants map[uint64]*tenant       // by network namespace
	member  map[container.ID]*tenant // each container that Apply isolated
	host    *uplinks                 // nil while nothing is isolated

	looked     time.Time // the last window's end
	closed     atomic.Bool
	stop, done chan struct{} // of controlLoop
}

// tenant is one network namespace, whose packets are charged to one cgroup
// however many containers share it.
type tenant struct {
	netns   uint64
	owner   container.ID // who pays
	group   string       // the cgroup of the cpu controller that pays
	cpuset  string       // and the one of the cpuset controller; "" for none
	queues  bool         // whether queues of uplinks may be given to it
	members map[container.ID]container.Container
	threads []thread
	early   *watched // nil without early drop
	control control
	counted counted
}

// thread is a NAPI kernel thread that this feature placed.
type thread struct {
	tid    int
	device string
}

// New finds out what the host can do. It changes nothing.
func New(cfg Config) (*Netcpu, error) {
	layout, err := cgroup.Detect(cfg.Roots.Proc, cfg.Roots.Cgroup)
	if err != nil {
		return nil, fmt.Errorf("netcpu: %w", err)
	}
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	if cfg.NetNS == "" {
		cfg.NetNS = filepath.Join(cfg.Roots.Proc, "self", "ns", "net")
	}
	n := &Netcpu{
		cfg:     cfg,
		layout:  layout,
		tenants: make(map[uint64]*tenant),
		member:  make(map[container.ID]*tenant),
		stop:    make(chan struct{}),
		done:    make(chan struct{}),
	}
	if n.throttled, err = probe.KthreadsThrottled(cfg.Roots); err != nil {
		n.throttled = true
		cfg.Log.Warn("taking kernel threads for throttled by quotas", "feature", name, "err", err)
	}
	var why error
	n.early, why = newEarly()
	n.support = support(cfg.Roots, layout, n.throttled, why)
	go n.controlLoop(n.stop, n.done)
	return n, nil
}

// Name implements feature.Feature.
func (n *Netcpu) Name() string { return name }

// Support implements feature.Feature.
func (n *Netcpu) Support() probe.Verdict { return n.support }

// Apply implements feature.Feature. Errors: feature.ErrNotBuilt for the modes
// charge and auto.
func (n *Netcpu) Apply(ctx context.Context, t policy.Target) error {
	switch t.Settings.NetCPU {
	case "", policy.NetCPUObserve:
		return n.Remove(ctx, t.Container.ID)
	case policy.NetCPUIsolate:
	default:
		return fmt.Errorf("netcpu %s: %w", t.Settings.NetCPU, feature.ErrNotBuilt)
	}
	if n.support.Level == probe.Unavailable {
		return fmt.Errorf("netcpu isolate: %s", n.support.Why)
	}
	c := t.Container
	if c.HostNetwork {
		return errors.New("netcpu isolate: the container uses the host's network namespace, whose packets cannot be told apart by device")
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.isolate(ctx, c)
}

// Remove implements feature.Feature. If the container paid for a namespace that
// others are still in, the next of them takes over.
func (n *Netcpu) Remove(ctx context.Context, id container.ID) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	// First of all, as a thread that stays in the cgroup of a container which
	// has ended keeps the runtime from removing it. It is also for what an
	// earlier agent, or an Apply that failed, has left.
	t := n.member[id]
	if t != nil && t.owner == id {
		if err := n.takeQueues(t); err != nil {
			return err
		}
	}
	if err := n.undo(id); err != nil || t == nil {
		return err
	}
	delete(n.member, id)
	delete(t.members, id)
	if t.owner != id {
		return nil
	}
	delete(n.tenants, t.netns)
	err := n.unwatch(t)
	for m, c := range t.members {
		delete(n.member, m)
		if len(n.tenants) == 0 || n.tenants[t.netns] == nil {
			err = errors.Join(err, n.isolate(ctx, c))
			continue
		}
		n.join(n.tenants[t.netns], c)
	}
	if len(n.tenants) == 0 {
		err = errors.Join(err, n.releaseUplinks())
	}
	return err
}

// join makes c one of those whose packets a tenant's owner pays for.
func (n *Netcpu) join(t *tenant, c container.Container) {
	t.members[c.ID] = c
	n.member[c.ID] = t
}

// Prune implements feature.Feature. The uplinks go with the last container: if
// one comes later, Apply claims them again.
func (n *Netcpu) Prune(_ context.Context, alive func(container.ID) bool) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	out, err := n.outcomes(func(e journal.Entry) bool {
		if e.Owner.Container == 0 {
			return len(n.tenants) == 0
		}
		return !alive(container.ID(e.Owner.Container))
	})
	return errors.Join(err, kernel.Tidy(n.cfg.Roots, out))
}

// Close implements feature.Feature. Isolation stays; early drop ends, and with
// it the choice of the shape: packets stay as they are.
func (n *Netcpu) Close() error {
	if !n.closed.Swap(true) {
		close(n.stop)
	}
	<-n.done
	n.mu.Lock()
	defer n.mu.Unlock()
	var errs []error
	errs = append(errs, n.unwatchUplinks())
	for _, t := range n.tenants {
		errs = append(errs, n.unwatch(t))
	}
	if n.early != nil {
		errs = append(errs, n.early.close())
		n.early = nil
	}
	return errors.Join(errs...)
}

// unwatch ends the early drop of a tenant.
func (n *Netcpu) unwatch(t *tenant) error {
	w := t.early
	if w == nil {
		return nil
	}
	t.early = nil
	return n.early.remove(w)
}

// undo restores whatever was changed on behalf of one container.
func (n *Netcpu) undo(id container.ID) error {
	return n.restore(func(e journal.Entry) bool { return e.Owner.Container == uint64(id) })
}

func (n *Netcpu) restore(match func(journal.Entry) bool) error {
	_, err := n.outcomes(match)
	return err
}

func (n *Netcpu) outcomes(match func(journal.Entry) bool) ([]journal.Outcome, error) {
	return n.cfg.Journal.Restore(kernel.Opener(n.cfg.Roots), func(e journal.Entry) bool {
		return e.Owner.Feature == name && match(e)
	})
}

// turn turns a knob on behalf of a container (0: of the host).
func (n *Netcpu) turn(k journal.Knob, value string, id container.ID) error {
	return n.cfg.Journal.Turn(k, value, journal.Owner{Feature: name, Container: uint64(id)})
}

// open opens a network namespace by its inode, by way of path if that still
// leads to it.
func (n *Netcpu) open(path string, inode uint64) (*netdev.NS, error) {
	if path != "" {
		if ns, err := netdev.Open(path); err == nil {
			if ns.Inode() == inode {
				return ns, nil
			}
			ns.Close()
		}
	}
	path, err := netdev.Find(n.cfg.Roots.Proc, inode)
	if err != nil {
		return nil, err
	}
	return netdev.Open(path)
}
