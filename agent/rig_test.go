package agent

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/discover"
	"github.com/fairlead-project/fairlead/feature"
	"github.com/fairlead-project/fairlead/feature/netcpu"
	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/kernel"
	"github.com/fairlead-project/fairlead/kernel/bpf"
	"github.com/fairlead-project/fairlead/kernel/journal"
	"github.com/fairlead-project/fairlead/kernel/probe"
	"github.com/fairlead-project/fairlead/policy"
)

// host is a directory that stands for the host: each container has a file in it, which a feature
// changes.
type host struct {
	dir      string
	writes   atomic.Int64
	unclosed atomic.Int64 // opened knobs that were not closed
}

func newHost(t *testing.T, ids ...container.ID) *host {
	h := &host{dir: t.TempDir()}
	for _, id := range ids {
		h.set(t, id, "plain")
	}
	return h
}

func (h *host) path(id container.ID) string { return filepath.Join(h.dir, id.String()) }

func (h *host) set(t *testing.T, id container.ID, value string) {
	t.Helper()
	testkit.Must(t, os.WriteFile(h.path(id), []byte(value), 0o600))
}

func (h *host) get(t *testing.T, id container.ID) string {
	t.Helper()
	data, err := os.ReadFile(h.path(id))
	testkit.Must(t, err)
	return string(data)
}

// open is the Opener of this host.
func (h *host) open(ref journal.Ref) (journal.Knob, error) {
	h.unclosed.Add(1)
	return opened{knob{h, ref.Object}}, nil
}

// opened is a knob that belongs to who has opened it.
type opened struct{ knob }

func (o opened) Close() error {
	o.host.unclosed.Add(-1)
	return nil
}

func (h *host) opener() journal.Opener { return h.open }

func (h *host) knob(id container.ID) journal.Knob { return knob{h, h.path(id)} }

type knob struct {
	host *host
	path string
}

func (k knob) Ref() journal.Ref { return journal.Ref{Kind: "test", Object: k.path} }

func (k knob) Read() (string, error) {
	data, err := os.ReadFile(k.path)
	if errors.Is(err, fs.ErrNotExist) {
		err = journal.ErrGone
	}
	return string(data), err
}

// Write is all or nothing even if it is killed, as a write of the kernel's is.
func (k knob) Write(v string) error {
	k.host.writes.Add(1)
	next := k.host.dir + ".next"
	if err := os.WriteFile(next, []byte(v), 0o600); err != nil {
		return err
	}
	return os.Rename(next, k.path)
}

// turner is a feature that turns one knob for each container with isolate.
type turner struct {
	*fake
	host    *host
	journal *journal.Journal
}

func (f turner) Apply(ctx context.Context, t policy.Target) error {
	if err := f.fake.Apply(ctx, t); err != nil {
		return err
	}
	if t.Settings.NetCPU != policy.NetCPUIsolate {
		return f.undo(t.Container.ID)
	}
	return f.journal.TurnUntil(f.host.knob(t.Container.ID), "isolated", journal.Owner{Feature: f.name, Container: uint64(t.Container.ID)}, t.Expiry)
}

func (f turner) Remove(ctx context.Context, id container.ID) error {
	return errors.Join(f.fake.Remove(ctx, id), f.undo(id))
}

// Plan implements feature.Planner.
func (f turner) Plan(_ context.Context, c container.Container) (feature.Plan, error) {
	k := f.host.knob(c.ID)
	now, err := k.Read()
	return feature.Plan{Key: "fairlead.netcpu", Value: "isolate", Steps: []feature.Step{{Ref: k.Ref(), Now: now, Value: "isolated"}}}, err
}

func (f turner) undo(id container.ID) error {
	_, err := f.journal.Restore(f.host.open, func(e journal.Entry) bool { return e.Owner.Container == uint64(id) })
	return err
}

// reporter is a turner with the accounts of netcpu.
type reporter struct {
	turner
	*netcpu.Accounts
}

