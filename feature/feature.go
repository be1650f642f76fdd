// Package feature defines what the agent expects of a feature. It contains no
// feature and no registry: package agent constructs the features by name.
package feature

import (
	"context"
	"errors"
	"time"

	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/hist"
	"github.com/fairlead-project/fairlead/kernel/bpf"
	"github.com/fairlead-project/fairlead/kernel/journal"
	"github.com/fairlead-project/fairlead/kernel/probe"
	"github.com/fairlead-project/fairlead/policy"
)

// ErrPartly is returned by Apply, wrapped and alone, where all has been done that can
// be done here, and a part of what the Target asks for is not covered all the same. The
// text says which, and what would cover it.
var ErrPartly = errors.New("not covered in full")

// ErrDisagree is returned by Apply, wrapped, for a container that shares its
// network with another whose policy is not the same, where only one can be in
// force. It ends when the other's has been changed too, so that it is nothing
// to tell of while a change is on its way to both.
var ErrDisagree = errors.New("it shares its network with a container whose policy is another")

// Feature is one thing that the agent does for containers. The agent calls the
// methods from one goroutine at a time, except Snapshot and Support, which may
// be called at any time. Whatever else a feature offers is one of the optional
// interfaces below: the agent asks each Feature for them.
type Feature interface {
	// Name is the folder below feature/, and the label in status and metrics.
	Name() string
	// Support says whether the feature works here. It is decided once, when
	// the feature is made.
	Support() probe.Verdict
	// Apply brings one container to its Target. It is idempotent: it reads
	// before it writes, and a second call with the same Target writes nothing.
	Apply(context.Context, policy.Target) error
	// Remove undoes Apply. A container that is not known, or whose objects
	// have gone with it, is a success.
	Remove(context.Context, container.ID) error
	// Prune removes what an earlier agent left for containers that alive
	// denies. The agent calls it only once its Set is complete.
	Prune(ctx context.Context, alive func(container.ID) bool) error
	// Snapshot reads the counters of all containers.
	Snapshot() Snapshot
	// Close lets go of file descriptors and goroutines. What Apply put in
	// force stays: the agent calls Remove first for what must not outlive it.
	Close() error
}

// Containers is who runs here. *discover.Set is one.
type Containers interface {
	Running() []container.Container // in order of ID
	// Lookup also finds containers that ended a short time ago.
	Lookup(container.ID) (container.Container, bool)
}

// Reporter is a Feature with a report of its own, in answer to the routes that
// its file in package api declares. Report may be called at any time.
type Reporter interface {
	// Report reads what was asked for: about one container, or about all if of
	// is nil. The result has the type that the route declares. An *api.Error is
	// the caller's fault, or says why there is no report; any other is internal.
	Report(ctx context.Context, of *container.Container, ask api.Ask) (any, error)
}

// SelfReporter is a Feature that shows a container something of itself.
// SelfReport may be called at any time.
type SelfReporter interface {
	// SelfReport reads the counters for all containers that ask within a moment.
	// The function that it returns puts one container's own part into the answer
	// to that container: nothing about others, and no path of the host.
	SelfReport(context.Context) func(container.Container, *api.SelfReports)
}

// Exporter is a Feature that has more for the metrics page than Snapshot, which
// the API and the containers see as well. Export may be called at any time.
type Exporter interface {
	Export() Snapshot
}

// Decider is a Feature that decides over time what counts in place of policy for
// those containers that policy leaves to it. The agent calls Adopt once, and then
// Decide about once a second, from one goroutine.
type Decider interface {
	// Adopt takes over what an earlier agent, which was killed, had decided. It is
	// given the journal's entries of this feature that have an expiry. Each
	// decision that it returns has the expiry of its entry.
	Adopt([]journal.Entry) []policy.Decision
	// Decide returns the decisions that stand now. targets is what policy says
	// without decisions, by id, and complete says whether all containers that run
	// are among them. The agent fills in an Expiry that is zero, and renews it for
	// as long as the same decision is returned. Decisions beside an error stand, too.
	Decide(targets []policy.Target, complete bool) ([]policy.Decision, error)
}

// Notifier is a Feature that sees by itself when something of what Apply put in force is
// undone, or can be put in force at last. Notify is called once, before Apply. The feature
// calls changed, from any goroutine, to have Apply called soon for a container for which it
// would return something else now.
type Notifier interface {
	Notify(changed func(container.ID))
}

// Planner is a Feature that says beforehand what it would change on the host. Plan may
// be called at any time, and changes nothing.
type Planner interface {
	Plan(context.Context, container.Container) (Plan, error)
}

// Plan is what a feature would change for one container, as the host is now.
type Plan struct {
	Key, Value string // the policy under which it would
	Steps      []Step // in the order of writing
}

// Step is one value that would be written. A knob that has the value already is among
// them.
type Step struct {
	Ref        journal.Ref
	Now, Value string
}

// Examiner is a Feature that has more to say of this host than Support: what it
// found out about single devices, say. Examine may be called at any time.
type Examiner interface {
	// Examine gives a Finding for each, whose Area is none of package probe's.
	Examine() []probe.Finding
}

// Worker is a Feature that knows for whose packets each CPU works. PacketWork may be
// called at any time.
type Worker interface {
	// PacketWork gives by container, 0 being the system, and by CPU how long that CPU
	// has worked for its packets, in softirqs and in threads that poll devices, since
	// some beginning. An error means that nobody counts it here.
	PacketWork() (map[container.ID][]time.Duration, error)
}

// Witness is a Feature that remembers what it has seen of containers, and what it decided
// for it. Evidence may be called at any time.
type Witness interface {
	// Evidence tells it of one container, the latest last, in as few as will do.
	Evidence(container.ID) []api.Evidence
}

// Mapped is a Feature that has BPF maps. Maps may be called at any time.
type Mapped interface {
	// Maps says how full the hash maps are.
	Maps() []bpf.Usage
}

// Snapshot is what a feature measured, at one moment.
type Snapshot struct {
	Taken   time.Time
	Samples []Sample
	// Help says for the metrics page what the samples of a name are, by name.
	Help map[string]string
}

// Sample is one number about one container (or about the host, with ID 0).
type Sample struct {
	Container container.ID
	// Name is the metric's name without the prefix fairlead_, in base units:
	// "netcpu_kthread_seconds_total". A name that ends in _total counts up;
	// any other is a gauge.
	Name   string
	Device string  // where a number belongs to a device, "" otherwise
	Labels []Label // what else tells it from others of this name; each has the same label names
	Value  float64

	Histogram *hist.Forms // in place of Value, where it is a distribution since some beginning
}

// Label is one more property of a Sample: a word of the feature's own choice
// (never one that a container chose, and of few values), or another container.
type Label struct {
	Name      string
	Value     string       // "" where it is a container
	Container container.ID // 0 where it is a word
}
