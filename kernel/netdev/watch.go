package netdev

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

const (
	watchPause = 5 * time.Millisecond // between two calls of a watch
	maxDrain   = 8192                 // messages before such a call
)

// Watch calls changed, from a goroutine of its own, whenever a device or an address in the
// namespace may have changed, until stop is called. The namespace's owner decides how often that
// is, up to 200 times a second. A watch keeps the namespace alive, also after the NS is closed.
func (ns *NS) Watch(changed func()) (stop func() error, err error) {
	f, conn, err := ns.listen(unix.NETLINK_ROUTE, deviceGroups...)
	if err != nil {
		return nil, err
	}
	go follow(conn, drain, changed)
	return f.Close, nil
}

// WatchDevices is Watch, but passes the devices that may have changed, and also reports their
// qdiscs, classes and filters. If lost, others may have changed, too.
func (ns *NS) WatchDevices(changed func(devices map[int]bool, lost bool)) (stop func() error, err error) {
	f, conn, err := ns.listen(unix.NETLINK_ROUTE, append(deviceGroups, unix.RTNLGRP_TC)...)
	if err != nil {
		return nil, err
	}
	var devices map[int]bool
	var lost bool
	go follow(conn, func(fd int) bool {
		devices, lost = devicesTold(fd)
		return lost || len(devices) > 0
	}, func() { changed(devices, lost) })
	return f.Close, nil
}

// follow calls tell whenever heard has read anything of interest, until the socket is closed, or
// its deadline passes.
func follow(conn syscall.RawConn, heard func(fd int) bool, tell func()) {
	for conn.Read(func(fd uintptr) bool { return heard(int(fd)) }) == nil {
		tell()
		time.Sleep(watchPause)
	}
}

// deviceGroups are the multicast groups of devices and addresses.
var deviceGroups = []int{unix.RTNLGRP_LINK, unix.RTNLGRP_IPV4_IFADDR, unix.RTNLGRP_IPV6_IFADDR}

// listen opens a socket for the kernel's notifications of changes in the namespace.
func (ns *NS) listen(family int, groups ...int) (*os.File, syscall.RawConn, error) {
	var fd int
	err := ns.Do(func() (err error) {
		fd, err = unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, family)
		return err
	})
	if err != nil {
		return nil, nil, fmt.Errorf("watch netns %d: %w", ns.inode, err)
	}
	f := os.NewFile(uintptr(fd), "netlink")
	err = unix.Bind(fd, &unix.SockaddrNetlink{Family: unix.AF_NETLINK})
	for _, group := range groups {
		err = errors.Join(err, unix.SetsockoptInt(fd, unix.SOL_NETLINK, unix.NETLINK_ADD_MEMBERSHIP, group))
	}
	conn, connErr := f.SyscallConn()
	if err = errors.Join(err, connErr); err != nil {
		f.Close()
		return nil, nil, fmt.Errorf("watch netns %d: %w", ns.inode, err)
	}
	return f, conn, nil
}

// drain reads all pending messages, and reports whether there were any. Their content does not
// matter, because the reader looks again; so they may also be truncated, or lost (ENOBUFS).
func drain(fd int) bool {
	var buf [64]byte
	for n := 0; ; n++ {
		_, err := unix.Read(fd, buf[:])
		if errors.Is(err, unix.EAGAIN) || n == maxDrain {
			return n > 0
		}
	}
}

// devicesTold reads all pending messages, and returns their devices. lost: there were more.
func devicesTold(fd int) (changed map[int]bool, lost bool) {
	changed = make(map[int]bool)
	lost = messages(fd, func(m syscall.NetlinkMessage) {
		changed[aboutDevice(m.Data)] = true
	})
	return changed, lost
}

// messages passes all pending messages of the kernel to see: CAP_NET_ADMIN in the namespace is
// enough to send others here. lost: there were more.
func messages(fd int, see func(m syscall.NetlinkMessage)) (lost bool) {
	buf := make([]byte, 32<<10)
	for range maxDrain {
		n, from, err := unix.Recvfrom(fd, buf, 0)
		if errors.Is(err, unix.EAGAIN) {
			return lost
		}
		if err != nil { // ENOBUFS
			lost = true
			continue
		}
		if kernel, ok := from.(*unix.SockaddrNetlink); !ok || kernel.Pid != 0 {
			continue
		}
		list, err := syscall.ParseNetlinkMessage(buf[:n])
		for _, m := range list {
			if len(m.Data) < 8 {
				lost = true
				continue
			}
			see(m)
		}
		lost = lost || err != nil
	}
	return true
}

// aboutDevice reads the index of the device, which struct ifinfomsg, ifaddrmsg, tcmsg, ndmsg and
// br_vlan_msg have at the same offset.
func aboutDevice(data []byte) int { return int(int32(binary.NativeEndian.Uint32(data[4:]))) }
