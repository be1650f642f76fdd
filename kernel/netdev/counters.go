package netdev

import (
	"encoding/binary"
	"errors"
	"fmt"
	"syscall"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// Counters are what has passed a device since it was made, as the device counts: bytes with link
// headers. A super-packet is one packet, and has one header.
type Counters struct{ RxPackets, TxPackets, RxBytes, TxBytes uint64 }

// Counters returns the counters of a device. The error matches [ErrNoLink] if there is none.
func (ns *NS) Counters(index int) (Counters, error) {
	l, err := ns.link(index)
	if err != nil {
		return Counters{}, err
	}
	return countersOf(l), nil
}

func countersOf(l netlink.Link) Counters {
	s := l.Attrs().Statistics
	if s == nil {
		return Counters{}
	}
	return Counters{RxPackets: s.RxPackets, TxPackets: s.TxPackets, RxBytes: s.RxBytes, TxBytes: s.TxBytes}
}

// Cookie returns a number of the namespace that no other has until the next boot, unlike its inode.
// The error matches [errors.ErrUnsupported] before Linux 5.14.
func (ns *NS) Cookie() (cookie uint64, err error) {
	err = ns.Do(func() error {
		fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			return err
		}
		defer unix.Close(fd)
		cookie, err = unix.GetsockoptUint64(fd, unix.SOL_SOCKET, unix.SO_NETNS_COOKIE)
		return err
	})
	if errors.Is(err, unix.ENOPROTOOPT) {
		err = errors.ErrUnsupported
	}
	if err != nil {
		return 0, fmt.Errorf("cookie of netns %d: %w", ns.inode, err)
	}
	return cookie, nil
}

// Told is what the kernel told of a device when it changed or was removed.
type Told struct {
	Index   int
	Removed bool
	// Counters are those at that moment. What a veth receives is missing once its peer is being
	// removed.
	Counters
}

// WatchCounters calls tell, from a goroutine of its own, with the counters of devices that were
// changed or removed, until stop is called. Messages may be lost. A watch keeps the namespace
// alive, also after the NS is closed.
func (ns *NS) WatchCounters(tell func([]Told)) (stop func() error, err error) {
	f, conn, err := ns.listen(unix.NETLINK_ROUTE, unix.RTNLGRP_LINK)
	if err != nil {
		return nil, err
	}
	var told []Told
	go follow(conn, func(fd int) bool {
		told = nil
		lost := messages(fd, func(m syscall.NetlinkMessage) {
			if t, ok := parseTold(m); ok {
				told = append(told, t)
			}
		})
		return lost || len(told) > 0
	}, func() { tell(told) })
	return f.Close, nil
}

// parseTold reads a message about a device. A port that leaves its bridge causes one of the family
// of bridges, which is not about the end of the device.
func parseTold(m syscall.NetlinkMessage) (Told, bool) {
	if m.Header.Type != unix.RTM_NEWLINK && m.Header.Type != unix.RTM_DELLINK || len(m.Data) < unix.SizeofIfInfomsg || m.Data[0] != unix.AF_UNSPEC {
		return Told{}, false
	}
	attrs, err := attributes(m.Data[unix.SizeofIfInfomsg:])
	if err != nil {
		return Told{}, false
	}
	for _, a := range attrs {
		if c, ok := stats64(a.Value); ok && a.Attr.Type == unix.IFLA_STATS64 {
			return Told{aboutDevice(m.Data), m.Header.Type == unix.RTM_DELLINK, c}, true
		}
	}
	return Told{}, false
}

// stats64 reads a struct rtnl_link_stats64.
func stats64(b []byte) (c Counters, ok bool) {
	if len(b) < 4*8 {
		return Counters{}, false
	}
	v := func(i int) uint64 { return binary.NativeEndian.Uint64(b[8*i:]) }
	return Counters{RxPackets: v(0), TxPackets: v(1), RxBytes: v(2), TxBytes: v(3)}, true
}
