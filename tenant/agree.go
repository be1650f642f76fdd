package tenant

import (
	"slices"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/policy"
)

// Agreement is what the members of a tenant ask for in one setting.
type Agreement[V any] struct {
	// Said holds the value of each member that asks for one, in the order of the members. A
	// feature with another rule, such as "the highest counts", computes it from here.
	Said []Said[V]
	// Value is the value that all in Said ask for. It is zero if they disagree, or if no
	// member asks for one. So a switch is on if a member says on and no member says off.
	Value V

	equal func(a, b V) bool
}

// Said is what one member asks for.
type Said[V any] struct {
	By    container.Container
	Value V
}

// Agree compares one setting of all members. says returns the setting of a member, and false
// if the member's policy leaves it out. Such a member agrees with any other.
func Agree[V comparable](members []policy.Target, says func(policy.Target) (V, bool)) Agreement[V] {
	return AgreeFunc(members, says, func(a, b V) bool { return a == b })
}

// AgreeFunc is Agree with a function that compares two values.
func AgreeFunc[V any](members []policy.Target, says func(policy.Target) (V, bool), equal func(a, b V) bool) Agreement[V] {
	a := Agreement[V]{equal: equal}
	for _, m := range members {
		if v, ok := says(m); ok {
			a.Said = append(a.Said, Said[V]{m.Container, v})
		}
	}
	if len(a.Said) > 0 && !a.Disagree() {
		a.Value = a.Said[0].Value
	}
	return a
}

// Disagree says whether two members ask for different values.
func (a Agreement[V]) Disagree() bool {
	return slices.ContainsFunc(a.Said, func(s Said[V]) bool { return !a.equal(s.Value, a.Said[0].Value) })
}

// Against returns the first member that asks for another value than the member id does. Apply
// names it beside feature.ErrDisagree. ok is false if there is none, or id asks for nothing.
func (a Agreement[V]) Against(id container.ID) (other container.Container, ok bool) {
	i := slices.IndexFunc(a.Said, func(s Said[V]) bool { return s.By.ID == id })
	if i < 0 {
		return container.Container{}, false
	}
	j := slices.IndexFunc(a.Said, func(s Said[V]) bool { return !a.equal(s.Value, a.Said[i].Value) })
	if j < 0 {
		return container.Container{}, false
	}
	return a.Said[j].By, true
}
