package tenant_test

import (
	"errors"
	"reflect"
	"slices"
	"testing"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/policy"
	"github.com/fairlead-project/fairlead/tenant"
)

// veth is a container's device whose host end has an index in the host's namespace, 1.
func veth(name string, index, host int) container.Interface {
	return container.Interface{Name: name, Index: index, Kind: "veth", Host: container.HostEnd{NetNS: 1, Index: host, Name: "veth" + name}}
}

func in(netns uint64, id container.ID, devices ...container.Interface) policy.Target {
	return policy.Target{Container: container.Container{ID: id, PID: int(id), NetNS: netns, Interfaces: devices}}
}

func key(netns uint64) tenant.Key { return tenant.Key{NetNS: netns} }

// what is all that a tenant says of itself.
type what struct {
	Key     tenant.Key
	Members []container.ID
	Owner   container.ID
	Ends    []container.Device
	Change  tenant.Change
}

func describe(t *tenant.Tenant) what {
	w := what{Key: t.Key(), Owner: t.Owner(), Change: t.Change()}
	for _, m := range t.Members() {
		w.Members = append(w.Members, m.Container.ID)
	}
	for _, e := range t.Ends() {
		w.Ends = append(w.Ends, e.Device)
	}
	return w
}

func all(list []*tenant.Tenant) (out []what) {
	for _, t := range list {
		out = append(out, describe(t))
	}
	return out
}

// step is one call of a Register, and what its tenants are then.
type step struct {
	name   string
	apply  *policy.Target // else
	remove container.ID   // else
	settle tenant.Key
	left   []tenant.Key // that the call returned
	want   []what
}

func apply(t policy.Target) *policy.Target { return &t }

