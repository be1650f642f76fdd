package container_test

import (
	"reflect"
	"testing"

	"github.com/fairlead-project/fairlead/container"
)

func TestEnds(t *testing.T) {
	eth0 := container.Interface{Name: "eth0", Kind: "veth", Index: 2, Host: container.HostEnd{
		NetNS: 100, NSPath: "/run/netns/x", Name: "veth1", Index: 7, Trusted: true,
	}}
	lost := container.Interface{Name: "eth1", Kind: "veth", Index: 3}
	got := container.Container{NetNS: 200, PID: 42, Interfaces: []container.Interface{eth0, lost}}.Ends("/proc")
	want := []container.End{
		{Device: container.Device{NetNS: 100, Index: 7}, Name: "veth1", Path: "/run/netns/x", Host: true, Trusted: true, Inside: eth0},
		{Device: container.Device{NetNS: 200, Index: 3}, Name: "eth1", Path: "/proc/42/ns/net", Inside: lost},
	}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("got %+v\nwant %+v", got, want)
	}
}
