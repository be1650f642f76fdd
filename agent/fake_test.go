package agent

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"sync"
	"time"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/discover"
	"github.com/fairlead-project/fairlead/feature"
	"github.com/fairlead-project/fairlead/kernel/bpf"
	"github.com/fairlead-project/fairlead/kernel/probe"
	"github.com/fairlead-project/fairlead/policy"
)

// clock is a clock that stands until it is moved.
type clock struct {
	mu  sync.Mutex
	now time.Time
}

func newClock() *clock { return &clock{now: time.Unix(1_800_000_000, 0)} }

func (c *clock) Now() time.Time {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.now
}

func (c *clock) advance(d time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.now = c.now.Add(d)
}

// pace is an ordinary one on this clock, without chance.
func (c *clock) pace() pace {
	p := ordinary()
	p.now, p.jitter = c.Now, func() float64 { return 0.5 }
	return p
}

var errFake = errors.New("the fake was told to fail")

// fake is a feature with a map for a host: by container, the mode in force. An earlier agent may
// have left something there.
type fake struct {
	name    string
	support probe.Verdict
	apply   func(context.Context, policy.Target) error // called before the write; nil: none
	remove  func(context.Context, container.ID) error
	prune   func() error

	mu     sync.Mutex
	host   map[container.ID]policy.NetCPU
	calls  []string
	busy   bool
	closed bool
}

func newFake() *fake {
	return &fake{name: "netcpu", support: probe.Verdict{Level: probe.Full}, host: make(map[container.ID]policy.NetCPU)}
}

// enter notes a call, and checks that it is the only one.
func (f *fake) enter(format string, args ...any) func() {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.busy || f.closed {
		end("a feature was called twice at a time, or after Close") // not a panic, which is contained
	}
	f.busy = true
	f.calls = append(f.calls, fmt.Sprintf(format, args...))
	return func() {
		f.mu.Lock()
		defer f.mu.Unlock()
		f.busy = false
	}
}

// took returns the calls made since it was last asked.
func (f *fake) took() []string {
	f.mu.Lock()
	defer f.mu.Unlock()
	calls := f.calls
	f.calls = nil
	return calls
}

// inForce returns a copy of the host.
func (f *fake) inForce() map[container.ID]policy.NetCPU {
	f.mu.Lock()
	defer f.mu.Unlock()
	out := make(map[container.ID]policy.NetCPU, len(f.host))
	for id, m := range f.host {
		out[id] = m
	}
	return out
}

func (f *fake) Name() string           { return f.name }
func (f *fake) Support() probe.Verdict { return f.support }

func (f *fake) Apply(ctx context.Context, t policy.Target) error {
	defer f.enter("apply %d %s", t.Container.ID, t.Settings.NetCPU)()
	var err error
	if f.apply != nil {
		err = f.apply(ctx, t)
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if err == nil {
		f.host[t.Container.ID] = t.Settings.NetCPU
	} else {
		f.host[t.Container.ID] = "half" // what fails may have begun
	}
	return err
}

func (f *fake) Remove(ctx context.Context, id container.ID) error {
	defer f.enter("remove %d", id)()
	if f.remove != nil {
		if err := f.remove(ctx, id); err != nil {
			return err
		}
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	delete(f.host, id)
	return nil
}

func (f *fake) Prune(_ context.Context, alive func(container.ID) bool) error {
	defer f.enter("prune")()
	if f.prune != nil {
		if err := f.prune(); err != nil {
			return err
		}
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	for id := range f.host {
		if !alive(id) {
			delete(f.host, id)
		}
	}
	return nil
}

func (f *fake) Snapshot() feature.Snapshot {
	f.mu.Lock()
	defer f.mu.Unlock()
	s := feature.Snapshot{Taken: time.Now()}
	for id := range f.host {
		s.Samples = append(s.Samples, feature.Sample{Container: id, Name: "netcpu_test_seconds_total", Value: float64(id)})
	}
	return s
}

func (f *fake) Maps() []bpf.Usage {
	return []bpf.Usage{{Object: "one", Map: "fl_map", Entries: 3, MaxEntries: 8}, {Object: "two", Map: "fl_map", MaxEntries: 9}}
}

func (f *fake) Close() error {
	defer f.enter("close")()
	f.mu.Lock()
	defer f.mu.Unlock()
	f.closed = true
	return nil
}

// fakeSet is a Set with a given list.
type fakeSet struct {
	busy    time.Time
	mu      sync.Mutex
	snap    discover.Snapshot
	changed chan struct{}
	ended   map[container.ID]container.Container
}

func newFakeSet(complete bool, list ...container.Container) *fakeSet {
	s := &fakeSet{changed: make(chan struct{}), ended: make(map[container.ID]container.Container)}
	s.set(complete, list...)
	return s
}

func (s *fakeSet) set(complete bool, list ...container.Container) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, c := range s.snap.Containers {
		s.ended[c.ID] = c
	}
	for _, c := range list {
		delete(s.ended, c.ID)
	}
	s.snap = discover.Snapshot{Containers: list, Complete: complete, Sources: []discover.SourceStatus{{Name: "fake", Listed: complete, Records: len(list)}}}
	close(s.changed)
	s.changed = make(chan struct{})
}

func (s *fakeSet) Busy() time.Time { s.mu.Lock(); defer s.mu.Unlock(); return s.busy }

func (s *fakeSet) Run(ctx context.Context) error { <-ctx.Done(); return nil }

func (s *fakeSet) Snapshot() discover.Snapshot {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.snap
}

func (s *fakeSet) Running() []container.Container { return s.Snapshot().Containers }

func (s *fakeSet) Changed() <-chan struct{} {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.changed
}

func (s *fakeSet) Lookup(id container.ID) (container.Container, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, c := range s.snap.Containers {
		if c.ID == id {
			return c, true
		}
	}
	c, ok := s.ended[id]
	return c, ok
}

// box is a container with this id and a label for a mode.
func box(id container.ID, mode policy.NetCPU) container.Container {
	c := container.Container{ID: id, Name: fmt.Sprintf("box-%d", id), Source: "fake", RuntimeID: fmt.Sprintf("%064x", id), PID: int(id)}
	if mode != "" {
		c.Labels = map[string]string{"fairlead.netcpu": string(mode)}
	}
	return c
}

// target is what a policy makes of box.
func target(id container.ID, mode policy.NetCPU) policy.Target {
	return policy.Target{Container: box(id, mode), Settings: policy.Settings{NetCPU: mode}}
}

func targets(list ...policy.Target) map[container.ID]*policy.Target {
	out := make(map[container.ID]*policy.Target)
	for _, t := range list {
		out[t.Container.ID] = &t
	}
	return out
}

func quiet() *slog.Logger { return slog.New(slog.NewTextHandler(io.Discard, nil)) }