func TestRegister(t *testing.T) {
	ids := func(list ...container.ID) []container.ID { return list }
	at := func(netns uint64, index int) container.Device { return container.Device{NetNS: netns, Index: index} }
	for _, tt := range []struct {
		name  string
		steps []step
	}{
		{"one comes and goes", []step{
			{name: "comes", apply: apply(in(5, 10, veth("a", 2, 7))), want: []what{
				{key(5), ids(10), 10, []container.Device{at(1, 7)}, tenant.Change{Joined: ids(10), Ends: true}}}},
			{name: "settled", settle: key(5), want: []what{{key(5), ids(10), 10, []container.Device{at(1, 7)}, tenant.Change{}}}},
			{name: "again", apply: apply(in(5, 10, veth("a", 2, 7))), want: []what{{key(5), ids(10), 10, []container.Device{at(1, 7)}, tenant.Change{}}}},
			{name: "goes", remove: 10, left: []tenant.Key{key(5)}, want: []what{{key(5), nil, 10, nil, tenant.Change{Left: ids(10), Ends: true}}}},
			{name: "goes again", remove: 10, left: []tenant.Key{key(5)}, want: []what{{key(5), nil, 10, nil, tenant.Change{Left: ids(10), Ends: true}}}},
			{name: "released", settle: key(5)},
			{name: "has gone", remove: 10},
		}},
		{"a pod whose first container ends", []step{
			{name: "first", apply: apply(in(5, 30)), want: []what{{key(5), ids(30), 30, nil, tenant.Change{Joined: ids(30)}}}},
			{name: "second", apply: apply(in(5, 10)), want: []what{{key(5), ids(30, 10), 30, nil, tenant.Change{Joined: ids(30, 10)}}}},
			{name: "third", apply: apply(in(5, 20)), want: []what{{key(5), ids(30, 10, 20), 30, nil, tenant.Change{Joined: ids(30, 10, 20)}}}},
			{name: "settled", settle: key(5), want: []what{{key(5), ids(30, 10, 20), 30, nil, tenant.Change{}}}},
			{name: "another ends", remove: 10, left: []tenant.Key{key(5)}, want: []what{{key(5), ids(30, 20), 30, nil, tenant.Change{Left: ids(10)}}}},
			{name: "the owner ends", remove: 30, left: []tenant.Key{key(5)}, want: []what{{key(5), ids(20), 20, nil, tenant.Change{Left: ids(10, 30)}}}},
			{name: "one that did not end", apply: apply(in(5, 20)), want: []what{{key(5), ids(20), 20, nil, tenant.Change{Left: ids(10, 30)}}}},
			{name: "settled by that", settle: key(5), want: []what{{key(5), ids(20), 20, nil, tenant.Change{}}}},
			{name: "the owner's end again", remove: 30, want: []what{{key(5), ids(20), 20, nil, tenant.Change{}}}},
		}},
		{"one moves, and moves on before that is settled", []step{
			{name: "comes", apply: apply(in(5, 10, veth("a", 2, 7))), want: []what{
				{key(5), ids(10), 10, []container.Device{at(1, 7)}, tenant.Change{Joined: ids(10), Ends: true}}}},
			{name: "settled", settle: key(5), want: []what{{key(5), ids(10), 10, []container.Device{at(1, 7)}, tenant.Change{}}}},
			{name: "moves", apply: apply(in(4, 10)), left: []tenant.Key{key(5)}, want: []what{
				{key(4), ids(10), 10, nil, tenant.Change{Joined: ids(10)}}, {key(5), nil, 10, nil, tenant.Change{Left: ids(10), Ends: true}}}},
			{name: "moves on", apply: apply(in(6, 10)), left: []tenant.Key{key(4), key(5)}, want: []what{
				{key(4), nil, 10, nil, tenant.Change{Left: ids(10)}}, {key(5), nil, 10, nil, tenant.Change{Left: ids(10), Ends: true}},
				{key(6), ids(10), 10, nil, tenant.Change{Joined: ids(10)}}}},
			{name: "released", settle: key(4), want: []what{
				{key(5), nil, 10, nil, tenant.Change{Left: ids(10), Ends: true}}, {key(6), ids(10), 10, nil, tenant.Change{Joined: ids(10)}}}},
			{name: "ends", remove: 10, left: []tenant.Key{key(5), key(6)}, want: []what{
				{key(5), nil, 10, nil, tenant.Change{Left: ids(10), Ends: true}}, {key(6), nil, 10, nil, tenant.Change{Left: ids(10)}}}},
		}},
		{"a namespace is entered before it is released", []step{
			{name: "comes", apply: apply(in(5, 10)), want: []what{{key(5), ids(10), 10, nil, tenant.Change{Joined: ids(10)}}}},
			{name: "settled", settle: key(5), want: []what{{key(5), ids(10), 10, nil, tenant.Change{}}}},
			{name: "goes", remove: 10, left: []tenant.Key{key(5)}, want: []what{{key(5), nil, 10, nil, tenant.Change{Left: ids(10)}}}},
			{name: "another comes", apply: apply(in(5, 20)), want: []what{{key(5), ids(20), 20, nil, tenant.Change{Joined: ids(20), Left: ids(10)}}}},
			{name: "the first is back", apply: apply(in(5, 10)), want: []what{{key(5), ids(20, 10), 20, nil, tenant.Change{Joined: ids(20, 10)}}}},
		}},
		{"one that is refused", []step{
			{name: "comes", apply: apply(in(5, 10)), want: []what{{key(5), ids(10), 10, nil, tenant.Change{Joined: ids(10)}}}},
			{name: "settled", settle: key(5), want: []what{{key(5), ids(10), 10, nil, tenant.Change{}}}},
			{name: "another comes", apply: apply(in(5, 20)), want: []what{{key(5), ids(10, 20), 10, nil, tenant.Change{Joined: ids(20)}}}},
			{name: "and is refused", remove: 20, left: []tenant.Key{key(5)}, want: []what{{key(5), ids(10), 10, nil, tenant.Change{Left: ids(20)}}}},
		}},
		{"ends of two members", []step{
			{name: "first", apply: apply(in(5, 20, veth("a", 2, 7), container.Interface{Index: 3, Kind: "macvlan"})), want: []what{
				{key(5), ids(20), 20, []container.Device{at(1, 7), at(5, 3)}, tenant.Change{Joined: ids(20), Ends: true}}}},
			{name: "second knows one more", apply: apply(in(5, 10, veth("a", 2, 7), veth("b", 4, 9))), want: []what{
				{key(5), ids(20, 10), 20, []container.Device{at(1, 7), at(5, 3), at(1, 9)}, tenant.Change{Joined: ids(20, 10), Ends: true}}}},
			{name: "settled", settle: key(5), want: []what{
				{key(5), ids(20, 10), 20, []container.Device{at(1, 7), at(5, 3), at(1, 9)}, tenant.Change{}}}},
			{name: "the order is the members'", remove: 20, left: []tenant.Key{key(5)}, want: []what{
				{key(5), ids(10), 10, []container.Device{at(1, 7), at(1, 9)}, tenant.Change{Left: ids(20), Ends: true}}}},
		}},
		{"an end is another, and back again", []step{
			{name: "comes", apply: apply(in(5, 10, veth("a", 2, 7))), want: []what{
				{key(5), ids(10), 10, []container.Device{at(1, 7)}, tenant.Change{Joined: ids(10), Ends: true}}}},
			{name: "settled", settle: key(5), want: []what{{key(5), ids(10), 10, []container.Device{at(1, 7)}, tenant.Change{}}}},
			{name: "has another name", apply: apply(in(5, 10, veth("b", 2, 7))), want: []what{
				{key(5), ids(10), 10, []container.Device{at(1, 7)}, tenant.Change{Ends: true}}}},
			{name: "is as before", apply: apply(in(5, 10, veth("a", 2, 7))), want: []what{
				{key(5), ids(10), 10, []container.Device{at(1, 7)}, tenant.Change{Ends: true}}}},
			{name: "and stays so", apply: apply(in(5, 10, veth("a", 2, 7))), want: []what{
				{key(5), ids(10), 10, []container.Device{at(1, 7)}, tenant.Change{Ends: true}}}},
		}},
		{"the host's network", []step{
			{name: "first", apply: &policy.Target{Container: container.Container{ID: 10, NetNS: 1, HostNetwork: true}}, want: []what{
				{tenant.Key{Container: 10}, ids(10), 10, nil, tenant.Change{Joined: ids(10)}}}},
			{name: "second", apply: &policy.Target{Container: container.Container{ID: 20, NetNS: 1, HostNetwork: true}}, want: []what{
				{tenant.Key{Container: 10}, ids(10), 10, nil, tenant.Change{Joined: ids(10)}},
				{tenant.Key{Container: 20}, ids(20), 20, nil, tenant.Change{Joined: ids(20)}}}},
		}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			r := tenant.New("/proc", tenant.Network)
			for _, s := range tt.steps {
				var left []*tenant.Tenant
				switch {
				case s.apply != nil:
					var own *tenant.Tenant
					var err error
					if own, left, err = r.Apply(*s.apply); err != nil {
						t.Fatalf("%s: %v", s.name, err)
					}
					if id := s.apply.Container.ID; own != r.Of(id) || own != r.At(own.Key()) {
						t.Errorf("%s: Of and At give other tenants than Apply", s.name)
					}
				case s.remove != 0:
					if left = r.Remove(s.remove); r.Of(s.remove) != nil {
						t.Errorf("%s: it is still a member", s.name)
					}
				default:
					r.Settle(r.At(s.settle))
				}
				var keys []tenant.Key
				for _, l := range left {
					keys = append(keys, l.Key())
				}
				if !slices.Equal(keys, s.left) {
					t.Errorf("%s: left %v, want %v", s.name, keys, s.left)
				}
				if got := all(r.Tenants()); !equal(got, s.want) {
					t.Errorf("%s:\ngot  %+v\nwant %+v", s.name, got, s.want)
				}
			}
		})
	}
}

