package identity

import (
	"errors"
	"maps"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/cilium/ebpf"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/internal/testkit"
)

func TestMain(m *testing.M) { testkit.Main(m) }

var must = testkit.Must

// of makes entries with slots counted from 1.
func of(members ...Member) (list []*entry) {
	for n, m := range members {
		list = append(list, &entry{Member: m, nth: n, slot: Slot(1 + n)})
	}
	return list
}

func owner(slot, flags uint16) identityFlOwner { return identityFlOwner{Tenant: slot, Flags: flags} }

// known returns the owners of all devices, and of all cgroups for which there is room.
func known(self uint64, room int, told ...*entry) (map[identityFlDevice]identityFlOwner, map[uint64]uint32) {
	x, c := newIndex(self), cgroups{stated: newStated[uint64, uint32](), room: room}
	for _, e := range told {
		x.add(e)
		c.add(e)
	}
	return x.devices.hold(x.device), c.stated.hold(c.wanted())
}

// hold records what the BPF map would hold, as bring does.
func (s *stated[K, V]) hold(want func(K) (V, bool)) map[K]V {
	for k := range s.stale {
		delete(s.held, k)
		if v, ok := want(k); ok {
			s.held[k] = v
		}
	}
	clear(s.stale)
	return s.held
}

func TestWanted(t *testing.T) {
	const host, a, b, c, d = 100, 200, 201, 202, 203
	told := of(
		Member{Cgroups: []uint64{10, 11}, Devices: []Device{{host, 5, true, true}, {a, 2, false, false}}},
		// A pod's second container names the same devices, later.
		Member{Cgroups: []uint64{11, 12}, Devices: []Device{{host, 5, true, true}, {a, 2, false, false}, {a, 3, false, false}}},
		// No member owns a namespace with host ends, nor the host's own.
		Member{Devices: []Device{{host, 9, false, false}, {1, 4, false, false}}},
		Member{Devices: []Device{{b, 2, false, false}, {b, 0, false, false}, {b, -1, false, false}, {0, 1, false, false}, {1 << 32, 1, true, true}}},
		// A container's own namespace is not the host's either, even if it is mounted where the host's are.
		Member{Devices: []Device{{c, 7, true, false}}},
		Member{Devices: []Device{{d, 7, true, true}}},
		Member{Devices: []Device{{d, 2, false, false}}},
	)
	told[6].homes = []uint64{d}
	devices, cgroups := known(1, 100, told...)
	side := identityFlOwner{Flags: flagHostSide}
	wantDevices := map[identityFlDevice]identityFlOwner{
		at(host, 5): owner(1, flagHostEnd|flagHostSide), at(host, 0): side, at(1, 0): side,
		at(a, 2): owner(1, 0), at(a, 3): owner(2, 0), at(a, 0): owner(1, 0), at(host, 9): owner(3, 0), at(1, 4): owner(3, 0),
		at(b, 2): owner(4, 0), at(b, 0): owner(4, 0), at(c, 7): owner(5, flagHostEnd),
		at(d, 7): owner(6, flagHostEnd), at(d, 2): owner(7, 0), at(d, 0): owner(7, 0),
	}
	if !maps.Equal(devices, wantDevices) {
		t.Errorf("devices %v\nwant %v", devices, wantDevices)
	}
	// A container below another's cgroup owns its cgroups.
	testkit.Same(t, "cgroups", map[uint64]uint32{10: 1, 11: 2, 12: 2}, cgroups)
}

// A container with many cgroups does not displace others.
func TestWantedRoom(t *testing.T) {
	told := of(Member{Cgroups: []uint64{10, 11, 12, 13, 14, 15, 16}}, Member{Cgroups: []uint64{20, 21}}, Member{Cgroups: []uint64{30}})
	_, cgroups := known(0, 6, told...)
	want := map[uint64]uint32{10: 1, 20: 2, 30: 3, 11: 1, 21: 2, 12: 1}
	testkit.Same(t, "with room for 6", want, cgroups)
}

