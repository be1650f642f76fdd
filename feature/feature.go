// Package feature says what the agent expects of each of its features. It
// holds no feature and no registry: agent constructs the features by name.
package feature

import (
	"context"
	"errors"
	"time"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/hist"
	"github.com/fairlead-project/fairlead/kernel/bpf"
	"github.com/fairlead-project/fairlead/kernel/probe"
	"github.com/fairlead-project/fairlead/policy"
)

// ErrNotBuilt is returned by Apply, wrapped, for a Target that this build has
// nothing for. Trying again does not help.
var ErrNotBuilt = errors.New("not available in this build")

// ErrDisagree is returned by Apply, wrapped, for a container that shares its
// network with another whose policy is not the same, where only one can be in
// force. It ends when the other's has been changed too, so that it is nothing
// to tell of while a change is on its way to both.
var ErrDisagree = errors.New("it shares its network with a container whose policy is another")

// Feature is one thing that the agent does for containers. The agent calls the
// methods from one goroutine at a time, except Snapshot and Support, which may
// be called at any time.
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

// Mapped is a Feature that has BPF maps. Maps may be called at any time.
type Mapped interface {
	// Maps says how full the hash maps are.
	Maps() []bpf.Usage
}

// Snapshot is what a feature measured, at one moment.
type Snapshot struct {
	Taken   time.Time
	Samples []Sample
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

	Histogram *hist.Classic // in place of Value, where it is a distribution since some beginning
}

// Label is one more property of a Sample: a word of the feature's own choice
// (never one that a container chose, and of few values), or another container.
type Label struct {
	Name      string
	Value     string
	Container container.ID // if not 0, the Value is its name
}
