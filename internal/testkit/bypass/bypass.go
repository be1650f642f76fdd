// Package bypass has programs for tests. They redirect packets past the stack and report them by
// bpf/fate.h, as a feature with a shorter path does.
package bypass

import (
	"github.com/cilium/ebpf"

	"github.com/fairlead-project/fairlead/kernel/bpf"
	"github.com/fairlead-project/fairlead/tenant/identity"
)

//go:generate go tool bpf2go -target bpfel -cc $BPF2GO_CC -strip $BPF2GO_STRIP -no-global-types bypass bypass.bpf.c -- -O2 -g -Wall -Werror -I../../../bpf -idirafter /usr/include/x86_64-linux-gnu

// Unpack returns a loader of a program for the ingress hook of an uplink. The program hands packets
// that arrive in VXLAN over to a container, by the host end of its veth, and reports them as a
// tenant's; for Nobody it reports nothing.
func Unpack(shared bpf.Maps, hostEnd int, tenant identity.Slot) func() (*ebpf.Program, error) {
	return load(shared, bypassProgFlUnpack, bpf.Vars{bypassVarFlTo: uint32(hostEnd), bypassVarFlTenant: uint16(tenant)})
}

// Send returns a loader of a program for the ingress hook of a container's host end. The program
// sends the container's packets by an uplink.
func Send(shared bpf.Maps, uplink int) func() (*ebpf.Program, error) {
	return load(shared, bypassProgFlSend, bpf.Vars{bypassVarFlTo: uint32(uplink)})
}

func load(shared bpf.Maps, name string, vars bpf.Vars) func() (*ebpf.Program, error) {
	return func() (*ebpf.Program, error) {
		o, err := bpf.Open("bypass", loadBypass, nil, shared)
		if err != nil {
			return nil, err
		}
		defer o.Close() // the program holds its maps
		return o.Program(name, vars)
	}
}
