package netdev

import (
	"encoding/binary"
	"errors"
	"os"
	"slices"
	"syscall"
	"time"

	"github.com/vishvananda/netlink/nl"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

// ErrMany means that a namespace has more devices, or more addresses, than were
// asked for. Whoever lives there can make as many as it likes.
var ErrMany = errors.New("more network devices or addresses than are looked at")

// dump asks the kernel for a list, over a socket of its own in the calling
// thread's namespace. It passes each message to see, until see returns false or
// the list ends. It holds one answer at a time, and the kernel does not produce
// the rest of a list that nobody reads.
func dump(family int, req *nl.NetlinkRequest, see func(msg []byte) (more bool, err error)) error {
	return dumpWith(family, func(*nl.NetlinkSocket) error { return nil }, req, see)
}

// dumpWith is dump with options that the socket gets first.
func dumpWith(family int, options func(*nl.NetlinkSocket) error, req *nl.NetlinkRequest, see func(msg []byte) (more bool, err error)) error {
	s, err := nl.GetNetlinkSocketAt(netns.None(), netns.None(), family)
	if err != nil {
		return err
	}
	defer s.Close()
	if err := options(s); err != nil {
		return err
	}
	return dumpBy(s, req, see)
}

// dumpBy is dump with a given socket, which is of no use afterwards.
//
// It reads to the end of the list by itself: not every family sets NLM_F_MULTI,
// without which NetlinkRequest.Execute stops after the first message.
func dumpBy(s *nl.NetlinkSocket, req *nl.NetlinkRequest, see func(msg []byte) (more bool, err error)) error {
	patience := unix.NsecToTimeval(int64(Patience))
	if err := s.SetReceiveTimeout(&patience); err != nil {
		return err
	}
	if err := s.Send(req); err != nil {
		return err
	}
	for deadline := time.Now().Add(Patience); ; {
		if time.Now().After(deadline) {
			return os.ErrDeadlineExceeded
		}
		msgs, from, err := s.Receive()
		if err != nil {
			return err
		}
		if from.Pid != nl.PidKernel {
			continue // CAP_NET_ADMIN in the namespace is enough to send here
		}
		for _, m := range msgs {
			switch m.Header.Type {
			case unix.NLMSG_DONE:
				// The list may have ended because of an error, and DONE then
				// holds only that.
				return errorIn(m.Data)
			case unix.NLMSG_ERROR:
				if len(m.Data) < 4 {
					return errors.New("short netlink error")
				}
				return errorIn(m.Data)
			}
			if more, err := see(m.Data); err != nil || !more {
				return err
			}
		}
	}
}

// attributes reads the attributes at the end of a message. The kernel pads the
// last one; nl relies on that, and panics where the padding is missing.
func attributes(b []byte) ([]syscall.NetlinkRouteAttr, error) {
	if rest := len(b) % unix.RTA_ALIGNTO; rest != 0 {
		b = append(slices.Clip(b), make([]byte, unix.RTA_ALIGNTO-rest)...)
	}
	return nl.ParseRouteAttr(b)
}

// errorIn reads the number that begins the data of an NLMSG_ERROR or NLMSG_DONE.
func errorIn(data []byte) error {
	if len(data) < 4 {
		return nil
	}
	if errno := int32(binary.NativeEndian.Uint32(data)); errno != 0 {
		return unix.Errno(-errno)
	}
	return nil
}
