package netcpu

import (
	"errors"
	"fmt"
	"io/fs"
	"slices"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/feature/netcpu/account"
	"github.com/fairlead-project/fairlead/kernel/cgroup"
	"github.com/fairlead-project/fairlead/policy"
)

// cgroupsMost bounds how many cgroups a container can have its tasks in and
// still be known as the one that was robbed.
const cgroupsMost = 256

// ErrNoAccounts is returned by Read, wrapped, where the kernel cannot keep
// accounts.
var ErrNoAccounts = errors.New("network CPU time is not accounted for")

// Read returns the accounts of all containers since New: whose packets cost how
// much, and whose time that was. Errors: ErrNoAccounts, with the reason.
func (n *Netcpu) Read() (account.Reading, error) {
	if n.meter == nil {
		return account.Reading{}, fmt.Errorf("netcpu: %w: %w", ErrNoAccounts, n.noMeter)
	}
	return n.meter.Read()
}

// rank orders the modes of containers that share a network namespace: the packets
// are the business of the one with the highest.
func rank(mode policy.NetCPU) int {
	return slices.Index([]policy.NetCPU{policy.NetCPUObserve, policy.NetCPUAuto, policy.NetCPUCharge, policy.NetCPUIsolate}, mode)
}

// observe begins to charge a container for its packets, whatever its mode.
func (n *Netcpu) observe(c container.Container, mode policy.NetCPU) error {
	if n.meter == nil {
		return nil // Read says so
	}
	n.used.begin(c, n.Since)
	t := account.Tenant{ID: c.ID, HostNetwork: c.HostNetwork, Rank: max(0, rank(mode))}
	for _, dev := range c.Interfaces {
		t.Devices = append(t.Devices, account.Device{Netns: c.NetNS, Ifindex: dev.Index})
		if dev.Host.NetNS != 0 {
			t.Devices = append(t.Devices, account.Device{Netns: dev.Host.NetNS, Ifindex: dev.Host.Index, HostEnd: true, Trusted: dev.Host.Trusted})
		}
	}
	ids, err := cgroup.IDs(c.Cgroup.V2, cgroupsMost)
	if errors.Is(err, cgroup.ErrMany) || errors.Is(err, fs.ErrNotExist) {
		err = nil // the rest counts for the host's own; or the container is about to be let go of
	}
	t.Cgroups = ids
	if err = errors.Join(err, n.meter.Watch(t)); err != nil {
		return fmt.Errorf("netcpu observe: %w", err)
	}
	return nil
}

// forget ends it.
func (n *Netcpu) forget(id container.ID) error {
	if n.meter == nil {
		return nil
	}
	return n.meter.Forget(id)
}
