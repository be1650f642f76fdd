package policy

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/fairlead-project/fairlead/container"
)

// Decision is a controller's (netcpu's auto) value for one key of one container in place of policy,
// until it lapses. The controller must renew it before that.
type Decision struct {
	Container container.ID
	Key       string // as in a label: "fairlead.netcpu"
	Value     string // as in a label: "isolate"
	Expiry    time.Time

	// Instead is the value that the decision replaces, or several values separated by |. If policy has
	// another value, the decision does not count. "" replaces any value.
	Instead string
	Reason  string // why, in words, for explain; it may quote names of containers
	Since   time.Time
}

// Lapsed reports whether the decision no longer counts. A decision without an Expiry never counts,
// because a controller that dies must not be obeyed for ever.
func (d Decision) Lapsed(now time.Time) bool { return !d.Expiry.After(now) }

// With returns t with the decisions for its container that have not lapsed. Its Expiry is the earliest
// of theirs; then t must be made anew. With leaves out a decision with an invalid value, or one that
// contradicts the rest, and the error lists it.
func (t Target) With(decisions []Decision, now time.Time) (Target, error) {
	t.Settings.IO = slices.Clone(t.Settings.IO)
	t.Origins = slices.Clone(t.Origins)
	t.Decided = maps.Clone(t.Decided)
	var errs []error
	for _, d := range decisions {
		if d.Container != t.Container.ID || d.Lapsed(now) || !t.says(d) {
			continue
		}
		next, err := t.with(d)
		if err != nil {
			errs = append(errs, fmt.Errorf("decision %s = %s: %w", plain(d.Key), quote(d.Value), err))
			continue
		}
		t = next
	}
	return t, errors.Join(errs...)
}

// says reports whether policy has the value that a decision replaces.
func (t Target) says(d Decision) bool {
	values := strings.Split(d.Instead, "|")
	return d.Instead == "" || slices.ContainsFunc(t.Origins, func(o Origin) bool {
		return o.Key == d.Key && slices.ContainsFunc(values, func(v string) bool { return strings.EqualFold(o.Value, v) })
	})
}

func (t Target) with(d Decision) (Target, error) {
	k, ok := lookup(strings.TrimPrefix(d.Key, prefix))
	if !ok || !strings.HasPrefix(d.Key, prefix) {
		return t, errors.New("unknown key")
	}
	set, err := k.parseValue(d.Value)
	if err != nil {
		return t, err
	}
	set(&t.Settings)
	if cs := conflicts(t.Settings); len(cs) > 0 {
		return t, errors.New(cs[0].reason)
	}
	by := Origin{Key: d.Key, Value: d.Value, From: "controller", Reason: d.Reason, Since: d.Since}
	i, found := slices.BinarySearchFunc(t.Origins, by, func(a, b Origin) int { return cmp.Compare(a.Key, b.Key) })
	if found {
		by.Instead = t.Origins[i].String()
		t.Origins[i] = by
	} else {
		t.Origins = slices.Insert(t.Origins, i, by)
	}
	if t.Expiry.IsZero() || d.Expiry.Before(t.Expiry) {
		t.Expiry = d.Expiry
	}
	if t.Decided == nil {
		t.Decided = make(map[string]time.Time)
	}
	t.Decided[d.Key] = d.Expiry
	return t, nil
}

// Override is a value set by hand for one running container. It takes precedence over files and
// labels, whether or not labels are denied.
type Override struct {
	Container container.ID `json:"container,string"`
	Key       string       `json:"key"`   // as in a file: "net.rate"
	Value     string       `json:"value"` // as in a label
	From      string       `json:"from"`  // the source in explain: "set by uid 0 at ..."
}

// overridesOf makes layers of overrides, by container. It reports and omits invalid values.
func overridesOf(all []Override) (map[container.ID]layer, []Problem) {
	layers := map[container.ID]layer{}
	var problems []Problem
	for _, o := range all {
		k, known := lookup(o.Key)
		if !known {
			problems = append(problems, Problem{Container: o.Container, Key: o.Key, Value: o.Value, Reason: unknownKey(o.Key, names("", ""))})
			continue
		}
		set, err := k.parseValue(o.Value)
		if err != nil {
			problems = append(problems, Problem{Container: o.Container, Key: o.Key, Value: o.Value, Reason: err.Error()})
			continue
		}
		if layers[o.Container] == nil {
			layers[o.Container] = layer{}
		}
		layers[o.Container][o.Key] = entry{set: set, hand: true, origin: Origin{Key: prefix + o.Key, Value: o.Value, From: o.From}}
	}
	return layers, problems
}

// KnownKey returns the name of a key without its label prefix, or a Problem if there is no such
// key.
func KnownKey(name string) (string, error) {
	key := strings.TrimPrefix(name, prefix)
	if _, ok := lookup(key); !ok {
		return "", Problem{Key: name, Reason: unknownKey(key, names("", ""))}
	}
	return key, nil
}

// Override replaces all values set by hand. It omits invalid ones; the error is then a [Problems].
func (s *Store) Override(all []Override) error {
	layers, problems := overridesOf(all)
	s.mu.Lock()
	defer s.mu.Unlock()
	// Cleared values must no longer stand in for others.
	for id, last := range s.last {
		now := layers[id]
		maps.DeleteFunc(last, func(key string, e entry) bool { return e.hand && now[key].origin != e.origin })
	}
	s.overrides = layers
	if len(problems) > 0 {
		return Problems(problems)
	}
	return nil
}

// Check returns why overrides cannot be the complete overrides of c, or nil. It changes nothing. The
// error is a [Problems]: values that are invalid, or that contradict each other, or files and labels.
func (s *Store) Check(c container.Container, overrides []Override) error {
	layers, problems := overridesOf(overrides)
	for i := range problems {
		problems[i].Container = 0 // the caller knows the container
	}
	if len(problems) == 0 {
		files := s.Policy()
		c = s.own(c)
		held := files.matching(c)
		_, before, _ := files.resolve(c, held, nil, requested(c, s.disks), nil)
		_, found, _ := files.resolve(c, held, nil, requested(c, s.disks), layers[c.ID])
		for _, p := range found {
			if !slices.Contains(before, p) {
				p.Container, p.Name = 0, ""
				p.Key = strings.TrimPrefix(p.Key, prefix)
				problems = append(problems, p)
			}
		}
	}
	if len(problems) == 0 {
		return nil
	}
	slices.SortStableFunc(problems, func(a, b Problem) int { return cmp.Compare(a.Key, b.Key) })
	return Problems(problems)
}
