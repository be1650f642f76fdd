package policy

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/fairlead-project/fairlead/container"
)

// Decision is what a controller (netcpu's auto) wants for one key of one
// container, in place of what policy says, until it lapses. Whoever decides
// has to decide again before that.
type Decision struct {
	Container container.ID
	Key       string // as in a label: "fairlead.netcpu"
	Value     string // as in a label: "isolate"
	Expiry    time.Time

	// Instead is the value that the decision stands in for: where policy says
	// anything else it does not count. "" is whatever policy says.
	Instead string
	Reason  string // why, in words, for who asks; it may quote names of containers
	Since   time.Time
}

// Lapsed says whether the decision counts no longer. One without an Expiry
// never counts: a controller that dies must not be obeyed for ever.
func (d Decision) Lapsed(now time.Time) bool { return !d.Expiry.After(now) }

// With gives t with those of the decisions that are about its container and
// have not lapsed. Its Expiry is the first of theirs: then t has to be made
// anew. A decision that is no valid value, or contradicts the rest, is left out
// and is part of the error.
func (t Target) With(decisions []Decision, now time.Time) (Target, error) {
	t.Settings.IO = slices.Clone(t.Settings.IO)
	t.Origins = slices.Clone(t.Origins)
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

// says whether policy says what a decision is made about.
func (t Target) says(d Decision) bool {
	return d.Instead == "" || slices.ContainsFunc(t.Origins, func(o Origin) bool { return o.Key == d.Key && strings.EqualFold(o.Value, d.Instead) })
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
	return t, nil
}
