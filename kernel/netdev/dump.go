package netdev

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/vishvananda/netlink/nl"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

// ErrMany means that a namespace has more devices or addresses than the bound. Its owner can make
// any number.
var ErrMany = errors.New("more network devices or addresses than are looked at")

// dump asks the kernel for a list, over a socket of its own in the calling thread's namespace. It
// passes each message to see, until see returns false or the list ends. It holds one answer at a
// time, and the kernel produces the rest of a list only as it is read. With strict it applies the
// request's filters (5.0).
func dump(family int, strict bool, req *nl.NetlinkRequest, see func(msg []byte) (more bool, err error)) error {
	s, err := nl.GetNetlinkSocketAt(netns.None(), netns.None(), family)
	if err != nil {
		return err
	}
	defer s.Close()
	if strict {
		if err := unix.SetsockoptInt(s.GetFd(), unix.SOL_NETLINK, unix.NETLINK_GET_STRICT_CHK, 1); err != nil {
			return err
		}
	}
	return dumpBy(s, req, see)
}

// dumpBy is dump with a given socket, which can be reused only after a list that was read to its end.
//
// It reads to the end of the list by itself: not every family sets NLM_F_MULTI, without which
// NetlinkRequest.Execute stops after the first message.
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
			continue // any process with CAP_NET_ADMIN in the namespace can send here
		}
		for _, m := range msgs {
			switch m.Header.Type {
			case unix.NLMSG_DONE:
				// The list may have ended with an error, which DONE then contains.
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

// bounded lists what parse returns with ok for the messages of a dump in the namespace. Beyond most
// messages the error is ErrMany. strict is as in dump.
func bounded[T any](ns *NS, family, most int, strict bool, req *nl.NetlinkRequest, parse func(msg []byte) (item T, ok bool, err error)) (list []T, err error) {
	err = ns.Do(func() error {
		seen := 0
		return dump(family, strict, req, func(msg []byte) (bool, error) {
			if seen++; seen > most {
				return false, ErrMany
			}
			item, ok, err := parse(msg)
			if ok && err == nil {
				list = append(list, item)
			}
			return true, err
		})
	})
	return list, err
}

// listed wraps the error of a list.
func (ns *NS) listed(what string, most int, err error) error {
	switch {
	case errors.Is(err, ErrMany):
		return fmt.Errorf("list %s of netns %d: %w (%d)", what, ns.inode, ErrMany, most)
	case err != nil:
		return fmt.Errorf("list %s of netns %d: %w", what, ns.inode, err)
	}
	return nil
}

// EachAttr passes the attributes at the end of a message to see, with the flags removed from their
// types, until see fails.
func EachAttr(b []byte, see func(typ uint16, value []byte) error) error {
	for len(b) >= unix.SizeofRtAttr {
		size := int(binary.NativeEndian.Uint16(b))
		if size < unix.SizeofRtAttr || size > len(b) {
			return errors.New("bad attribute of a netlink message")
		}
		if err := see(binary.NativeEndian.Uint16(b[2:])&^(unix.NLA_F_NESTED|unix.NLA_F_NET_BYTEORDER), b[unix.SizeofRtAttr:size]); err != nil {
			return err
		}
		b = b[min(len(b), (size+unix.RTA_ALIGNTO-1)&^(unix.RTA_ALIGNTO-1)):]
	}
	return nil
}

// eachAt passes the attributes at a path of nested ones to see.
func eachAt(b []byte, see func(value []byte), path ...uint16) error {
	if len(path) == 0 {
		see(b)
		return nil
	}
	return EachAttr(b, func(typ uint16, value []byte) error {
		if typ != path[0] {
			return nil
		}
		return eachAt(value, see, path[1:]...)
	})
}

// errorIn reads the error number at the start of an NLMSG_ERROR or NLMSG_DONE.
func errorIn(data []byte) error {
	if len(data) < 4 {
		return nil
	}
	if errno := int32(binary.NativeEndian.Uint32(data)); errno != 0 {
		return unix.Errno(-errno)
	}
	return nil
}
