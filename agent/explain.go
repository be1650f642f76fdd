package agent

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/feature"
	"github.com/fairlead-project/fairlead/kernel/journal"
	"github.com/fairlead-project/fairlead/policy"
)

// Explain returns the changes on the host for one container, and their reasons.
func (a *Agent) Explain(_ context.Context, ref string) (api.Explanation, error) {
	c, ended, err := a.findToRead(ref)
	if err != nil {
		return api.Explanation{}, err
	}
	t := a.target(c)
	open, names := a.opener(), a.devices()
	out := api.Explanation{Container: a.describe(c, func() Devices { return names }), Ended: ended, Changes: []api.Change{}}
	for _, e := range a.journal.Entries() {
		switch container.ID(e.Owner.Container) {
		case c.ID:
			out.Changes = append(out.Changes, a.change(open, names, e, t))
		case 0:
			out.Host = append(out.Host, a.change(open, names, e, policy.Target{}))
		}
	}
	for _, f := range a.all {
		if w, ok := f.(feature.Witness); ok && a.hangs(f) == "" {
			a.fence(f).read("evidence", c.ID, func() { out.Evidence = append(out.Evidence, w.Evidence(c.ID)...) })
		}
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	out.Problems = wireProblems(a.problems, func(p policy.Problem) bool { return p.Container == c.ID })
	return out, nil
}

// Plan returns what features would change on the host for one container.
func (a *Agent) Plan(ctx context.Context, ref string) ([]api.Planned, error) {
	c, ended, err := a.findToRead(ref)
	if err != nil {
		return nil, err
	}
	if ended {
		return nil, &api.Error{Status: http.StatusConflict, Code: "ended", Text: "container " + c.Name + " has ended"}
	}
	out, names := []api.Planned{}, a.devices()
	for _, f := range a.all {
		p, ok := f.(feature.Planner)
		if !ok {
			continue
		}
		if what := a.hangs(f); what != "" {
			return nil, &api.Error{Status: http.StatusServiceUnavailable, Code: "unavailable", Text: what}
		}
		var plan feature.Plan
		var err error
		if perr := a.fence(f).read("plan", c.ID, func() { plan, err = p.Plan(ctx, c) }); perr != nil {
			return nil, uncalled(f, perr)
		}
		if err != nil {
			return nil, &api.Error{Status: http.StatusConflict, Code: "impossible", Text: api.Text(err)}
		}
		for _, s := range plan.Steps {
			out = append(out, api.Planned{
				Feature: f.Name(), Because: api.Setting{Key: plan.Key, Value: plan.Value},
				Kind: s.Ref.Kind, Object: s.Ref.Object, Device: names.of(s.Ref.Object), Now: s.Now, Value: s.Value,
			})
		}
	}
	return out, nil
}

// change describes one journal entry, with the present value of its knob.
func (a *Agent) change(open journal.Opener, names Devices, e journal.Entry, t policy.Target) api.Change {
	w := api.Change{
		Container: api.ID(e.Owner.Container), Feature: e.Owner.Feature, Kind: e.Ref.Kind, Object: e.Ref.Object, Device: names.of(e.Ref.Object),
		Before: e.Before, Wrote: e.Wrote, When: e.When,
	}
	if e.Value != e.Wrote {
		w.Asked = e.Value
	}
	if !e.Expiry.IsZero() { // in terms of the clock as it is set now
		at := a.pace.now()
		w.Expiry = at.Add(e.Expiry.Sub(at)).UTC()
	}
	for _, o := range t.Origins {
		if policy.FeatureOf(o.Key) == e.Owner.Feature {
			w.Because = append(w.Because, api.Setting(o))
		}
	}
	now, err := read(open, e.Ref)
	switch {
	case errors.Is(err, journal.ErrGone):
		w.State = api.ChangeGone
	case err != nil:
		w.State, w.Error = api.ChangeUnknown, named(api.Text(err), func() Devices { return names })
	case now == e.Wrote:
		w.Now, w.State = now, api.ChangeInForce
	case now == e.Before:
		w.Now, w.State = now, api.ChangeUndone
	default:
		w.Now, w.State = now, api.ChangeForeign
	}
	return w
}

func read(open journal.Opener, ref journal.Ref) (string, error) {
	k, err := open(ref)
	if err != nil {
		return "", err
	}
	if c, ok := k.(io.Closer); ok {
		defer c.Close()
	}
	return k.Read()
}

// restoreTime limits the wait for the features in Restore.
const restoreTime = 20 * time.Second

// Restore undoes what is applied to one container, or to all and to the host if ref is "". It holds
// them released until policy is loaded again; otherwise the next round would apply everything anew.
func (a *Agent) Restore(ctx context.Context, ref string) (api.Restored, error) {
	match := func(container.ID) bool { return true }
	answer := api.Restored{Outcomes: []api.Outcome{}}
	before := a.journal.Entries() // once the hold is set, a round may begin to undo them
	if ref == "" {
		a.mu.Lock()
		a.heldAll = true
		a.mu.Unlock()
	} else {
		c, ended, err := a.find(ref)
		if err != nil {
			return api.Restored{}, err
		}
		answer.Container, answer.Name, answer.Source = api.ID(c.ID), c.Name, c.Source
		match = func(id container.ID) bool { return id == c.ID }
		if !ended {
			a.mu.Lock()
			a.held[c.ID] = true
			a.mu.Unlock()
		}
	}
	mine := func(e journal.Entry) bool { return match(container.ID(e.Owner.Container)) }
	before = slices.DeleteFunc(before, func(e journal.Entry) bool { return !mine(e) })
	a.round()
	ctx, cancel := context.WithTimeout(ctx, restoreTime)
	defer cancel()
	for _, w := range a.workers {
		w.letGo(ctx, match)
	}
	out, _ := a.journal.Restore(a.opener(), mine) // the outcomes have the errors
	a.tell(out)

	names := a.devices()
	type claim struct {
		ref journal.Ref
		by  journal.Owner
	}
	told := make(map[claim]bool)
	for _, o := range out {
		told[claim{o.Entry.Ref, o.Entry.Owner}] = true
		answer.Outcomes = append(answer.Outcomes, WireOutcome(o, names))
	}
	// Entries that the features undid themselves.
	slices.Reverse(before)
	open := a.opener()
	for _, e := range before {
		if !told[claim{e.Ref, e.Owner}] {
			answer.Outcomes = append(answer.Outcomes, WireOutcome(a.seen(open, e), names))
		}
	}
	return answer, nil
}

// seen determines the outcome for an entry that is no longer in the journal.
func (a *Agent) seen(open journal.Opener, e journal.Entry) journal.Outcome {
	now, err := read(open, e.Ref)
	others := a.journal.Claims(e.Ref)
	switch {
	case err == nil && len(others) > 0 && others[0].Ours(now):
		return journal.Outcome{Entry: e, Result: journal.Released, Value: now}
	case errors.Is(err, journal.ErrGone):
		return journal.Outcome{Entry: e, Result: journal.Gone}
	case err != nil:
		return journal.Outcome{Entry: e, Result: journal.Failed, Err: fmt.Errorf("see what became of it: %w", err)}
	case now == e.Before:
		return journal.Outcome{Entry: e, Result: journal.Restored, Value: now}
	}
	return journal.Outcome{Entry: e, Result: journal.Foreign, Value: now}
}

// WireOutcome converts an outcome of Restore to the API's form, for the agent and for `fairlead
// restore` without one.
func WireOutcome(o journal.Outcome, names Devices) api.Outcome {
	e := o.Entry
	w := api.Outcome{
		Container: api.ID(e.Owner.Container), Feature: e.Owner.Feature, Kind: e.Ref.Kind, Object: e.Ref.Object, Device: names.of(e.Ref.Object),
		Result: string(o.Result), Before: e.Before, Wrote: e.Wrote, Error: named(api.Text(o.Err), func() Devices { return names }),
	}
	if o.Result == journal.Foreign {
		w.Now = o.Value
	}
	return w
}

// minPrefix is the least length of the prefix of a runtime id.
const minPrefix = 4

// find returns the container for ref. It tries in this order: an exact name of a runtime's
// container (the whole runtime id, the name, the pod, the name in the pod); the id; the name of a
// bare cgroup, which any user of the host may make; the start of a runtime id; a name that a table
// has cut, with its "…". id:NUMBER is only an id. An ended container is found by id while the Set
// remembers it.
//
// If several containers match at the same step, the error lists them.
func (a *Agent) find(ref string) (c container.Container, ended bool, err error) {
	if ref == "" || len(ref) > 4096 {
		return c, false, &api.Error{Status: http.StatusBadRequest, Code: "bad_request", Text: "no container is named"}
	}
	all := a.set.Snapshot().Containers
	whole, cut := strings.CutSuffix(ref, "…")
	byID := func() (c container.Container, ended, found bool) {
		id, err := strconv.ParseUint(strings.TrimPrefix(ref, api.IDPrefix), 10, 64)
		if err == nil {
			c, found = a.set.Lookup(container.ID(id))
		}
		return c, !slices.ContainsFunc(all, func(o container.Container) bool { return o.ID == c.ID }), found
	}
	bare := func(c container.Container) bool { return c.Source == container.CgroupSource }
	for _, match := range []func(container.Container) bool{
		func(c container.Container) bool { return !bare(c) && c.RuntimeID == ref },
		func(c container.Container) bool { return !bare(c) && c.Name == ref },
		func(c container.Container) bool { return c.Pod != "" && c.Namespace+"/"+c.Pod == ref },
		func(c container.Container) bool { return !bare(c) && c.Short() == ref },
		nil, // by id
		func(c container.Container) bool { return c.Name == ref },
		func(c container.Container) bool { return len(ref) >= minPrefix && strings.HasPrefix(c.RuntimeID, ref) },
		func(c container.Container) bool { return cut && strings.HasPrefix(c.Name, whole) },
	} {
		if match == nil || strings.HasPrefix(ref, api.IDPrefix) {
			if c, ended, found := byID(); found {
				return c, ended, nil
			}
			continue
		}
		var found []container.Container
		for _, c := range all {
			if match(c) {
				found = append(found, c)
			}
		}
		switch {
		case len(found) == 1:
			return found[0], false, nil
		case len(found) > 1:
			return c, false, ambiguous(ref, found)
		}
	}
	text := fmt.Sprintf("no container %q runs here", ref)
	if near := begin(all, ref); len(near) == 1 {
		text += fmt.Sprintf("; did you mean %q?", near[0].Name)
	}
	return c, false, &api.Error{Status: http.StatusNotFound, Code: "not_found", Text: text}
}

// findToRead is find for requests that change nothing. It also accepts the start of a name without
// the "…" of a table.
func (a *Agent) findToRead(ref string) (c container.Container, ended bool, err error) {
	c, ended, err = a.find(ref)
	var e *api.Error
	if !errors.As(err, &e) || e.Code != "not_found" {
		return c, ended, err
	}
	switch near := begin(a.set.Snapshot().Containers, ref); len(near) {
	case 0:
		return c, false, err
	case 1:
		return near[0], false, nil
	default:
		return c, false, ambiguous(ref, near)
	}
}

// begin lists the containers with names that begin with ref.
func begin(all []container.Container, ref string) (found []container.Container) {
	for _, c := range all {
		if len(ref) >= minPrefix && (strings.HasPrefix(c.Name, ref) || strings.HasPrefix(c.Short(), ref)) {
			found = append(found, c)
		}
	}
	return found
}

// ambiguous is the error for a reference that several containers match.
func ambiguous(ref string, found []container.Container) error {
	const most = 8
	var names []string
	for _, c := range found[:min(len(found), most)] {
		names = append(names, fmt.Sprintf("%s%s (%s, %s)", api.IDPrefix, c.ID, c.Name, c.Source))
	}
	if more := len(found) - most; more > 0 {
		names = append(names, fmt.Sprintf("and %d more", more))
	}
	return &api.Error{Status: http.StatusConflict, Code: "ambiguous",
		Text: fmt.Sprintf("%q may be any of %d containers: %s; give the id", ref, len(found), strings.Join(names, ", "))}
}
