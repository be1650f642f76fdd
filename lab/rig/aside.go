package rig

import (
	"errors"
	"fmt"
	"net/netip"

	"github.com/fairlead-project/fairlead/lab/sandbox"
)

const (
	asideDevice = "flaside" // in Outside
	asideAddr   = "10.112.0.1"
	asideBox    = "10.112.0.2"
)

// Aside makes one more container, which is none of Boxes and has a wire of its
// own to the outside: no bridge, no tunnel, no NIC, no queue. It shares the CPUs
// with all others, as they do among themselves, and nothing else; so what its
// packets meet with is the machine's. It gives where the container finds
// receivers that run in Outside at a port.
func (r *Rig) Aside() (_ *sandbox.Box, at func(port int) string, err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("make a container aside: %w", err)
		}
	}()
	b, err := r.create(sandbox.Spec{Name: r.id + "aside", CPU: Container{}.cpu()})
	if err != nil {
		return nil, nil, err
	}
	const boxMAC, wireMAC = "02:f1:00:01:00:02", "02:f1:00:01:00:01"
	if err := sandbox.Wire(
		sandbox.End{Box: r.Outside, Name: asideDevice, Addr: prefix(asideAddr), MAC: wireMAC},
		sandbox.End{Box: b, Name: "eth0", Addr: prefix(asideBox), MAC: boxMAC}); err != nil {
		return nil, nil, err
	}
	cpu := func(cpu int) func(int) string { return func(int) string { return fmt.Sprintf("%x", 1<<cpu) } }
	return b, func(port int) string { return fmt.Sprintf("%s:%d", asideAddr, port) }, errors.Join(
		r.Outside.Neighbour(asideDevice, netip.MustParseAddr(asideBox), boxMAC),
		b.Neighbour("eth0", netip.MustParseAddr(asideAddr), wireMAC),
		b.SetQueues("eth0", "rx", "rps_cpus", cpu(SharedCPU)),
		r.Outside.SetQueues(asideDevice, "rx", "rps_cpus", cpu(SenderCPU)))
}