// The index depends only on the present entries, whatever came and went before.
func TestIndexRandom(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	const self, room = 1, 12
	random := func(nth int) *entry {
		e := &entry{Member: Member{Rank: r.IntN(3)}, nth: nth, slot: Slot(r.IntN(3))}
		for range r.IntN(4) {
			e.Devices = append(e.Devices, Device{Netns: uint64(r.IntN(4)), Ifindex: r.IntN(3), HostEnd: r.IntN(2) == 0, Trusted: r.IntN(2) == 0})
			e.Cgroups = append(e.Cgroups, uint64(r.IntN(20)))
		}
		if r.IntN(2) == 0 {
			e.homes = []uint64{uint64(r.IntN(4))}
		}
		return e
	}
	x, c := newIndex(self), cgroups{stated: newStated[uint64, uint32](), room: room}
	var told []*entry
	for nth := range 2000 {
		if n := len(told); n > 0 && (n > 12 || r.IntN(2) == 0) {
			gone := r.IntN(n)
			x.remove(told[gone])
			c.remove(told[gone])
			told = slices.Delete(told, gone, gone+1)
		} else {
			told = append(told, random(nth))
			x.add(told[len(told)-1])
			c.add(told[len(told)-1])
		}
		devices, cgroups := x.devices.hold(x.device), c.stated.hold(c.wanted())
		wantDevices, wantCgroups := known(self, room, told...)
		if !maps.Equal(devices, wantDevices) || !maps.Equal(cgroups, wantCgroups) {
			t.Fatalf("after %d changes: %v, %v\nwant %v, %v", nth, devices, cgroups, wantDevices, wantCgroups)
		}
	}
}

// An added or removed entry makes only its own devices and cgroups stale, however many other
// entries there are.
func TestIndexLooksAtChanges(t *testing.T) {
	const self = 1
	x, c := newIndex(self), cgroups{stated: newStated[uint64, uint32](), room: 10000}
	for n := range 1000 {
		netns := uint64(100 + n)
		e := &entry{nth: n, homes: []uint64{netns}, Member: Member{Cgroups: []uint64{uint64(n)}, Devices: []Device{
			{Netns: netns, Ifindex: 2}, {Netns: self, Ifindex: 10 + n, HostEnd: true, Trusted: true},
		}}}
		x.add(e)
		c.add(e)
		// Its device, the rest of its namespace, the host end, and the host's namespace.
		if len(x.devices.stale) != 4 || len(c.stated.stale) != 1 {
			t.Fatalf("container %d: %d devices and %d cgroups are looked at", n, len(x.devices.stale), len(c.stated.stale))
		}
		x.devices.hold(x.device)
		c.stated.hold(c.wanted())
	}
}

// says fails t unless a map has this value for a key. The zero value also stands for no entry.
func says[K, V comparable](t *testing.T, when string, m *ebpf.Map, key K, want V) {
	t.Helper()
	var got V
	if err := m.Lookup(key, &got); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
		t.Fatal(err)
	}
	if got != want {
		t.Errorf("%s: %v says %+v of %v, want %+v", when, m, got, key, want)
	}
}

// Several features register one container, and each may forget its registration. The others stay, and
// so does the slot until the last one goes.
func TestTell(t *testing.T) {
	testkit.NeedRoot(t)
	i := testkit.Opened(Open("/proc"))(t)
	const netns, index = 4026531000, 2
	pod := Tenant{NetNS: netns}
	tell := func(by string, m Member) Slot {
		t.Helper()
		s, err := i.Tell(by, m)
		must(t, err)
		return s
	}
	want := func(when string, device, cgroup Slot) {
		t.Helper()
		says(t, when, i.maps.FlDevices, identityFlDevice{Netns: netns, Ifindex: index}, identityFlOwner{Tenant: uint16(device)})
		says(t, when, i.maps.FlCgroups, uint64(7), uint32(cgroup))
	}
	epoch := func() (n uint32) {
		t.Helper()
		must(t, i.epoch.Get(&n))
		return n
	}
	before := epoch()
	devices := []Device{{Netns: netns, Ifindex: index}}
	slot := tell("accounts", Member{ID: 7, Tenant: pod, Cgroups: []uint64{7}, Devices: devices})
	want("accounts", slot, slot)
	now := epoch()
	if now == before {
		t.Error("what programs keep of the maps is not old after a change")
	}
	if must(t, i.Changed()); epoch() == now {
		t.Error("what programs keep of the maps is not old after a feature says so")
	}
	testkit.Same(t, "traffic's slot", slot, tell("traffic", Member{ID: 7, Tenant: pod, Cgroups: []uint64{7}}))
	if s := tell("latency", Member{ID: 8, Tenant: pod, Devices: devices}); s != slot {
		t.Errorf("latency's slot for the pod is %d, that of accounts %d", s, slot)
	}
	want("all", slot, slot)
	must(t, i.Forget("accounts", 7))
	want("without accounts", slot, slot)
	must(t, i.Forget("latency", 8))
	must(t, i.Forget("latency", 8))
	want("traffic alone", Nobody, slot)
	testkit.Same(t, "the slot of a tenant that one feature still knows", slot, i.Lookup(pod))
	must(t, i.Forget("traffic", 7))
	want("nobody", Nobody, Nobody)
	if s := tell("accounts", Member{ID: 7, Tenant: pod}); s == slot {
		t.Errorf("slot %d is given out at once again", s)
	}
}

