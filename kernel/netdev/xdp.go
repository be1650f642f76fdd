package netdev

import (
	"errors"
	"fmt"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/fairlead-project/fairlead/kernel/journal"
)

// ErrXDPTaken means that a device has a foreign XDP program.
var ErrXDPTaken = errors.New("an XDP program of somebody else is there")

// AttachXDP attaches a program to the driver of a device (native mode). The device's operator must
// have named it for this: most drivers reset their queues, some change offloads and the largest
// MTU, and all undo that when the program is detached. The kernel detaches it when the link is
// closed or the process ends, in whatever way. No other can be attached meanwhile. AttachXDP
// refuses a device with a foreign program, and one that merges received packets, which the driver
// would have to stop. It never uses generic mode, which drops too late to save work.
//
// Errors: ErrXDPTaken; journal.ErrGone if the device has gone; otherwise the driver's reason.
func (ns *NS) AttachXDP(index int, p *ebpf.Program) (l link.Link, err error) {
	merged, err := ns.Offload(index, HardwareGRO).Read()
	if err == nil && merged != Off {
		err = fmt.Errorf("the device merges packets itself (%s on), which XDP rules out", merged)
	}
	if err == nil {
		err = ns.Do(func() error {
			if err := vacant(index); err != nil {
				return err
			}
			l, err = link.AttachXDP(link.XDPOptions{Interface: index, Program: p, Flags: link.XDPDriverMode})
			return refusal(err)
		})
	}
	if err != nil {
		return nil, fmt.Errorf("attach XDP to device %d in netns %d: %w", index, ns.inode, err)
	}
	return l, nil
}

// XDP reports whether a device has an XDP program, in any mode. The error matches journal.ErrGone
// if the device has gone.
func (ns *NS) XDP(index int) (bool, error) {
	err := ns.Do(func() error { return vacant(index) })
	if errors.Is(err, ErrXDPTaken) {
		return true, nil
	}
	if err != nil {
		return false, fmt.Errorf("look for XDP at device %d in netns %d: %w", index, ns.inode, err)
	}
	return false, nil
}

// vacant returns an error for a device with an XDP program, in any mode.
func vacant(index int) error {
	l, err := netlink.LinkByIndex(index)
	if NoLink(err) {
		return errors.Join(journal.ErrGone, err)
	}
	if err != nil {
		return err
	}
	if x := l.Attrs().Xdp; x != nil && x.Attached {
		return fmt.Errorf("%w (program %d)", ErrXDPTaken, x.ProgId)
	}
	return nil
}

// refusal explains what the kernel or the driver means by an errno, because bpf(2) returns nothing
// else.
func refusal(err error) error {
	for errno, means := range map[error]string{
		unix.EOPNOTSUPP: "the driver has no native XDP, or not as the device is set now",
		unix.EINVAL:     "the driver cannot as the device is set now: its MTU, its queues or its offloads",
		unix.ERANGE:     "the MTU is longer than the driver takes with XDP",
		unix.EMSGSIZE:   "the MTU is longer than the driver takes with XDP",
		unix.ENOSPC:     "the driver needs more queues for XDP than the device has",
		unix.ENOMEM:     "the driver lacks queues or memory for XDP",
		unix.EEXIST:     "a generic or a bond's XDP program is there",
	} {
		if errors.Is(err, errno) {
			return fmt.Errorf("%s: %w", means, err)
		}
	}
	switch {
	case errors.Is(err, unix.EBUSY):
		return fmt.Errorf("%w: %w", ErrXDPTaken, err)
	case errors.Is(err, unix.ENODEV):
		return errors.Join(journal.ErrGone, err)
	}
	return err
}
