package tenant_test

import (
	"errors"
	"reflect"
	"slices"
	"testing"

	"pgregory.net/rapid"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/policy"
	"github.com/fairlead-project/fairlead/tenant"
)

// call is one call of a Register.
type call struct {
	apply  *policy.Target
	remove container.ID
	settle *tenant.Key
}

// stay is that a container is in a tenant, since a call.
type stay struct {
	policy.Target
	key   tenant.Key
	since int
}

// model finds out from all calls so far what a Register has to say. It keeps nothing from
// one call to the next.
type model struct {
	calls []call
	stays [][]stay // who is where after the first n calls, in the order in which they came there
}

func modelOf(calls []call) *model {
	l := &model{calls: calls, stays: make([][]stay, 1, len(calls)+1)}
	for i, c := range calls {
		list := slices.Clone(l.stays[i])
		gone := func(id container.ID) {
			list = slices.DeleteFunc(list, func(s stay) bool { return s.Container.ID == id })
		}
		if c.remove != 0 {
			gone(c.remove)
		}
		if c.apply != nil && (c.apply.Container.HostNetwork || c.apply.Container.NetNS != 0) {
			id, key := c.apply.Container.ID, c.apply.Container.TenantKey()
			at := slices.IndexFunc(list, func(s stay) bool { return s.Container.ID == id })
			if at >= 0 && list[at].key == key {
				list[at].Target = *c.apply
			} else {
				gone(id)
				list = append(list, stay{*c.apply, key, i + 1})
			}
		}
		l.stays = append(l.stays, list)
	}
	return l
}

// members is who was in a tenant after the first n calls.
func (l *model) members(n int, key tenant.Key) (list []stay) {
	for _, s := range l.stays[n] {
		if s.key == key {
			list = append(list, s)
		}
	}
	return list
}

// settled is the last call that settled a tenant, 0 for none.
func (l *model) settled(key tenant.Key) int {
	for i := len(l.calls); i > 0; i-- {
		if c := l.calls[i-1]; c.settle != nil && *c.settle == key {
			return i
		}
	}
	return 0
}

func (l *model) ends(n int, key tenant.Key) (list []container.End) {
	for _, m := range l.members(n, key) {
		for _, e := range m.Container.Ends("/proc") {
			if !slices.ContainsFunc(list, func(o container.End) bool { return o.Device == e.Device }) {
				list = append(list, e)
			}
		}
	}
	return list
}

// owner is who was the first member when there was one last.
func (l *model) owner(key tenant.Key) container.ID {
	for n := len(l.calls); n > 0; n-- {
		if m := l.members(n, key); len(m) > 0 {
			return m[0].Container.ID
		}
	}
	return 0
}

// tenant is what a tenant has to be now, if it is there.
func (l *model) tenant(key tenant.Key) (w what, ends []container.End, there bool) {
	now := len(l.calls)
	since := l.settled(key)
	w.Key, w.Owner = key, l.owner(key)
	for _, m := range l.members(now, key) {
		w.Members = append(w.Members, m.Container.ID)
		if m.since > since {
			w.Change.Joined = append(w.Change.Joined, m.Container.ID)
		}
	}
	ends = l.ends(now, key)
	for _, e := range ends {
		w.Ends = append(w.Ends, e.Device)
	}
	// Those who were there at any time since, in the order in which they went.
	for n := since; n < now; n++ {
		next := l.members(n+1, key)
		for _, m := range l.members(n, key) {
			id := m.Container.ID
			stays := slices.ContainsFunc(next, func(s stay) bool { return s.Container.ID == id })
			if !stays && !slices.Contains(w.Members, id) {
				w.Change.Left = append(slices.DeleteFunc(w.Change.Left, func(l container.ID) bool { return l == id }), id)
			}
		}
	}
	return w, ends, len(w.Members) > 0 || len(w.Change.Left) > 0
}

