package latency

import (
	"fmt"
	"testing"
	"time"

	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/tenant"
)

// The packet work of neighbours covers exactly the CPUs that handle the container's packets.
func TestMeanwhile(t *testing.T) {
	const s = time.Second
	before := work{1: {5 * s, 0, 0}, 2: {9 * s, 0, 0}, 9: {3 * s, 3 * s, 3 * s}}
	now := work{1: {6 * s, 0, time.Millisecond}, 2: {13 * s, 8 * s, 0}, 3: {0, 9 * s, 9 * s}, 4: {2 * s, 0, 0}, 0: {s, 0, 0}, 9: {s, s, s}}
	got := now.since(before).meanwhile([]container.ID{7, 1, 4}, 10*s, func(id container.ID) string { return id.String() })
	want := &api.LatencyMeanwhile{CPUs: []int{0}, Own: 0.1, By: []api.LatencyNeighbour{
		{Container: 2, Name: "2", Share: 0.4}, {Container: 0, Name: "0", Share: 0.1}, {Container: 9, Name: "9", Share: 0.1},
	}}
	testkit.Same(t, "meanwhile", want, got)
	if got := now.meanwhile([]container.ID{8}, 10*s, nil); got != nil {
		t.Errorf("of one that nobody knows: %+v", got)
	}
	if got := work(nil).since(before).meanwhile([]container.ID{1}, s, nil); got != nil {
		t.Errorf("where nobody knows: %+v", got)
	}
	testkit.Same(t, "since changes what it is given", []time.Duration{5 * s, 0, 0}, before[1])
}

// The gaps of a path are exactly the stages that are not measured there.
func TestGaps(t *testing.T) {
	bridged := container.Container{Cgroup: container.Cgroup{V2: "/x"}, Interfaces: []container.Interface{{Kind: "veth", Host: container.HostEnd{Index: 7}}}}
	lost, host, mac := bridged, container.Container{HostNetwork: true}, bridged
	lost.Interfaces = []container.Interface{{Kind: "veth"}}
	mac.Interfaces = []container.Interface{{Kind: "macvlan"}}
	for _, tt := range []struct {
		name    string
		of      container.Container
		uplinks bool
		want    [directions][]string
	}{
		{"bridge", bridged, true, [directions][]string{}},
		{"host end unknown", lost, true, [directions][]string{{"deliver"}, {"qdisc", "deliver"}}},
		{"host, no cgroup", host, true, [directions][]string{{"device", "deliver", "forward", "added", "local"}, {"forward", "qdisc", "deliver", "added", "local", "socket", "stack"}}},
		{"macvlan", mac, true, [directions][]string{{"deliver"}, {"forward", "qdisc", "deliver", "added"}}},
		{"no uplink", bridged, false, [directions][]string{{"device", "deliver", "forward", "qdisc", "added", "stack"}, {"gro", "forward", "qdisc", "deliver", "socket", "added", "stack"}}},
	} {
		for d := range directions {
			var got []string
			for _, g := range gaps(tt.of, d, tt.uplinks) {
				got = append(got, g.Stages...)
				if g.Why == "" {
					t.Errorf("%s: no reason", tt.name)
				}
			}
			testkit.Same(t, fmt.Sprintf("%s, %v", tt.name, d), tt.want[d], got)
		}
	}
}

// A container that policy does not measure itself has the figures of the measured containers that
// share its network, and no others.
func TestNetworkOf(t *testing.T) {
	r := Reading{Tenants: []Tenant{
		{Container: 2, Members: []container.ID{2, 8}, key: tenant.Key{NetNS: 70}},
		{Container: 3, Members: []container.ID{3}, key: tenant.Key{NetNS: 71}},
	}}
	for _, c := range []struct {
		of   container.Container
		want []container.ID
	}{
		{container.Container{ID: 1, NetNS: 70}, []container.ID{2}},
		{container.Container{ID: 8, NetNS: 70}, []container.ID{8}}, // a member: under its own name
		{container.Container{ID: 4, NetNS: 72}, nil},
		{container.Container{ID: 5}, nil}, // has ended
	} {
		var got []container.ID
		for _, x := range networkOf(r, c.of) {
			got = append(got, x.Container)
		}
		testkit.Same(t, fmt.Sprintf("container %d", c.of.ID), c.want, got)
	}
	testkit.Same(t, "the reading was changed", 2, len(r.Tenants))
}

// An interval of a pod covers all its packets in that interval, even if one of its containers has ended
// meanwhile.
func TestSincePod(t *testing.T) {
	pod := func(members []container.ID, seen uint64) Reading {
		all := new(tallies)
		all[Egress][UDP].Seen = seen
		return Reading{Tenants: []Tenant{{Container: members[0], Members: members, key: tenant.Key{NetNS: 70}, tallies: all}}}
	}
	got := pod([]container.ID{8}, 1010).Since(pod([]container.ID{2, 8}, 1000))
	testkit.Same(t, "packets in the interval", uint64(10), got.Tenants[0].Of(Egress, UDP).Seen)
}
