package uplink

import (
	"testing"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/kernel/netdev"
)

func TestIsEntry(t *testing.T) {
	for _, tt := range []struct {
		name string
		l    netdev.Link
		port bool // of a bridge that reaches the container
		want bool
	}{
		{"hardware", netdev.Link{Name: "eth0", Kind: "device", Up: true}, false, true},
		{"hardware that is down", netdev.Link{Name: "eth0", Kind: "device"}, false, false},
		{"a tunnel with an address", netdev.Link{Name: "wg0", Kind: "wireguard", Up: true, Addrs: []string{"10.0.0.1/24"}}, false, true},
		{"another container's veth", netdev.Link{Name: "veth1", Kind: "veth", Up: true}, false, false},
		{"a port of the container's bridge", netdev.Link{Name: "vxlan0", Kind: "vxlan", Up: true}, true, true},
		{"loopback", netdev.Link{Name: "lo", Kind: "device", Up: true, Addrs: []string{"127.0.0.1/8"}}, false, false},
	} {
		if got := isEntry(tt.l, tt.port); got != tt.want {
			t.Errorf("%s: %v, want %v", tt.name, got, tt.want)
		}
	}
}

// A namespace that a container has left is still none of the host's, as long as the
// container is there.
func TestContainerNetNS(t *testing.T) {
	f := NewFinder("", nil)
	f.Saw(container.Container{ID: 1, NetNS: 40})
	f.Saw(container.Container{ID: 1, NetNS: 41})
	f.Saw(container.Container{ID: 2, NetNS: 41})
	f.Saw(container.Container{ID: 3, NetNS: 10, HostNetwork: true})
	check := func(when string, want ...uint64) {
		t.Helper()
		for _, netns := range []uint64{0, 10, 40, 41} {
			is := false
			for _, w := range want {
				is = is || w == netns
			}
			if got := f.containerNetNS(netns); got != is {
				t.Errorf("%s: %d is a container's: %v", when, netns, got)
			}
		}
	}
	check("all run", 40, 41)
	f.Forget(1)
	check("one has ended", 41)
	f.Forget(2)
	check("both have ended")
}
