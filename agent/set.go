package agent

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"slices"
	"strings"
	"time"

	"github.com/fairlead-project/fairlead/agent/serve"
	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/discover"
	"github.com/fairlead-project/fairlead/feature"
	"github.com/fairlead-project/fairlead/kernel"
	"github.com/fairlead-project/fairlead/kernel/probe"
	"github.com/fairlead-project/fairlead/policy"
)

// setTime limits the wait for the features in Set.
const setTime = 15 * time.Second

// Set sets values for a container by hand, and clears others. A request that is invalid, or that a
// feature refuses, changes nothing. If one feature has already applied its part when another
// refuses, Set reverts that part before it returns.
func (a *Agent) Set(ctx context.Context, ref string, by serve.Peer, in api.SetRequest) (api.Container, error) {
	c, ended, err := a.find(ref)
	if err != nil {
		return api.Container{}, err
	}
	if ended {
		return api.Container{}, refused("container %s has ended", c.ID)
	}
	a.setting.Lock()
	defer a.nudge() // to forget containers that ended meanwhile
	defer a.setting.Unlock()
	for key, value := range in.Was {
		if now := a.valueOf(c.ID, key); now != value {
			return api.Container{}, refused("%s is %q now, and not %q any more", key, now, value)
		}
	}
	was := a.hand
	from := fmt.Sprintf("set by uid %d at %s", by.UID, a.pace.now().UTC().Format(time.RFC3339))
	all, touched, err := change(was, c.ID, in, from)
	if err != nil {
		return api.Container{}, err
	}
	mine := slices.DeleteFunc(slices.Clone(all), func(o policy.Override) bool { return o.Container != c.ID })
	if err := a.policy.Check(c, mine); err != nil {
		return api.Container{}, &api.Error{Status: http.StatusBadRequest, Code: "bad_request", Text: api.Text(err)}
	}
	if len(in.Set) > 0 {
		if err := a.settable(c.ID, touched); err != nil {
			return api.Container{}, err
		}
	}

	err = a.override(ctx, c.ID, all, touched)
	if len(in.Set) == 0 && !errors.Is(err, context.Canceled) {
		err = nil // it is taken back, whatever features make of the rest
	}
	if err == nil {
		err = a.cfg.overrides().Write(overridesFile{all})
	} else {
		err = refused("%s", named(api.Text(err), a.devices))
	}
	if err != nil {
		// Even if the caller has disconnected.
		return api.Container{}, errors.Join(err, a.override(context.WithoutCancel(ctx), c.ID, was, touched))
	}
	a.log.Info("policy was set by hand", "container", c.ID, "name", c.Name, "uid", by.UID, "set", in.Set, "unset", in.Unset)
	return a.describe(c, a.devices), nil
}

// valueOf returns policy's value of a key for a container, without decisions, as of the last round;
// "" if there is none.
func (a *Agent) valueOf(id container.ID, key string) string {
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, o := range a.resolved[id].Origins {
		if o.Key == "fairlead."+strings.TrimPrefix(key, "fairlead.") {
			return o.Value
		}
	}
	return ""
}

func refused(format string, args ...any) error {
	return &api.Error{Status: http.StatusConflict, Code: "refused", Text: fmt.Sprintf(format, args...)}
}

// change returns the overrides after a request, and the features concerned.
func change(was []policy.Override, id container.ID, in api.SetRequest, from string) (all []policy.Override, touched map[string]bool, err error) {
	bad := func(text string) error {
		return &api.Error{Status: http.StatusBadRequest, Code: "bad_request", Text: text}
	}
	if len(in.Set)+len(in.Unset) == 0 {
		return nil, nil, bad("nothing is to be set, and nothing to be taken back")
	}
	all, touched = slices.Clone(was), make(map[string]bool)
	seen := make(map[string]bool)
	take := func(name string) (key string, held bool, err error) {
		key, err = policy.KnownKey(name)
		if err != nil {
			return "", false, bad(err.Error())
		}
		if seen[key] {
			return "", false, bad(key + ": is given twice")
		}
		seen[key] = true
		touched[policy.FeatureOf("fairlead."+key)] = true
		n := len(all)
		all = slices.DeleteFunc(all, func(o policy.Override) bool { return o.Container == id && o.Key == key })
		return key, len(all) < n, nil
	}
	for _, name := range in.Unset {
		key, held, err := take(name)
		if err != nil {
			return nil, nil, err
		}
		if !held {
			return nil, nil, bad(key + ": is not set by hand, so that it cannot be taken back")
		}
	}
	for _, name := range slices.Sorted(maps.Keys(in.Set)) {
		key, _, err := take(name)
		if err != nil {
			return nil, nil, err
		}
		all = append(all, policy.Override{Container: id, Key: key, Value: in.Set[name], From: from})
	}
	return all, touched, nil
}

