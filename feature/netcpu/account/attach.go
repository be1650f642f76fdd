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
	"github.com/fairlead-project/fairlead/kernel/bpf"
	"github.com/fairlead-project/fairlead/kernel/cgroup"
	"github.com/fairlead-project/fairlead/tenant/identity"
)

// attach attaches the programs that an account needs, at the host ends of its veths and at
// its sockets, and detaches others. holds says that the account pays for its tenant's packets.
func (m *Meter) attach(acc *account, holds bool) error {
	var errs []error
	stamped := make(map[container.Device]bool)
	stamps := holds && m.cfg.Ends != nil && m.stamping
	for _, d := range acc.member.Devices {
		if !d.HostEnd || !stamps {
			continue
		}
		at := hook.Place{
			Device: container.Device{NetNS: d.Netns, Index: d.Ifindex},
			Stage:  hook.Stamp, Name: "stamp_" + acc.member.ID.String(), Owner: m.cfg.Owner,
		}
		stamped[at.Device] = true
		err := acc.stamps.PutCopy(m.cfg.Ends, at, func() (*bpf.Copy, error) { return m.stampOf(acc) })
		if err != nil {
			errs = append(errs, fmt.Errorf("stamp what device %d in netns %d receives: %w", d.Ifindex, d.Netns, err))
		}
	}
	errs = append(errs, acc.stamps.Drop(func(d container.Device, _ bool, _ string) bool { return !stamped[d] }))
	// Stamps count only while the account stamps packets.
	slot := acc.slot
	if acc.stamps.Len() == 0 {
		slot = 0
	}
	errs = append(errs, m.maps.FlStamps.Put(uint32(acc.number), slot))
	errs = append(errs, m.watchSockets(acc, bySocket(acc.member)))
	return errors.Join(errs...)
}

// attached reports whether all programs are attached.
func (m *Meter) attached() bool { return m.windows == nil || m.windows.phase >= full }

// stamp switches the stamping of packets on or off.
func (m *Meter) stamp(yes bool) error {
	if m.stamping == yes {
		return nil
	}
	m.stamping = yes
	return m.reattach(nil)
}

// reattach calls attach for every account of a tenant with a changed member, because its
// holder may have changed. With nil it calls attach for every account.
func (m *Meter) reattach(changed []identity.Member) error {
	var errs []error
	holders := m.holders()
	for _, acc := range m.slots {
		of := func(c identity.Member) bool { return c.ID == acc.member.ID || shares(c, acc.member) }
		if acc != nil && (changed == nil || slices.ContainsFunc(changed, of)) {
			errs = append(errs, m.attach(acc, holders[acc.member.Tenant] == acc))
		}
	}
	return errors.Join(errs...)
}

// shares reports whether two containers belong to the same tenant.
func shares(a, b identity.Member) bool {
	return a.Tenant != (identity.Tenant{}) && a.Tenant == b.Tenant
}

// bySocket reports whether some of a container's packets pass no veth, so that only their
// socket identifies them.
func bySocket(t identity.Member) bool {
	for _, d := range t.Devices {
		if d.HostEnd {
			return t.HostNetwork
		}
	}
	return t.HostNetwork || len(t.Devices) > 0
}

// sockets holds the program at the sockets of one container.
type sockets struct {
	reached *bpf.Copy
	cgroup  *os.File
	link    *link.RawLink // nil: the program is not attached
}

// watchSockets keeps the program at the sockets of a container if need is set, attached while the
// other programs are. Otherwise it closes the program.
func (m *Meter) watchSockets(acc *account, need bool) (err error) {
	s := &acc.sockets
	defer func() {
		if err != nil {
			err = fmt.Errorf("tell packets by socket: %w", err)
		}
	}()
	if s.link != nil && (!need || !m.attached()) {
		err = bpf.Unlink(s.link)
		s.link = nil
	}
	if !need {
		if s.reached != nil {
			err = errors.Join(err, s.reached.Close(), s.cgroup.Close())
			s.reached = nil
		}
		return err
	}
	if s.reached == nil {
		if s.cgroup, err = m.openCgroup(acc.member.ID); err != nil {
			return err
		}
		if s.reached, err = m.object.Copy(accountProgFlReached, bpf.Vars{accountVarFlSlot: acc.slot}); err != nil {
			return errors.Join(err, s.cgroup.Close())
		}
	}
	if s.link == nil && m.attached() {
		s.link, err = link.AttachRawLink(link.RawLinkOptions{
			Target: int(s.cgroup.Fd()), Program: s.reached.Program, Attach: ebpf.AttachCGroupInetIngress,
		})
	}
	return err
}

// openCgroup opens a container's cgroup v2 directory by its ID, which is also its file
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
