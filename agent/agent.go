// Package agent is the composition root. It constructs the sources, the policy, the journal and the
// features, and keeps the host as policy wants it.
//
// Each round works from complete lists: which containers run (discover.Set), and what each is due
// (policy). One worker per feature compares that with what it has applied, and calls Apply and
// Remove. An event only says that another round is worthwhile, so a lost event costs time and
// nothing else.
//
// Only this package imports features, in features.go. cmd/fairlead and lab/bench call it; everything
// else talks to an agent through package api.
package agent

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"slices"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/fairlead-project/fairlead/agent/deviceplugin"
	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/discover"
	"github.com/fairlead-project/fairlead/feature"
	"github.com/fairlead-project/fairlead/hook"
	"github.com/fairlead-project/fairlead/kernel"
	"github.com/fairlead-project/fairlead/kernel/cgroup"
	"github.com/fairlead-project/fairlead/kernel/journal"
	"github.com/fairlead-project/fairlead/kernel/probe"
	"github.com/fairlead-project/fairlead/policy"
	"github.com/fairlead-project/fairlead/tenant/identity"
)

// containers lists the running containers. *discover.Set is one.
type containers interface {
	feature.Containers
	Snapshot() discover.Snapshot
	Run(context.Context) error
	Changed() <-chan struct{}
	Busy() time.Time
}

// Nice is the nice value of an agent: the least. Floods take the time of whatever runs on their CPUs, and
// with it that of the agent, which is to end them. On the bench, beside seven flooded containers (udp-recv
// 7 of 8 flood), it got 0.03 of a CPU at 0 and was late: the victim was 3.7 to 5.4 times slower. At -10
// that happened in one round of five. At -20 it was 0.95 to 1.01, and 1.03 to 1.14 beside one flooded
// container.
const Nice = -20

const (
	refreshTime = 5 * time.Minute  // between rounds without a request
	readyTime   = 10 * time.Second // to wait for sources that do not answer
)

// Agent is one agent. Make it with New and start it with Run.
type Agent struct {
	cfg     Config
	log     *slog.Logger
	pace    pace
	started time.Time

	alone   io.Closer // claims this network namespace; nil: not claimed
	set     containers
	policy  *policy.Store
	journal *journal.Journal
	opener  func() journal.Opener // makes an opener for the journal's entries as they stand now
	all     []feature.Feature

	identity *identity.Identity   // nil where there is none
	ends     *hook.Ends           // nil: no feature attaches programs
	plugin   *deviceplugin.Plugin // nil: kubelet is offered nothing

	guaranteed guaranteed // the amounts offered to kubelet

	workers   []*worker // one for each feature that this host supports
	rewritten *rewritten
	fences    map[string]*fence // by feature
	parts     parts
	plugged   *fence // of plugin

	kick     chan struct{} // capacity 1: requests a round
	rounding sync.Mutex    // one round at a time
	probing  sync.Mutex    // one Doctor at a time

	setting sync.Mutex // serializes Set; guards hand
	hand    []policy.Override

	keeping  sync.Mutex // serializes writes of the last good policy
	keptWhen time.Time  // time of the version written last

	fresh  fresh
	layout func() (cgroup.Layout, error) // found once

	recorder *recorder  // nil: nothing is recorded
	viewing  sync.Mutex // guards overview
	overview api.Overview

	watched []*watched            // belongs to loop
	hung    map[*worker]time.Time // hanging calls in the log; belongs to loop

	// Guarded by rounding:
	remembered *discover.Known                 // as last written into the state directory
	forgetful  bool                            // that failed
	said       map[string]string               // last log line of each source
	wanted     map[container.ID]*policy.Target // of the workers

	mu        sync.Mutex // guards what follows
	targets   map[container.ID]policy.Target
	resolved  map[container.ID]policy.Target // the same without decisions
	ordered   []policy.Target                // those in order of ID, for Decide
	problems  []policy.Problem
	complete  bool
	whole     bool                    // every source has given its list, or has had the time to
	held      map[container.ID]bool   // released by Restore
	kept      map[container.ID]string // left alone until the runtime with this name answers
	heldAll   bool
	lapses    time.Time // when the first expiry comes; zero: none
	decisions map[choice]policy.Decision
	rounds    roundCounts
}

// fresh caches the answers to containers, which ask as often as they like. It needs its own mutex,
// because computing an answer takes the mutexes of the features.
type fresh struct {
	mu      sync.Mutex
	at      time.Time
	samples api.Samples
	reports []func(container.Container, *api.SelfReports)
}

// roundCounts counts the rounds since start.
type roundCounts struct {
	made uint64
	took time.Duration // sum over all rounds
}

