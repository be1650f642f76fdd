// Package discover finds the containers of this host.
//
// Several sources (Docker, Podman, containerd, CRI-O, the cgroup tree, the embedded sandbox) each report
// what they see; a [Set] joins the reports into one list keyed by cgroup v2 id. The Set is
// level-triggered: a reader gets the whole present list, and an event only means that reading it
// again is worthwhile.
//
// The package reads the host and changes nothing. Package policy decides what applies to a
// container, and feature/... enforces it. Package agent runs the Set; other packages only use its
// Containers.
package discover

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"path/filepath"
	"reflect"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/kernel/cgroup"
	"github.com/fairlead-project/fairlead/kernel/netdev"
)

const (
	settle        = 2 * time.Millisecond // gathers the events of one moment
	maxEnded      = 4096                 // tombstones
	perRound      = 16                   // containers described before they are published
	maxRecords    = 16384                // of one source
	maxName       = 512                  // bytes
	maxImageNames = 32
	maxLeftOut    = 64 // labels of one container that are named when dropped
)

// Config says where a [Set] looks. Zero fields get the defaults given here.
type Config struct {
	Proc    string           // "/proc"
	Cgroup  string           // cgroup.DefaultRoot
	NetNS   string           // PROC/self/ns/net: a path to the host's network namespace
	Refresh time.Duration    // 30 s: interval at which everything is examined without an event
	Keep    time.Duration    // 10 min: how long Lookup still finds an ended container
	Links   int              // 4096: most devices, and most addresses, that one look at a network reads
	Known   *Known           // of an earlier Set; nil: none
	Pods    []PodSource      // what Kubernetes knows about pods
	Monitor *netdev.Monitor  // shared with others; nil: no Monitor
	Now     func() time.Time // time.Now

	// Look calls look, and turns its panic into an error; Container 0 is one that a source asked about.
	// Watch calls run again after a panic, which it passes to told. Nil: panics are not recovered.
	Look  func(id container.ID, look func() error) error
	Watch func(ctx context.Context, source string, run func(context.Context) error, told func(error)) error

	// Ready waits until a container, given by its runtime's id, may start: see nri. Nil: no wait.
	Ready func(ctx context.Context, id string) error

	Log *slog.Logger // slog.DiscardHandler
}

// Set joins the reports of several sources into one list of the containers on this host. Its
// methods are safe for concurrent use.
type Set struct {
	cfg     Config
	sources []Source

	wake chan struct{}             // capacity 1: there may be news
	busy atomic.Pointer[time.Time] // see Busy; nil: idle

	mu      sync.Mutex
	reports []reported         // by source
	pods    []podsReported     // by cfg.Pods
	inPods  map[recordKey]bool // the records of pods in the last round
	snap    Snapshot
	changed chan struct{}
	byID    map[container.ID]container.Container
	ended   map[container.ID]tombstone
}

// Snapshot is the state of a [Set] at one moment. It is immutable.
type Snapshot struct {
	Containers []container.Container // in order of ID

	// Complete means that every source has listed its containers, and all were examined. Then a
	// container that is not in Containers does not run.
	Complete bool
	Sources  []SourceStatus

	Known *Known // replaced when it changes; nil if there were no Containers yet
}

// Known is what runtimes have reported about running containers. A new Set of the same boot uses it
// until the runtime lists its containers or answers about one, for as long as the container's
// process lives.
type Known struct {
	Records map[string][]Record `json:"records"`        // by source
	Pods    map[string][]Pod    `json:"pods,omitempty"` // by source of pods
}

// SourceStatus is the state of one source.
type SourceStatus struct {
	Name    string
	Listed  bool      // it has published a list, or as a PodSource any report
	Records int       // in the current list
	Partial bool      // of the current list: see Report
	Absent  bool      // see Report
	Pods    bool      // it is a PodSource: Records are the pods that it knows
	Err     error     // why the current list may be outdated or incomplete; nil: it is neither
	Since   time.Time // when Err came or went
}

type reported struct {
	records []Record
	created []Record
	status  SourceStatus
	panic   *netdev.Panic // the last one
}

type tombstone struct {
	container container.Container
	until     time.Time
}

