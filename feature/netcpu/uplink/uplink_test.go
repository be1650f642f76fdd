package uplink

import (
	"testing"

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
