// Package tenant groups containers into network tenants. It says who is in a tenant, which
// member owns its journal entries, at which devices its packets pass, what has changed, and
// what the members' policies agree on. It is pure: it reads no file, allocates no slot
// (tenant/identity does) and attaches nothing (hook does).
//
// A feature has a Register of its own and passes it the containers that it works for, in
// Apply and Remove. Both return tenants. The feature brings each up to date, then calls
// Settle. If that fails, the next call for the same container returns the same tenants, with
// the same Change. A tenant outlives its last member until Settle.
//
// netcpu, traffic, latency and overlay use it. Two places still keep tenants of their own:
//
//   - netcpu/charge: payers by cgroup. A key of {Container: number of the TenantGroup's
//     cgroup}, which survives a rename; the largest reserve of Said. But a container stays
//     charged until what was turned for it is restored, so that its Remove can fail.
//   - agent's worker: who shares a network: Members, in a Register of all containers.
package tenant

import (
	"cmp"
	"errors"
	"maps"
	"slices"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/policy"
)

// Key names a tenant.
type Key = container.TenantKey

// ErrNoNetwork is returned by Network for a container without a known network namespace: it
// is ending, or has ended.
var ErrNoNetwork = errors.New("the container's network is not known")

// Network is the usual key function of a Register. Containers that share a network namespace
// are one tenant; each container in the host's namespace is a tenant of its own. Errors:
// ErrNoNetwork.
func Network(c container.Container) (Key, error) {
	key := c.TenantKey()
	if key == (Key{}) {
		return Key{}, ErrNoNetwork
	}
	return key, nil
}

// Register groups containers into tenants and tracks how the tenants change. Make it with
// New. It is not safe for concurrent use.
type Register struct {
	proc    string
	key     func(container.Container) (Key, error)
	tenants map[Key]*Tenant
	of      map[container.ID]*Tenant
}

// New makes an empty Register. proc is the root of proc, for the paths of Ends. key returns
// the tenant of a container: use Network, or a function that groups by cgroup.
func New(proc string, key func(container.Container) (Key, error)) *Register {
	return &Register{proc: proc, key: key, tenants: make(map[Key]*Tenant), of: make(map[container.ID]*Tenant)}
}

// Apply adds a container, or updates it. It returns the tenant that the container is in now,
// and the unsettled tenants that it has left, sorted by key. Bring the tenants in left up to
// date first: until then, journal entries in the container's name are theirs. An error is
// that of the key function; the Register is unchanged then.
func (r *Register) Apply(target policy.Target) (in *Tenant, left []*Tenant, err error) {
	id := target.Container.ID
	key, err := r.key(target.Container)
	if err != nil {
		return nil, nil, err
	}
	if was := r.of[id]; was != nil && was.key != key { // it has moved
		was.leave(id, r.proc)
	}
	in = r.tenants[key]
	if in == nil {
		in = &Tenant{key: key}
		r.tenants[key] = in
	}
	r.of[id] = in
	in.join(target, r.proc)
	return in, r.unsettled(id), nil
}

// Remove takes a container out of its tenant. It returns the unsettled tenants that the
// container has left, sorted by key. A second Remove, after the caller's work for the first
// has failed, returns the same tenants again; after Settle it returns none.
func (r *Register) Remove(id container.ID) (left []*Tenant) {
	if t := r.of[id]; t != nil {
		delete(r.of, id)
		t.leave(id, r.proc)
	}
	return r.unsettled(id)
}

func (r *Register) unsettled(id container.ID) []*Tenant {
	var left []*Tenant
	for _, t := range r.tenants {
		if slices.Contains(t.change.Left, id) {
			left = append(left, t)
		}
	}
	slices.SortFunc(left, byKey)
	return left
}

// Settle records that the caller has brought a tenant up to date, and empties its Change. It
// releases a tenant without members: the Register forgets it.
func (r *Register) Settle(t *Tenant) {
	t.change = Change{}
	if len(t.members) == 0 && r.tenants[t.key] == t {
		delete(r.tenants, t.key)
	}
}

