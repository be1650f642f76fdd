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

// Aside creates one more container, which is not in Boxes and has its own wire to the outside: no
// bridge, no tunnel, no NIC, no queue. It shares only the CPUs with the others, as they do among
// themselves, so its packets measure the machine's own delays. at returns the address at which the
// container finds a receiver that runs in Outside at a port.
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