// equal takes an empty list for none.
func equal(a, b []what) bool {
	same := func(x, y what) bool {
		return x.Key == y.Key && x.Owner == y.Owner && x.Change.Ends == y.Change.Ends && slices.Equal(x.Members, y.Members) && slices.Equal(x.Ends, y.Ends) &&
			slices.Equal(x.Change.Joined, y.Change.Joined) && slices.Equal(x.Change.Left, y.Change.Left)
	}
	return slices.EqualFunc(a, b, same)
}

// A container that is about to end has no network any more: until Remove, all is as it was.
func TestNoNetwork(t *testing.T) {
	r := tenant.New("/proc", tenant.Network)
	own, _, err := r.Apply(in(5, 10, veth("a", 2, 7)))
	if err != nil {
		t.Fatal(err)
	}
	r.Settle(own)
	before := all(r.Tenants())
	if _, _, err := r.Apply(in(0, 10)); !errors.Is(err, tenant.ErrNoNetwork) {
		t.Errorf("error %v", err)
	}
	if got := all(r.Tenants()); !equal(got, before) || r.Of(10) != own {
		t.Errorf("got %+v, want %+v", got, before)
	}
}

// What is returned is the caller's: changing it changes no tenant.
func TestReturnedListsAreCopies(t *testing.T) {
	r := tenant.New("/proc", tenant.Network)
	own, _, err := r.Apply(in(5, 10, veth("a", 2, 7)))
	if err != nil {
		t.Fatal(err)
	}
	before := describe(own)
	own.Members()[0] = policy.Target{}
	own.Ends()[0] = container.End{}
	own.Change().Joined[0] = 99
	if got := describe(own); !reflect.DeepEqual(got, before) {
		t.Errorf("got %+v, want %+v", got, before)
	}
}

// Payers of CPU time are cgroups, and a container that moves to another is another's.
func TestKeyByCgroup(t *testing.T) {
	groups := map[string]container.ID{"/pod": 100, "/pod/a": 101, "/b": 102}
	r := tenant.New("/proc", func(c container.Container) (tenant.Key, error) {
		dir, err := c.TenantGroup()
		return tenant.Key{Container: groups[dir]}, err
	})
	one := policy.Target{Container: container.Container{ID: 1, NetNS: 5, PodCgroup: true, Cgroup: container.Cgroup{CPU: "/pod/a"}}}
	two := policy.Target{Container: container.Container{ID: 2, NetNS: 5, Cgroup: container.Cgroup{CPU: "/b"}}}
	for _, c := range []policy.Target{one, two} {
		if _, _, err := r.Apply(c); err != nil {
			t.Fatal(err)
		}
	}
	if r.Of(1) == r.Of(2) || r.Of(1).Key().Container != 100 {
		t.Errorf("tenants %+v", all(r.Tenants()))
	}
	two.Container.Cgroup.CPU = "/pod"
	own, left, err := r.Apply(two)
	if err != nil || own != r.Of(1) || len(left) != 1 || left[0].Key().Container != 102 {
		t.Errorf("in %+v, left %+v, %v", describe(own), all(left), err)
	}
	if _, _, err := r.Apply(policy.Target{Container: container.Container{ID: 3}}); err == nil {
		t.Error("no error for one whose cgroup is not known")
	}
}