// settable returns why a value that is set now could not take effect.
func (a *Agent) settable(id container.ID, features map[string]bool) error {
	for _, f := range a.all {
		if v := a.fence(f).verdict(f); features[f.Name()] && v.Level == probe.Unavailable {
			return refused("%s is unavailable here: %s", f.Name(), v.Why)
		}
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.heldAll || a.held[id] {
		return refused("container %s was let go of by restore, until `fairlead policy reload`", id)
	}
	if source := a.kept[id]; source != "" {
		return refused("%s, which knows container %s, does not answer", source, id)
	}
	return nil
}

// override replaces everything that is set by hand with all, and waits for the features' results
// for one container. The caller holds a.setting.
func (a *Agent) override(ctx context.Context, id container.ID, all []policy.Override, features map[string]bool) error {
	a.hand = all
	a.policy.Override(all) // Check has found the errors, or recall has logged them
	a.round()
	ctx, cancel := context.WithTimeout(ctx, setTime)
	defer cancel()
	var errs []error
	for _, w := range a.workers {
		if !features[w.feature.Name()] {
			continue
		}
		// Neither slowness is a refusal, nor a wait until the pod's containers agree.
		if err := w.settle(ctx, id); !errors.Is(err, context.DeadlineExceeded) && !errors.Is(err, feature.ErrDisagree) {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

// recall loads what was set by hand before this agent started.
func (a *Agent) recall() {
	a.setting.Lock()
	defer a.setting.Unlock()
	var in overridesFile
	if _, err := a.cfg.overrides().Read(&in); err != nil {
		a.log.Error("what was set by hand is not in force any more", "err", err)
	} else {
		a.hand = in.Set
	}
	if err := a.policy.Override(a.hand); err != nil {
		a.log.Error("not all that was set by hand is in force any more", "err", err)
	}
}

// forget drops what was set by hand for containers that have ended. While a Set runs, it leaves
// that to the round after it. It also waits for every runtime to report all its containers, as only
// that report may name a container.
func (a *Agent) forget(snap discover.Snapshot) {
	unsure := slices.ContainsFunc(snap.Sources, func(s discover.SourceStatus) bool {
		return s.Name != container.CgroupSource && s.Partial && !s.Absent
	})
	if !snap.Complete || unsure || !a.setting.TryLock() {
		return
	}
	defer a.setting.Unlock()
	runs := make(map[container.ID]bool, len(snap.Containers))
	for _, c := range snap.Containers {
		runs[c.ID] = true
	}
	left := slices.DeleteFunc(slices.Clone(a.hand), func(o policy.Override) bool { return !runs[o.Container] })
	if len(left) == len(a.hand) {
		return
	}
	a.hand = left
	a.policy.Override(left)
	if err := a.cfg.overrides().Write(overridesFile{left}); err != nil {
		a.log.Error("what was set by hand is not written down", "err", err)
	}
}

// overridesFile is the content of the file in the state directory that preserves what was set by
// hand for the next agent.
type overridesFile struct {
	Set []policy.Override `json:"set"`
}

// overridesName is its name, and maxOverrides limits it, in bytes.
const (
	overridesName = "set.json"
	maxOverrides  = 16 << 20
)

func (cfg Config) overrides() kernel.StateFile { return cfg.file(overridesName, maxOverrides) }
