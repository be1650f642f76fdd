package journal

import (
	"slices"
	"time"
)

// note is the journal's record of one knob. It is immutable: a change replaces it.
type note struct {
	seq    uint64 // its position in the order of the knobs' first turns; put replaces 0
	Ref    Ref
	Before string
	Wrote  string
	Prior  *string
	claims []claim // one for each feature, in the order of their first claims
}

// claim is one feature's claim; see Entry.
type claim struct {
	Owner  Owner
	Value  string
	Source string
	When   time.Time
	Expiry time.Time
}

func (n note) entry(c claim) Entry {
	return Entry{
		Ref: n.Ref, Before: n.Before, Wrote: n.Wrote, Prior: n.Prior,
		Owner: c.Owner, Value: c.Value, Source: c.Source, When: c.When, Expiry: c.Expiry,
	}
}

// entries returns the entries of a note that match; nil matches all.
func (n note) entries(match func(Entry) bool) (out []Entry) {
	for _, c := range n.claims {
		if e := n.entry(c); match == nil || match(e) {
			out = append(out, e)
		}
	}
	return out
}

// without returns the claims that do not match.
func (n note) without(match func(Entry) bool) []claim {
	return slices.DeleteFunc(slices.Clone(n.claims), func(c claim) bool { return match == nil || match(n.entry(c)) })
}

// with returns the claims with c added, or in place of the claim of the same feature.
func (n note) with(c claim) []claim {
	i := slices.IndexFunc(n.claims, func(o claim) bool { return o.Owner.Feature == c.Owner.Feature })
	if i < 0 {
		return append(slices.Clone(n.claims), c)
	}
	out := slices.Clone(n.claims)
	if was := out[i]; was.Value == c.Value {
		c.When = was.When
		if was.Owner == c.Owner {
			c.Source = was.Source
		}
	}
	out[i] = c
	return out
}

// composed is the result of the claims, or Before if there are none.
func (n note) composed(k Knob) string {
	switch c, ok := k.(Composed); {
	case len(n.claims) == 0:
		return n.Before
	case len(n.claims) == 1 || !ok:
		return n.claims[len(n.claims)-1].Value
	default:
		wants := make([]string, len(n.claims))
		for i, c := range n.claims {
			wants[i] = c.Value
		}
		return c.Compose(wants)
	}
}

// ours reports whether fairlead wrote value, or an interrupted Write left it.
func (n note) ours(k Knob, value string) bool {
	if value == n.Wrote || n.Prior != nil && value == *n.Prior {
		return true
	}
	s, ok := k.(Stepwise)
	return ok && (s.Unfinished(value, n.Wrote, n.Before) ||
		n.Prior != nil && (s.Unfinished(value, *n.Prior, n.Wrote) || s.Unfinished(value, *n.Prior, n.Before)))
}

// same reports whether two notes of a knob are equal.
func (n note) same(o note) bool {
	return n.Before == o.Before && n.Wrote == o.Wrote && n.Prior == nil && o.Prior == nil &&
		slices.EqualFunc(n.claims, o.claims, func(a, b claim) bool {
			at := a.Expiry.Equal(b.Expiry)
			a.Expiry = b.Expiry
			return at && a == b
		})
}