// Containers of a pod have one slot, and a feature can still distinguish their cgroups.
func TestCgroups(t *testing.T) {
	testkit.NeedRoot(t)
	m := testkit.Opened(ebpf.NewMap(&ebpf.MapSpec{Type: ebpf.Hash, KeySize: 8, ValueSize: 4, MaxEntries: 3}))(t)
	i := testkit.Opened(Open("/proc"))(t)
	c := i.Cgroups(m, "accounts of cgroups")
	want := func(when string, want ...uint32) {
		t.Helper()
		for id, n := range want {
			says(t, when, m, uint64(10+id), n)
		}
	}
	must(t, c.Tell(Member{ID: 1, Cgroups: []uint64{10}}, 5))
	before := i.change
	must(t, c.Tell(Member{ID: 2, Cgroups: []uint64{11, 12}}, 6))
	if i.change == before {
		t.Error("what programs keep of the map is not old after a change")
	}
	before = i.change
	must(t, c.Tell(Member{ID: 2, Cgroups: []uint64{11, 12}}, 6))
	testkit.Same(t, "saying the same again has programs look again", before, i.change)
	want("both", 5, 6, 6)
	must(t, c.Tell(Member{ID: 1, Cgroups: []uint64{10, 12}}, 7))
	want("again", 7, 6, 7)
	if err := c.Tell(Member{ID: 3, Cgroups: []uint64{13}}, 8); err != nil { // its first goes before another's second
		t.Error(err)
	}
	want("no room for all", 7, 6, 0, 8)
	must(t, c.Forget(1))
	must(t, c.Forget(1))
	want("one has ended", 0, 6, 6, 8)
}

// A container that moves to another network gets the slot of the tenant there.
func TestTellAnotherTenant(t *testing.T) {
	testkit.NeedRoot(t)
	i := testkit.Opened(Open("/proc"))(t)
	first, err := i.Tell("a", Member{ID: 1, Tenant: Tenant{NetNS: 10}})
	must(t, err)
	second, err := i.Tell("a", Member{ID: 1, Tenant: Tenant{NetNS: 20}})
	must(t, err)
	unknown, err := i.Tell("a", Member{ID: container.ID(2)})
	must(t, err)
	if first == second || second == Nobody || unknown != Nobody || i.Lookup(Tenant{NetNS: 10}) != Nobody {
		t.Errorf("slots %d, %d, %d; the one that was left is known as %d", first, second, unknown, i.Lookup(Tenant{NetNS: 10}))
	}
}

// A namespace that a container has left does not become the host's while the container exists.
func TestHome(t *testing.T) {
	testkit.NeedRoot(t)
	i := testkit.Opened(Open("/proc"))(t)
	for _, c := range []container.Container{{ID: 1, NetNS: 40}, {ID: 1, NetNS: 41}, {ID: 2, NetNS: 41}, {ID: 3, NetNS: 10, HostNetwork: true}} {
		_, err := i.Tell("a", Member{ID: c.ID, Tenant: c.TenantKey()})
		must(t, err)
	}
	check := func(when string, want ...uint64) {
		t.Helper()
		for _, netns := range []uint64{0, 10, 40, 41} {
			if got := i.Home(netns); got != slices.Contains(want, netns) {
				t.Errorf("%s: %d is a container's: %v", when, netns, got)
			}
		}
	}
	check("all run", 40, 41)
	must(t, i.Forget("a", 1))
	check("one has ended", 41)
	must(t, i.Forget("a", 2))
	check("both have ended")
}