// New opens the journal and constructs sources, policy and features. It changes nothing on the
// host. Run handles what an earlier agent left behind.
//
// Errors: probe.ErrKernel; an invalid MetricsAddr; ErrTwo; journal.ErrBusy if another agent holds
// StateDir.
func New(cfg Config) (*Agent, error) {
	if err := probe.Supported(); err != nil {
		return nil, fmt.Errorf("start agent: %w", err)
	}
	if cfg.Roots == (kernel.Roots{}) {
		cfg.Roots = kernel.Default()
	}
	cfg.Log = cmp.Or(cfg.Log, slog.New(slog.DiscardHandler))
	if cfg.StateDir == "" {
		return nil, errors.New("start agent: no state directory is given")
	}
	if err := checkMetricsAddr(cfg.MetricsAddr); err != nil {
		return nil, fmt.Errorf("start agent: %w", err)
	}
	only, err := alone(cfg.Roots.Proc)
	if err != nil {
		return nil, fmt.Errorf("start agent: %w", err)
	}
	j, err := openJournal(cfg)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("start agent: %w", err), only.Close())
	}
	if err := kernel.Reclaim(cfg.Roots, j, shaper, poller); err != nil {
		cfg.Log.Warn("what an earlier agent has left may stay", "err", err)
	}
	if err := untold(cfg.StateDir); err != nil {
		cfg.Log.Warn("an agent that gives up waiting may take this one for told to stop", "err", err)
	}
	in := make(parts)
	rec, err := newRecorder(cfg, in.add("recorder", cfg.Log, j.Broken))
	if err != nil {
		return nil, errors.Join(fmt.Errorf("start agent: %w", err), j.Close(), only.Close())
	}
	var a *Agent
	set := watch(cfg, loadKnown(cfg), in, j.Broken, func(ctx context.Context, id string) error { return a.inForce(ctx, id) })
	who, err := identity.Open(cfg.Roots.Proc)
	if err != nil {
		cfg.Log.Warn("packets have no common identity", "err", err)
	}
	at := hook.Open(cfg.Roots.Proc, j)
	fs, err := features(cfg, set, j, who, at)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("start agent: %w", err), who.Close(), j.Close(), only.Close())
	}
	store := policy.NewStore(cfg.PolicyDir, time.Now)
	if cfg.ImageLabels {
		store.TrustImages()
	}
	store.NameDisks(cfg.Disks)
	a = assemble(cfg, set, store, j, func() journal.Opener { return kernel.Opener(cfg.Roots) }, fs, ordinary())
	a.alone, a.identity, a.ends, a.recorder = only, who, at, rec
	a.plugin, a.plugged = a.offers(), in.add("device plugin", cfg.Log, j.Broken)
	maps.Copy(a.parts, in)
	return a, nil
}

func assemble(cfg Config, set containers, store *policy.Store, j *journal.Journal, opener func() journal.Opener, fs []feature.Feature, p pace) *Agent {
	a := &Agent{
		cfg: cfg, log: cfg.Log, pace: p, started: p.now(),
		set: set, policy: store, journal: j, opener: opener, all: fs,
		said:      make(map[string]string),
		kick:      make(chan struct{}, 1),
		held:      make(map[container.ID]bool),
		decisions: make(map[choice]policy.Decision),
		hung:      make(map[*worker]time.Time),
		fences:    make(map[string]*fence),
		parts:     parts{"requests": {panics: panics{log: cfg.Log}}},
		layout:    sync.OnceValues(func() (cgroup.Layout, error) { return cgroup.Detect(cfg.Roots.Proc, cfg.Roots.Cgroup) }),
	}
	j.Attribute(func(id uint64) string {
		c, _ := set.Lookup(container.ID(id))
		return c.Source
	})
	a.rewritten = newRewritten(j, opener, p, a.log, func(feature string, id container.ID) {
		for _, w := range a.workers {
			if feature == "" || feature == w.feature.Name() {
				w.again(id)
			}
		}
	})
	for _, f := range fs {
		v := f.Support()
		if v.Level != probe.Full {
			level := slog.LevelWarn
			if v.Level == probe.Degraded && !wireVerdict(v).Mendable() {
				level = slog.LevelInfo
			}
			a.log.Log(context.Background(), level, "feature is "+string(v.Level), "feature", f.Name(), "why", v.Why, "mend", v.Mend)
		}
		if v.Level == probe.Unavailable {
			a.contain(f, newFence(f, p, a.log))
			continue
		}
		w := newWorker(f, p, a.log, a.nudge)
		w.contest = a.rewritten.contest
		a.contain(f, w.fence)
		a.workers = append(a.workers, w)
	}
	a.watch()
	return a
}

// nudge requests a round.
func (a *Agent) nudge() { poke(a.kick) }

// poke wakes the receiver of a channel of capacity 1, or lets its next receive return at once.
func poke(waits chan<- struct{}) {
	select {
	case waits <- struct{}{}:
	default:
	}
}

// Run works until ctx ends. Then it removes what it has applied, restores what remains in the
// journal, and closes everything. It is called once. The error is nil after a clean stop. Even if a
// call to the host or to the state directory hangs, Run returns within a minute after the end of
// ctx; the journal then keeps the changes in force.
func (a *Agent) Run(ctx context.Context) error {
	done := make(chan error, 1)
	go func() { done <- a.run(ctx) }()
	select {
	case err := <-done:
		return err
	case <-ctx.Done():
	}
	select {
	case err := <-done:
		return err
	case <-time.After(3*a.pace.stop + a.pace.call): // beyond the bounds of its parts
		return errors.New("stop agent: a call to the kernel does not return")
	}
}