// A Register, which keeps what follows from each call, and the model, which has only the
// calls, say the same after any joins, leaves, moves and changes of devices.
func TestModel(t *testing.T) {
	device := rapid.Custom(func(t *rapid.T) container.Interface {
		index := rapid.IntRange(1, 3).Draw(t, "index")
		if rapid.Bool().Draw(t, "macvlan") {
			return container.Interface{Index: index, Kind: "macvlan"}
		}
		return veth(rapid.SampledFrom([]string{"a", "b"}).Draw(t, "name"), index, 100+index)
	})
	target := rapid.Custom(func(t *rapid.T) policy.Target {
		id := container.ID(rapid.IntRange(1, 4).Draw(t, "id"))
		netns := uint64(rapid.IntRange(0, 3).Draw(t, "netns")) // 0: not known
		m := in(netns, id, rapid.SliceOfN(device, 0, 3).Draw(t, "devices")...)
		m.Container.HostNetwork = netns == 1
		return m
	})
	rapid.Check(t, func(t *rapid.T) {
		r := tenant.New("/proc", tenant.Network)
		var calls []call
		keys := []tenant.Key{{Container: 1}, {Container: 2}, {Container: 3}, {Container: 4}, {NetNS: 2}, {NetNS: 3}}
		agrees := func(left []*tenant.Tenant, id container.ID) {
			t.Helper()
			now := modelOf(calls)
			var want, wantLeft []what
			for _, key := range keys {
				w, ends, there := now.tenant(key)
				own := r.At(key)
				if (own != nil) != there {
					t.Fatalf("%v is there: %v, want %v", key, own != nil, there)
				}
				if !there {
					continue
				}
				want = append(want, w)
				if slices.Contains(w.Change.Left, id) {
					wantLeft = append(wantLeft, w)
				}
				if !reflect.DeepEqual(own.Ends(), ends) {
					t.Fatalf("ends of %v: %+v, want %+v", key, own.Ends(), ends)
				}
				for i, m := range own.Members() {
					if of := now.members(len(calls), key)[i].Target; !reflect.DeepEqual(m, of) || r.Of(m.Container.ID) != own {
						t.Fatalf("member %d of %v is %+v, want %+v", i, key, m, of)
					}
				}
			}
			if got := all(r.Tenants()); !equal(got, want) {
				t.Fatalf("tenants\n%+v\nwant\n%+v", got, want)
			}
			if got := all(left); !equal(got, wantLeft) {
				t.Fatalf("left\n%+v\nwant\n%+v", got, wantLeft)
			}
		}
		t.Repeat(map[string]func(*rapid.T){
			"apply": func(t *rapid.T) {
				m := target.Draw(t, "target")
				own, left, err := r.Apply(m)
				calls = append(calls, call{apply: &m})
				if err != nil {
					if m.Container.NetNS != 0 || own != nil || left != nil || !errors.Is(err, tenant.ErrNoNetwork) {
						t.Fatalf("%v, %v, %v", own, left, err)
					}
					agrees(nil, 0)
					return
				}
				if own != r.Of(m.Container.ID) || own.Key() != m.Container.TenantKey() {
					t.Fatalf("it is in %+v", describe(own))
				}
				agrees(left, m.Container.ID)
			},
			"remove": func(t *rapid.T) {
				id := container.ID(rapid.IntRange(1, 4).Draw(t, "id"))
				left := r.Remove(id)
				calls = append(calls, call{remove: id})
				if r.Of(id) != nil {
					t.Fatal("it is still a member")
				}
				agrees(left, id)
			},
			"settle": func(t *rapid.T) {
				key := rapid.SampledFrom(keys).Draw(t, "tenant")
				own := r.At(key)
				if own == nil {
					return
				}
				r.Settle(own)
				calls = append(calls, call{settle: &key})
				agrees(nil, 0)
			},
		})
	})
}

// Whatever the members say, the answer is that of looking at each pair of them.
func TestAgreeModel(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		list := members(rapid.StringMatching("[yn-]{0,6}").Draw(t, "says"))
		a := tenant.Agree(list, overlay)
		on, off := false, false
		var said []tenant.Said[bool]
		for _, m := range list {
			v, says := overlay(m)
			if says {
				said = append(said, tenant.Said[bool]{By: m.Container, Value: v})
			}
			on, off = on || says && v, off || says && !v
			differs := slices.IndexFunc(list, func(o policy.Target) bool {
				w, objects := overlay(o)
				return says && objects && v != w
			})
			other, ok := a.Against(m.Container.ID)
			if ok != (differs >= 0) || ok && other.ID != list[differs].Container.ID {
				t.Fatalf("against %d: %d, %v", m.Container.ID, other.ID, ok)
			}
		}
		if a.Value != (on && !off) || a.Disagree() != (on && off) {
			t.Fatalf("%v, disagree %v", a.Value, a.Disagree())
		}
		if !reflect.DeepEqual(a.Said, said) {
			t.Fatalf("said %v, want %v", a.Said, said)
		}
	})
}
