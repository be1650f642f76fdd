package topology

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"testing"

	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/feature"
	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/internal/testkit/faults"
	"github.com/fairlead-project/fairlead/kernel"
	"github.com/fairlead-project/fairlead/kernel/journal"
	"github.com/fairlead-project/fairlead/kernel/probe"
	"github.com/fairlead-project/fairlead/policy"
)

// Spec is what a subject with a feature needs to know.
type Spec struct {
	NetNS   string // of the host
	Dir     string // of the journal
	Targets []policy.Target
}

// Subject is for faults.Reexec. Its operations are those of the feature that open makes, as an agent
// calls them: "apply N" and "remove N" of each target, "prune" while no container runs, "keep" while
// they all do, "decide", and "measure".
func Subject(open func(Spec, *journal.Journal) (feature.Feature, error)) func(arg []byte) (map[string]faults.Op, error) {
	return func(arg []byte) (map[string]faults.Op, error) {
		var s Spec
		if err := json.Unmarshal(arg, &s); err != nil {
			return nil, err
		}
		j, err := journal.Open(s.Dir, "")
		if err != nil {
			return nil, err
		}
		f, err := open(s, j)
		if err != nil {
			return nil, err
		}
		if v := f.Support(); v.Level == probe.Unavailable {
			return nil, fmt.Errorf("%s: %+v", f.Name(), v)
		}
		return operations(f, j, s.Targets), nil
	}
}

func operations(f feature.Feature, j *journal.Journal, targets []policy.Target) map[string]faults.Op {
	ops := map[string]faults.Op{
		"prune":   func(ctx context.Context) error { return f.Prune(ctx, func(container.ID) bool { return false }) },
		"keep":    func(ctx context.Context) error { return f.Prune(ctx, func(container.ID) bool { return true }) },
		"measure": func(ctx context.Context) error { return measure(ctx, f, targets) },
	}
	if d, ok := f.(feature.Decider); ok {
		ops["decide"] = func(context.Context) error { _, err := d.Decide(targets[:1], true); return err }
	}
	for i, t := range targets {
		id := t.Container.ID
		ops[fmt.Sprint("apply ", i)] = func(ctx context.Context) error { return f.Apply(ctx, t) }
		ops[fmt.Sprint("remove ", i)] = func(ctx context.Context) error {
			if err := f.Remove(ctx, id); err != nil {
				return err
			}
			// What the journal still has of the container, the agent's round undoes.
			_, err := j.Restore(kernel.Opener(kernel.Default()), func(e journal.Entry) bool { return e.Owner.Container == uint64(id) })
			return err
		}
	}
	return ops
}

// measure calls all that only reads.
func measure(ctx context.Context, f feature.Feature, targets []policy.Target) error {
	f.Snapshot()
	var errs []error
	if r, ok := f.(feature.Reporter); ok {
		_, err := r.Report(ctx, nil, api.Ask{})
		errs = append(errs, err)
	}
	if r, ok := f.(feature.Exporter); ok {
		r.Export()
	}
	if r, ok := f.(feature.Mapped); ok {
		r.Maps()
	}
	if r, ok := f.(feature.Guarantor); ok {
		_, err := r.Guarantees()
		errs = append(errs, err)
	}
	if r, ok := f.(feature.Planner); ok {
		_, err := r.Plan(ctx, targets[0].Container)
		errs = append(errs, err)
	}
	if r, ok := f.(feature.SelfReporter); ok {
		r.SelfReport(ctx)(targets[0].Container, &api.SelfReports{})
	}
	if r, ok := f.(feature.Worker); ok {
		_, err := r.PacketWork()
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

// Running returns the containers of targets.
func Running(targets []policy.Target) (list Containers) {
	for _, t := range targets {
		if _, there := list.Lookup(t.Container.ID); !there {
			list = append(list, t.Container)
		}
	}
	return list
}

// Containers are those of a host, for features that list all.
type Containers []container.Container

// Running implements feature.Containers.
func (l Containers) Running() []container.Container { return l }

// Lookup implements feature.Containers.
func (l Containers) Lookup(id container.ID) (container.Container, bool) {
	if i := slices.IndexFunc(l, func(c container.Container) bool { return c.ID == id }); i >= 0 {
		return l[i], true
	}
	return container.Container{}, false
}

// Rig returns the rig of a Spec. net describes the network; nil: the operations change none.
func (s Spec) Rig(t testing.TB, net func() string) faults.Rig {
	knobs := Knobs{Dir: s.Dir}
	return faults.Rig{
		Arg: s,
		State: func() string {
			t.Helper()
			state, err := knobs.State()
			testkit.Must(t, err)
			if net != nil {
				state += "\n" + net()
			}
			return state
		},
		Restore: func() error { return Restore(s.Dir) },
		Reset:   knobs.Reset,
		Adopt:   "keep",
	}
}
