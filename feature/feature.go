// Package feature defines what the agent expects of a feature. It contains no feature and no
// registry: package agent constructs the features by name.
package feature

import (
	"context"
	"errors"
	"net/http"
	"time"

	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/hist"
	"github.com/fairlead-project/fairlead/kernel/bpf"
	"github.com/fairlead-project/fairlead/kernel/journal"
	"github.com/fairlead-project/fairlead/kernel/probe"
	"github.com/fairlead-project/fairlead/policy"
)

// ErrPartly is returned by Apply, wrapped or alone, when Apply has done all that is possible on
// this host, but the host does not cover a part of the Target. The text names that part, and what
// would cover it.
var ErrPartly = errors.New("not covered in full")

// ErrDisagree is returned by Apply, wrapped, for a container that shares its network with a container
// of another policy, where only one policy can be in force. It ends once the other policy has been
// changed too. A change that is still on its way to both is therefore not worth a report.
var ErrDisagree = errors.New("it shares its network with a container whose policy is another")

// Feature is one thing that the agent does for containers. The agent calls the methods from one
// goroutine at a time, except Snapshot and Support, which may be called at any time. The optional
// interfaces below are for everything else that a feature offers: the agent asks each Feature for
// them.
type Feature interface {
	// Name is the folder below feature/, and the label in status and metrics.
	Name() string
	// Support reports whether the feature works on this host. The constructor decides it once.
	Support() probe.Verdict
	// Loops returns the goroutines that run beside the agent's calls. The list never changes. The agent
	// gives no sign of life while one of them hangs.
	Loops() []*Loop
	// Apply brings one container to its Target. It is idempotent: it reads before it writes,
	// and a second call with the same Target writes nothing.
	Apply(context.Context, policy.Target) error
	// Remove undoes Apply. It succeeds for an unknown container, and for one that has ended and taken its
	// objects with it.
	Remove(context.Context, container.ID) error
	// Prune removes what an earlier agent left for containers that are not alive. The agent
	// calls it only once its Set is complete.
	Prune(ctx context.Context, alive func(container.ID) bool) error
	// Snapshot reads the counters of all containers.
	Snapshot() Snapshot
	// Close releases file descriptors and goroutines. Settings that Apply put in force stay:
	// the agent calls Remove first for those settings that must not outlive it.
	Close() error
}

// Base holds what every Feature needs.
type Base struct {
	Called  string        // as Name
	Verdict probe.Verdict // as Support
	Beside  []*Loop       // as Loops
}

// Name implements Feature.
func (b Base) Name() string { return b.Called }

// Support implements Feature.
func (b Base) Support() probe.Verdict { return b.Verdict }

// Loops implements Feature.
func (b Base) Loops() []*Loop { return b.Beside }

// Unavailable returns the error for a request that this host cannot serve, with the Verdict's reason.
func (b Base) Unavailable() error {
	return &api.Error{Status: http.StatusServiceUnavailable, Code: "unavailable", Text: b.Called + ": " + b.Verdict.Why}
}

// Containers are the containers that run on this host. *discover.Set implements it.
type Containers interface {
	Running() []container.Container // in order of ID
	// Lookup also finds containers that ended a short time ago.
	Lookup(container.ID) (container.Container, bool)
}

// Reporter is a Feature that serves a report on the routes that its file in package api declares.
// Report may be called at any time. It changes nothing, and waits only until ask.Over has passed.
type Reporter interface {
	// Report returns the report on one container, or on all if of is nil. The result has the
	// type that the route declares. An *api.Error is the caller's fault, or explains why there
	// is no report; any other error is internal.
	Report(ctx context.Context, of *container.Container, ask api.Ask) (any, error)
}

// Commander is a Feature with routes other than reports: they change something, or wait for something
// to happen. Command may be called at any time.
type Commander interface {
	// Command does what ask.Body asks for, about one container, or about the host if of is nil.
	// The routes in the feature's file in package serve declare the types of Body and of the
	// result. Errors are those of Report.
	Command(ctx context.Context, of *container.Container, ask api.Ask) (any, error)
}

// SelfReporter is a Feature that shows a container a part of its own data. SelfReport may be called
// at any time.
type SelfReporter interface {
	// SelfReport reads the counters for all containers that ask within a moment. The function
	// that it returns adds one container's own part to the answer to that container: nothing
	// about other containers, and no path of the host.
	SelfReport(context.Context) func(container.Container, *api.SelfReports)
}