// NewSet makes a Set that reads the given sources once it runs. If several sources report the same
// cgroup, the first counts, so CgroupTree comes last.
func NewSet(cfg Config, sources ...Source) *Set {
	cfg.Proc = cmp.Or(cfg.Proc, "/proc")
	cfg.Cgroup = cmp.Or(cfg.Cgroup, cgroup.DefaultRoot)
	cfg.NetNS = cmp.Or(cfg.NetNS, filepath.Join(cfg.Proc, "self", "ns", "net"))
	cfg.Refresh = cmp.Or(cfg.Refresh, 30*time.Second)
	cfg.Keep = cmp.Or(cfg.Keep, 10*time.Minute)
	cfg.Links = cmp.Or(cfg.Links, 4096)
	if cfg.Now == nil {
		cfg.Now = time.Now
	}
	if cfg.Look == nil {
		cfg.Look = func(_ container.ID, look func() error) error { return look() }
	}
	if cfg.Watch == nil {
		cfg.Watch = func(ctx context.Context, _ string, run func(context.Context) error, _ func(error)) error {
			return run(ctx)
		}
	}
	cfg.Log = cmp.Or(cfg.Log, slog.New(slog.DiscardHandler))
	s := &Set{
		cfg:     cfg,
		sources: slices.Clone(sources),
		wake:    make(chan struct{}, 1),
		changed: make(chan struct{}),
		byID:    make(map[container.ID]container.Container),
		ended:   make(map[container.ID]tombstone),
	}
	for _, src := range s.sources {
		r := reported{status: SourceStatus{Name: src.Name(), Since: cfg.Now()}}
		if cfg.Known != nil {
			r.records = boundedAll(cfg.Known.Records[src.Name()])
			r.status.Records, r.status.Partial = len(r.records), len(r.records) > 0
		}
		s.reports = append(s.reports, r)
	}
	for _, src := range cfg.Pods {
		r := podsReported{news: make(chan struct{}, 1), status: SourceStatus{Name: src.Name(), Since: cfg.Now(), Pods: true}}
		if cfg.Known != nil {
			r.pods = podsBy(cfg.Known.Pods[src.Name()])
			r.status.Records = len(r.pods)
		}
		s.pods = append(s.pods, r)
	}
	s.snap.Sources = s.statuses(s.reports)
	return s
}

// Run maintains the Set until ctx ends, which is not an error. It is called once. The error matches
// [cgroup.ErrNone] if the host has no cgroup v2 tree.
func (s *Set) Run(ctx context.Context) error {
	layout, err := cgroup.Detect(s.cfg.Proc, s.cfg.Cgroup)
	if err != nil {
		return err
	}
	if layout.V2 == "" {
		return fmt.Errorf("find containers: no cgroup v2 tree below %s: %w", s.cfg.Cgroup, cgroup.ErrNone)
	}
	r, err := newRounds(s.cfg, layout, s.poke)
	if err != nil {
		return err
	}
	defer r.close()

	g, ctx := errgroup.WithContext(ctx)
	watch := func(what, name string, run func(context.Context) error, fail func(error)) {
		g.Go(func() error {
			err := s.cfg.Watch(ctx, name, run, fail)
			if ctx.Err() != nil {
				return nil
			}
			// One source that gives up must not stop the others.
			s.cfg.Log.Error(what+" ended", "source", name, "err", err)
			fail(cmp.Or(err, errors.New("source ended")))
			return nil
		})
	}
	for i, src := range s.sources {
		run := func(ctx context.Context) error { return src.Run(ctx, func(rep Report) { s.report(i, rep) }) }
		watch("container source", src.Name(), run, func(err error) { s.report(i, Report{Err: err}) })
	}
	for i, src := range s.cfg.Pods {
		run := func(ctx context.Context) error {
			return src.Run(ctx, s.pods[i].news, func(rep PodReport) { s.reportPods(i, rep) })
		}
		watch("source of pods", src.Name(), run, func(err error) { s.reportPods(i, PodReport{Err: err}) })
	}
	if s.cfg.Ready != nil {
		n := &nri{addr: nriAddr, log: s.cfg.Log, ready: s.cfg.Ready, now: time.Now}
		watch("holding starts", "nri", func(ctx context.Context) error { n.run(ctx); return nil }, func(error) {})
	}
	g.Go(func() error { s.loop(ctx, r); return nil })
	return g.Wait()
}

func (s *Set) loop(ctx context.Context, r *rounds) {
	refresh := time.NewTicker(s.cfg.Refresh)
	defer refresh.Stop()
	again := time.NewTimer(0)
	defer again.Stop()
	for {
		full := false
		select {
		case <-ctx.Done():
			return
		case <-s.wake:
			select {
			case <-time.After(settle):
			case <-ctx.Done():
				return
			}
			select {
			case <-s.wake:
			default:
			}
		case <-again.C:
		case <-refresh.C:
			full = true
		}
		began := s.cfg.Now()
		s.busy.Store(&began)
		reports := s.take()
		next := r.run(reports, full)
		s.publish(r, reports)
		s.busy.Store(nil)
		if next >= 0 {
			again.Reset(next)
		}
	}
}

// Busy returns when the Set began to look at the host; the zero time if it is idle. A look takes
// milliseconds. A Set that stays busy hangs, and its Snapshot ages.
func (s *Set) Busy() time.Time {
	if began := s.busy.Load(); began != nil {
		return *began
	}
	return time.Time{}
}