func (a *Agent) run(ctx context.Context) error {
	serve, err := a.servers()
	if err != nil {
		errs := []error{fmt.Errorf("run agent: %w", err)}
		for _, w := range a.workers {
			errs = append(errs, w.fence.close(w.feature))
		}
		return errors.Join(append(errs, a.close())...)
	}
	// Before the first round: a round without this policy would undo what an earlier agent left in
	// force for running containers.
	a.recallPolicy()
	a.reload()
	a.recall()
	// Changes that have lapsed since must not be adopted.
	a.undo(func(e journal.Entry) bool { return e.Expired(a.pace.now()) })
	a.adopt()
	opened := a.rewritten.begin()
	g, ctx := errgroup.WithContext(ctx)
	for _, s := range serve {
		g.Go(func() error { return s(ctx) })
	}
	g.Go(func() error { return a.set.Run(ctx) })
	if a.cfg.PolicyDir != "" {
		g.Go(func() error { return a.policy.Watch(ctx, a.policyChanged) })
	}
	if a.plugin != nil {
		g.Go(func() error { a.plugged.keep(ctx, a.plugin.Run, func(error) {}); return nil })
	}
	g.Go(func() error { a.loop(ctx); return nil })
	g.Go(func() error { a.rewritten.run(ctx, opened); return nil })
	g.Go(func() error { a.watchOverview(ctx); return nil })
	for _, w := range a.workers {
		if d, ok := w.feature.(feature.Decider); ok {
			g.Go(func() error { a.controller(ctx, w, d); return nil })
		}
	}

	if a.recorder != nil {
		go a.recorder.run(ctx)
	}

	stopped := make(chan error, len(a.workers))
	for _, w := range a.workers {
		go func() {
			w.run(ctx)
			end, cancel := context.WithTimeout(context.WithoutCancel(ctx), a.pace.stop)
			defer cancel()
			stopped <- w.stop(end)
		}()
	}
	// The first loop that fails ends the others and the agent. A loop may be waiting for a feature
	// that hangs.
	loops := make(chan error, 1)
	go func() { loops <- g.Wait() }()
	<-ctx.Done()
	end, cancel := context.WithTimeout(context.WithoutCancel(ctx), a.pace.stop+a.pace.call)
	defer cancel()
	select {
	case err = <-loops:
	case <-end.Done():
		err = errors.New("a loop does not return")
	}
	if errors.Is(err, context.Canceled) {
		err = nil
	}
	if err != nil {
		err = fmt.Errorf("run agent: %w", err)
	}
	return errors.Join(err, a.await(end, stopped), a.restoreAll(), a.recorder.await(), a.close())
}

// await waits until every worker has stopped, or until end. It abandons a worker that hangs in a
// feature; the journal still has its changes.
func (a *Agent) await(end context.Context, stopped <-chan error) error {
	var errs []error
	for range a.workers {
		select {
		case err := <-stopped:
			errs = append(errs, err)
		case <-end.Done():
			return errors.Join(append(errs, errors.New("stop agent: a feature does not return"))...)
		}
	}
	return errors.Join(errs...)
}

// restoreAll undoes what is left in the journal, as far as time permits. `fairlead restore` or the
// next agent undoes the rest.
func (a *Agent) restoreAll() error {
	done := make(chan error, 1)
	go func() {
		out, err := a.journal.Restore(a.opener(), nil)
		a.tell(out)
		done <- err
	}()
	select {
	case err := <-done:
		return err
	case <-time.After(a.pace.stop):
		return errors.New("stop agent: restoring takes too long: some entries of the journal remain")
	}
}

// close releases the journal, and the features without a worker.
func (a *Agent) close() error {
	var errs []error
	for _, f := range a.all {
		if a.worker(f.Name()) == nil {
			errs = append(errs, a.fence(f).close(f))
		}
	}
	errs = append(errs, a.disinherit())
	if err := a.identity.Close(); err != nil {
		errs = append(errs, fmt.Errorf("close identity: %w", err))
	}
	if err := a.journal.Close(); err != nil {
		errs = append(errs, fmt.Errorf("close journal: %w", err))
	}
	if a.alone != nil {
		errs = append(errs, a.alone.Close())
	}
	return errors.Join(errs...)
}

// inForce waits until the container with this runtime id runs, and each feature has applied its
// policy or has failed to. The error is that of ctx.
func (a *Agent) inForce(ctx context.Context, id string) error {
	for {
		changed := a.set.Changed()
		all := a.set.Running()
		if i := slices.IndexFunc(all, func(c container.Container) bool { return c.RuntimeID == id }); i >= 0 {
			a.round()
			for _, w := range a.workers {
				w.settle(ctx, all[i].ID) // a failure is in its status
			}
			return ctx.Err()
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}