// Exporter is a Feature with more samples for the metrics page than Snapshot, which the API and the
// containers also see. Export may be called at any time.
type Exporter interface {
	Export() Snapshot
}

// Decider is a Feature that, over time, makes decisions in place of policy for the containers that
// policy leaves to it. The agent calls Adopt once, and then Decide about once a second, from one
// goroutine.
type Decider interface {
	// Adopt takes over the decisions of an earlier agent that was killed. Its argument is this
	// feature's journal entries that have an expiry. Each decision that it returns has the
	// expiry of its entry.
	Adopt([]journal.Entry) []policy.Decision
	// Decide returns the current decisions. targets are what policy asks for without decisions,
	// by id; Decide must not change them. complete reports whether they cover all running
	// containers. The agent fills in a zero Expiry, and renews it for as long as Decide returns
	// the same decision. Decisions beside an error count too.
	Decide(targets []policy.Target, complete bool) ([]policy.Decision, error)
}

// Urgent is a Decider that may have to decide sooner than in a second. The agent calls Urgent five times
// a second, between calls of Decide, and calls Decide at once if it returns true.
type Urgent interface {
	Decider
	Urgent() bool
}

// Notifier is a Feature that notices by itself when the host undoes a part of what Apply put in
// force, or when such a part becomes possible. The agent calls Notify once, before Apply. The
// feature calls changed, from any goroutine, to have Apply called soon for a container for which
// Apply would now return something else.
type Notifier interface {
	Notify(changed func(container.ID))
}

// Planner is a Feature that can list in advance what it would change on the host. Plan may be
// called at any time, and changes nothing.
type Planner interface {
	Plan(context.Context, container.Container) (Plan, error)
}

// Plan is what a feature would change for one container on the host as it is now.
type Plan struct {
	Key, Value string // the policy that the plan is for
	Steps      []Step // in the order of writing
}

// Step is one value that would be written. A plan also lists knobs that already have their value.
type Step struct {
	Ref        journal.Ref
	Now, Value string
}

// Guarantor is a Feature that guarantees containers a share of a host resource. Guarantees may be
// called at any time.
type Guarantor interface {
	// Guarantees returns the amount that all containers together can be guaranteed, in whole numbers, by
	// the resource as pods request it (policy.ResourceEgress). It omits resources of unknown size, and the
	// error is the reason.
	Guarantees() (map[string]uint64, error)
}

// Examiner is a Feature that knows more about this host than Support reports, for example about
// single devices. Examine may be called at any time.
type Examiner interface {
	// Examine returns a Finding for each such fact. Its Area is none of package probe's.
	Examine() []probe.Finding
}

// Worker is a Feature that attributes the network work of each CPU to containers. PacketWork may be
// called at any time.
type Worker interface {
	// PacketWork returns, by container and CPU, how long that CPU has worked for the
	// container's packets in softirqs and in threads that poll devices, counted from a fixed
	// moment. Container 0 is the system. An error means that this host does not count it.
	PacketWork() (map[container.ID][]time.Duration, error)
}

// Witness is a Feature that remembers its observations of a container and its decisions for it.
// Evidence may be called at any time.
type Witness interface {
	// Evidence returns both for one container, oldest first, in as few items as suffice.
	Evidence(container.ID) []api.Evidence
}

// Mapped is a Feature that has BPF maps. Maps may be called at any time.
type Mapped interface {
	// Maps returns how full the hash maps are.
	Maps() []bpf.Usage
}

// Snapshot is what a feature measured, at one moment.
type Snapshot struct {
	Taken   time.Time
	Samples []Sample
	// Help is the metrics page's help text of the samples, by metric name.
	Help map[string]string
}

// Sample is one number about one container, or about the host (ID 0).
type Sample struct {
	Container container.ID
	// Name is the metric's name without the prefix fairlead_, in base units:
	// "netcpu_kthread_seconds_total". A name that ends in _total is a counter; any other is a
	// gauge.
	Name   string
	Device string  // the device that the number belongs to; "" for none
	Labels []Label // further labels; all samples of one name have the same label names
	Value  float64

	Histogram *hist.Forms // in place of Value, for a distribution since a fixed moment
}

// Label is one more property of a Sample: a word that the feature chooses from a small set (never a
// word that a container chose), or another container.
type Label struct {
	Name      string
	Value     string       // "" for a container
	Container container.ID // 0 for a word
}