// rig is an agent with a fake Set, a real policy directory, a real journal and one feature, and its
// API.
type rig struct {
	t        *testing.T
	host     *host
	set      *fakeSet
	real     func(Config) containers // in place of set, if not nil
	feature  turner
	apply    func(context.Context, policy.Target) error // of the fake
	accounts *netcpu.Accounts                           // makes the feature report and decide; nil: it does neither
	agent    *Agent
	client   *api.Client
	view     time.Duration // between overviews, if not 0
	policies string
	state    string
	ahead    atomic.Int64 // the agent's clock, of ours, in ns
	stop     func() error
}

func (r *rig) journal() *journal.Journal {
	r.t.Helper()
	j, err := journal.Open(r.state, "")
	testkit.Must(r.t, err)
	return j
}

// start runs the agent until stop is called, or the test ends.
func (r *rig) start() {
	r.t.Helper()
	dir := r.t.TempDir()
	cfg := Config{
		Roots: kernel.Default(), StateDir: r.state, PolicyDir: r.policies,
		Socket: filepath.Join(dir, "s"), SelfSocket: filepath.Join(dir, "self"), MetricsAddr: "127.0.0.1:0",
		Version: "test", Log: quiet(),
	}
	j := r.journal()
	r.feature = turner{newFake(), r.host, j}
	r.feature.apply = r.apply
	p := ordinary()
	p.decide = 20 * time.Millisecond
	if r.view > 0 {
		p.view = r.view
	}
	p.now = func() time.Time { return time.Now().Add(time.Duration(r.ahead.Load())) }
	f := feature.Feature(r.feature)
	if r.accounts != nil {
		r.accounts.Containers = r.set
		f = reporter{r.feature, r.accounts}
	}
	set := containers(r.set)
	if r.real != nil {
		set = r.real(cfg)
	}
	r.agent = assemble(cfg, set, policy.NewStore(r.policies, time.Now), j, r.host.opener, []feature.Feature{f}, p)
	stop := testkit.Background(r.t, r.agent.Run)
	r.stop = sync.OnceValue(stop)
	r.client = api.Dial(cfg.Socket)
	r.t.Cleanup(func() {
		r.client.Close()
		testkit.Check(r.t, r.stop())
	})
	r.until("the socket answers", func() bool {
		_, err := r.client.Version(r.t.Context())
		return err == nil
	})
}

func (r *rig) until(what string, ok func() bool) {
	r.t.Helper()
	testkit.Await(r.t, what, ok)
}

func (r *rig) untilValue(id container.ID, want string) {
	r.t.Helper()
	r.until(fmt.Sprintf("the value of %d is %q", id, want), func() bool { return r.host.get(r.t, id) == want })
}

func newRig(t *testing.T, ids ...container.ID) *rig {
	return &rig{t: t, host: newHost(t, ids...), set: newFakeSet(true), policies: t.TempDir(), state: t.TempDir()}
}

func (r *rig) state1(id container.ID) string {
	r.t.Helper()
	list, err := r.client.Containers(r.t.Context())
	testkit.Must(r.t, err)
	for _, c := range list {
		if c.ID == api.ID(id) && len(c.Features) > 0 {
			return c.Features[0].State
		}
	}
	return ""
}

// series are those of the agent itself, by name and the values of its labels: "feature_support netcpu full".
func series(a *Agent) map[string]float64 {
	got := make(map[string]float64)
	view{a}.Agent(func(name, _ string, value float64, labels ...string) {
		for i := 1; i < len(labels); i += 2 {
			name += " " + labels[i]
		}
		got[name] = value
	})
	return got
}

// clock is a clock with a pace.
type clock struct{ *testkit.Clock }

func newClock() clock { return clock{testkit.NewClock()} }

// pace is an ordinary one on this clock, without chance.
func (c clock) pace() pace {
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
func (f *fake) Loops() []*feature.Loop { return nil }

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
