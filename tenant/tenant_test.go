package tenant_test

import (
	"reflect"
	"slices"
	"testing"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/internal/testkit"
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

// equal takes an empty list for none.
func equal(a, b []what) bool {
	same := func(x, y what) bool {
		return x.Key == y.Key && x.Owner == y.Owner && slices.Equal(x.Members, y.Members) && slices.Equal(x.Ends, y.Ends) &&
			slices.Equal(x.Change.Joined, y.Change.Joined) && slices.Equal(x.Change.Left, y.Change.Left)
	}
	return slices.EqualFunc(a, b, same)
}

// What is returned is the caller's: changing it changes no tenant.
func TestReturnedListsAreCopies(t *testing.T) {
	r := tenant.New("/proc", tenant.Network)
	own, _, err := r.Apply(in(5, 10, veth("a", 2, 7)))
	testkit.Must(t, err)
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

func overlay(t policy.Target) (on, says bool) {
	if t.Settings.Overlay == nil {
		return false, false
	}
	return *t.Settings.Overlay, true
}

// members are containers 1, 2 ...; of each letter: y says on, n off, - nothing.
func members(says string) (list []policy.Target) {
	for i, s := range says {
		m := in(5, container.ID(i+1))
		if on := s == 'y'; s != '-' {
			m.Settings.Overlay = &on
		}
		list = append(list, m)
	}
	return list
}

// AgreeFunc compares by what it is given: all that ask are to ask for the same.
func TestAgreeFunc(t *testing.T) {
	list := []policy.Target{in(5, 1), in(5, 2), in(5, 3)}
	high, low := 1, 1
	list[0].Settings.Egress, list[1].Settings.Egress = policy.Net{Rate: 5, Priority: &high}, policy.Net{Rate: 5, Priority: &low}
	due := func(t policy.Target) (policy.Net, bool) {
		return t.Settings.Egress, t.Settings.Egress != policy.Net{}
	}
	same := func(a, b policy.Net) bool { return a.Rate == b.Rate && *a.Priority == *b.Priority }
	if a := tenant.AgreeFunc(list, due, same); a.Disagree() || a.Value.Rate != 5 {
		t.Errorf("traffic: %+v", a)
	}
	low = 2
	if a := tenant.AgreeFunc(list, due, same); !a.Disagree() || a.Value.Rate != 0 {
		t.Errorf("traffic: %+v", a)
	} else if other, _ := a.Against(1); other.ID != 2 {
		t.Errorf("traffic: against 1 is %v", other.ID)
	}
}