// Of returns the tenant that a container is in, nil if it is in none.
func (r *Register) Of(id container.ID) *Tenant { return r.of[id] }

// At returns the tenant with a key, nil if there is none.
func (r *Register) At(key Key) *Tenant { return r.tenants[key] }

// Tenants returns all tenants, sorted by key, including tenants without members that are not
// released yet.
func (r *Register) Tenants() []*Tenant { return slices.SortedFunc(maps.Values(r.tenants), byKey) }

func byKey(a, b *Tenant) int {
	return cmp.Or(cmp.Compare(a.key.NetNS, b.key.NetNS), cmp.Compare(a.key.Container, b.key.Container))
}

// Tenant is one tenant. The Register that returned it keeps it up to date.
type Tenant struct {
	key     Key
	members []policy.Target // in the order in which they joined
	owner   container.ID
	ends    []container.End
	change  Change
}

// Change is what has happened to a tenant since the last Settle.
type Change struct {
	// Joined are the members that have joined since then, in that order. A member that left
	// and came back is among them.
	Joined []container.ID
	// Left are the containers that have left since then, in that order, and have not come
	// back. Journal entries in their names pass to the Owner, unless all members have left.
	Left []container.ID
}

func without(ids []container.ID, id container.ID) []container.ID {
	return slices.DeleteFunc(ids, func(i container.ID) bool { return i == id })
}

// Key returns the tenant's key.
func (t *Tenant) Key() Key { return t.key }

// Members returns the latest Target of each member, in the order in which they joined.
func (t *Tenant) Members() []policy.Target { return slices.Clone(t.members) }

// Owner is the container that owns the tenant's journal entries and reports: the member that
// joined first. It changes only when that member leaves. After the last member has left, it
// stays the owner until the tenant is released.
func (t *Tenant) Owner() container.ID { return t.owner }

// Ends returns the ends of all members, in the order of Members, each device once. If members
// describe a device differently, the first of them counts. Do not modify what the ends share
// with their containers, such as Inside.Addrs.
func (t *Tenant) Ends() []container.End { return slices.Clone(t.ends) }

// Change returns what has happened since the last Settle, or since the tenant was made.
func (t *Tenant) Change() Change {
	return Change{Joined: slices.Clone(t.change.Joined), Left: slices.Clone(t.change.Left)}
}

func (t *Tenant) join(target policy.Target, proc string) {
	id := target.Container.ID
	if i := t.index(id); i >= 0 {
		t.members[i] = target
	} else {
		t.members = append(t.members, target)
		t.change.Left = without(t.change.Left, id)
		t.change.Joined = append(t.change.Joined, id)
	}
	t.follow(proc)
}

func (t *Tenant) leave(id container.ID, proc string) {
	i := t.index(id)
	t.members = slices.Delete(t.members, i, i+1)
	t.change.Joined = without(t.change.Joined, id)
	t.change.Left = append(t.change.Left, id)
	t.follow(proc)
}

// IDs lists the ids of the members, the lowest first.
func (t *Tenant) IDs() (ids []container.ID) {
	for _, m := range t.members {
		ids = append(ids, m.Container.ID)
	}
	slices.Sort(ids)
	return ids
}

func (t *Tenant) index(id container.ID) int {
	return slices.IndexFunc(t.members, func(m policy.Target) bool { return m.Container.ID == id })
}

// follow updates the owner and the ends to the members.
func (t *Tenant) follow(proc string) {
	if len(t.members) > 0 {
		t.owner = t.members[0].Container.ID
	}
	t.ends = nil
	seen := make(map[container.Device]bool)
	for _, m := range t.members {
		for _, e := range m.Container.Ends(proc) {
			if !seen[e.Device] {
				seen[e.Device] = true
				t.ends = append(t.ends, e)
			}
		}
	}
}

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