// poke requests a round.
func (s *Set) poke() {
	select {
	case s.wake <- struct{}{}:
	default:
	}
}

func (s *Set) report(i int, rep Report) {
	s.mu.Lock()
	r := &s.reports[i]
	if p := (*netdev.Panic)(nil); errors.As(rep.Err, &p) && p != r.panic {
		r.panic = p
		s.cfg.Look(0, func() error { panic(p) })
	}
	before := r.status
	if r.status.Err = rep.Err; rep.Err == nil || rep.Partial {
		if len(rep.Records) > maxRecords {
			r.status.Err = fmt.Errorf("%d containers are too many: took %d", len(rep.Records), maxRecords)
		}
		said := boundedAll(rep.Records)
		if rep.Partial {
			said = joined(said, r.records)
		}
		r.records, r.created = said, boundedAll(rep.Created)
		r.status.Listed, r.status.Records, r.status.Partial, r.status.Absent = true, len(said), rep.Partial, rep.Absent
	}
	if before.Listed != r.status.Listed || (before.Err == nil) != (r.status.Err == nil) {
		r.status.Since = s.cfg.Now()
	}
	s.mu.Unlock()
	s.poke()
}

// take returns the last report of each source, with the pods' data added.
func (s *Set) take() []reported {
	s.mu.Lock()
	defer s.mu.Unlock()
	reports := slices.Clone(s.reports)
	s.joinPods(reports)
	return reports
}

// statuses returns the status of each source, with these reports, and of each PodSource. If the Set
// runs, the caller holds s.mu.
func (s *Set) statuses(reports []reported) []SourceStatus {
	var list []SourceStatus
	for _, r := range reports {
		list = append(list, r.status)
	}
	for _, p := range s.pods {
		list = append(list, p.status)
	}
	return list
}

// publish replaces the Snapshot by the result of a round over reports, if that is different.
func (s *Set) publish(r *rounds, reports []reported) {
	now := s.cfg.Now()
	s.mu.Lock()
	defer s.mu.Unlock()

	next := Snapshot{Sources: s.statuses(reports), Complete: r.settled}
	for _, st := range next.Sources {
		next.Complete = next.Complete && st.Listed
	}
	for id, t := range s.ended {
		if !now.Before(t.until) {
			delete(s.ended, id)
		}
	}
	live := r.containers()
	sameContainers := reflect.DeepEqual(live, s.byID)
	for id, old := range s.byID {
		if _, lives := live[id]; !lives {
			s.bury(old, now)
		}
	}
	for id := range live {
		delete(s.ended, id)
	}
	alike := slices.EqualFunc(next.Sources, s.snap.Sources, func(a, b SourceStatus) bool {
		a.Records = b.Records // a source whose number changes all the time is no news
		return reflect.DeepEqual(a, b)
	})
	news := !sameContainers || next.Complete != s.snap.Complete || !alike
	next.Containers, next.Known = s.snap.Containers, s.snap.Known
	if !sameContainers {
		known := r.known(reports)
		for _, p := range s.pods {
			known.Pods[p.status.Name] = slices.Collect(maps.Values(p.pods))
		}
		if !reflect.DeepEqual(known, next.Known) {
			next.Known = known
		}
		s.byID = live
		next.Containers = slices.SortedFunc(maps.Values(s.byID), func(a, b container.Container) int { return cmp.Compare(a.ID, b.ID) })
	}
	if s.snap = next; news {
		close(s.changed)
		s.changed = make(chan struct{})
	}
}

func (s *Set) bury(c container.Container, now time.Time) {
	if len(s.ended) >= maxEnded {
		oldest := slices.MinFunc(slices.Collect(maps.Keys(s.ended)), func(a, b container.ID) int {
			return s.ended[a].until.Compare(s.ended[b].until)
		})
		delete(s.ended, oldest)
	}
	c.PID, c.NetNS = 0, 0
	s.ended[c.ID] = tombstone{c, now.Add(s.cfg.Keep)}
}

// Snapshot returns the current state. The caller must not change it.
func (s *Set) Snapshot() Snapshot {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.snap
}

// Running returns the containers of the Snapshot. The caller must not change them.
func (s *Set) Running() []container.Container { return s.Snapshot().Containers }

// Changed returns a channel that is closed when the next Snapshot differs in more than numbers of
// records. To miss nothing, call it before Snapshot.
func (s *Set) Changed() <-chan struct{} {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.changed
}

// Lookup finds a container that runs or has ended recently; an ended one has PID 0.
func (s *Set) Lookup(id container.ID) (container.Container, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if c, ok := s.byID[id]; ok {
		return c, true
	}
	t, ok := s.ended[id]
	if !ok || !s.cfg.Now().Before(t.until) {
		return container.Container{}, false
	}
	return t.container, true
}
