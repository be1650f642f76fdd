package account

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"slices"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/hook"
	"github.com/fairlead-project/fairlead/kernel/cgroup"
	"github.com/fairlead-project/fairlead/tenant/identity"
)

// attach attaches the programs that an account needs, at the host ends of its veths and
// at its sockets, and detaches the others.
func (m *Meter) attach(acc *account) error {
	var errs []error
	stamped := make(map[container.Device]bool)
	holds := m.cfg.Ends != nil && m.holder(acc.member.Tenant) == acc // stamps the packets of shared devices
	for _, d := range acc.member.Devices {
		if !d.HostEnd || !holds {
			continue
		}
		at := hook.Place{
			Device: container.Device{NetNS: d.Netns, Index: d.Ifindex},
			Stage:  hook.Stamp, Name: "stamp_" + acc.member.ID.String(), Owner: m.cfg.Owner,
		}
		stamped[at.Device] = true
		err := acc.stamps.Put(m.cfg.Ends, at, func() (*ebpf.Program, error) { return m.load(accountProgFlStamp, acc.slot) })
		if err != nil {
			errs = append(errs, fmt.Errorf("stamp what device %d in netns %d receives: %w", d.Ifindex, d.Netns, err))
		}
	}
	errs = append(errs, acc.stamps.Drop(func(d container.Device, _ bool, _ string) bool { return !stamped[d] }))
	// A packet counts by its stamp only if the account stamps packets.
	errs = append(errs, m.maps.FlUsed.Put(acc.slot, uint32(min(acc.stamps.Len(), 1))))
	if need := bySocket(acc.member); need != (acc.socket != nil) {
		errs = append(errs, m.watchSockets(acc, need))
	}
	return errors.Join(errs...)
}

// attachAll calls attach for every account of a tenant with a changed member: its
// holder may be another one now.
func (m *Meter) attachAll(changed ...identity.Member) error {
	var errs []error
	for _, acc := range m.slots {
		if acc == nil {
			continue
		}
		if slices.ContainsFunc(changed, func(c identity.Member) bool { return c.ID == acc.member.ID || shares(c, acc.member) }) {
			errs = append(errs, m.attach(acc))
		}
	}
	return errors.Join(errs...)
}

// shares reports whether two containers are one tenant.
func shares(a, b identity.Member) bool {
	return a.Tenant != (identity.Tenant{}) && a.Tenant == b.Tenant
}

// bySocket reports whether only the socket identifies some of a container's packets,
// because they do not pass a veth.
func bySocket(t identity.Member) bool {
	for _, d := range t.Devices {
		if d.HostEnd {
			return t.HostNetwork
		}
	}
	return t.HostNetwork || len(t.Devices) > 0
}

// watchSockets attaches the program to the sockets of a container, or detaches it.
func (m *Meter) watchSockets(acc *account, need bool) error {
	if !need {
		err := acc.socket.Close()
		acc.socket = nil
		return err
	}
	p, err := m.load("fl_reached", acc.slot)
	if err != nil {
		return fmt.Errorf("tell packets by socket: %w", err)
	}
	defer p.Close()
	dir, err := m.openCgroup(acc.member.ID)
	if err != nil {
		return fmt.Errorf("tell packets by socket: %w", err)
	}
	defer dir.Close()
	acc.socket, err = link.AttachRawLink(link.RawLinkOptions{
		Target: int(dir.Fd()), Program: p, Attach: ebpf.AttachCGroupInetIngress,
	})
	if err != nil {
		return fmt.Errorf("tell packets by socket: %w", err)
	}
	return nil
}

// openCgroup opens a container's cgroup v2 directory by its id, which is also its file
// handle.
func (m *Meter) openCgroup(id container.ID) (*os.File, error) {
	layout, err := cgroup.Detect(m.cfg.Proc, m.cfg.Cgroup)
	if err != nil {
		return nil, err
	}
	root, err := os.Open(layout.V2)
	if err != nil {
		return nil, err
	}
	defer root.Close()
	const kernfs = 0xfe // FILEID_KERNFS, include/linux/exportfs.h
	handle := unix.NewFileHandle(kernfs, binary.NativeEndian.AppendUint64(nil, uint64(id)))
	fd, err := unix.OpenByHandleAt(int(root.Fd()), handle, unix.O_RDONLY|unix.O_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("open cgroup %v: %w", id, err)
	}
	return os.NewFile(uintptr(fd), "cgroup"), nil
}
