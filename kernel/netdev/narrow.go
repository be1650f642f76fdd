package netdev

import (
	"encoding/binary"
	"slices"
	"syscall"
	"unsafe"

	"golang.org/x/net/bpf"
	"golang.org/x/sys/unix"
)

// mostNarrow limits the devices of a filter, whose memory net.core.optmem_max bounds.
const mostNarrow = 200

// carries reports whether packets for a route to the device go on inside others, by its kind or as it
// has no link layer.
func (l Link) carries() bool { return l.IsTunnel() || !l.Ether && l.Kind != "device" }

// narrow lets the kernel queue only the routes that RouteChanged stands for: those that a routing
// daemon changes all the time wake nobody. Without a filter it queues all. s.mu is held.
func (s *space) narrow() {
	k := s.sockets[routes]
	if k == nil {
		return
	}
	s.carriers = nil
	links, err := s.devices.all(s.ns, MostLinks)
	for _, l := range links {
		if l.carries() {
			s.carriers = append(s.carriers, l.Index)
		}
	}
	program, aerr := bpf.Assemble(routeFilter(s.carriers))
	k.conn.Control(func(fd uintptr) { // an error means that the socket is closed
		if err == nil && aerr == nil && len(s.carriers) <= mostNarrow {
			at := (*unix.SockFilter)(unsafe.Pointer(&program[0])) // both are struct sock_filter
			if unix.SetsockoptSockFprog(int(fd), unix.SOL_SOCKET, unix.SO_ATTACH_FILTER, &unix.SockFprog{Len: uint16(len(program)), Filter: at}) == nil {
				return
			}
		}
		_ = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_DETACH_FILTER, 0) // it knows other devices; ENOENT: there is none
	})
}

// recarries reports whether a message about a device changes which devices the filter has to know.
func (s *space) recarries(m syscall.NetlinkMessage) bool {
	l, err := parseLink(m.Data)
	if err != nil || m.Data[0] != unix.AF_UNSPEC { // or what it is as a port of a bridge
		return false
	}
	known := slices.Contains(s.carriers, l.Index)
	if m.Header.Type == unix.RTM_DELLINK {
		return known
	}
	return !known && l.carries()
}

// routeFilter passes messages about default routes, about routes to the devices, and about what is
// no route. A route with several next hops has no RTA_OIF.
func routeFilter(devices []int) []bpf.Instruction {
	pass, drop := bpf.RetConstant{Val: 1<<32 - 1}, bpf.RetConstant{}
	kind := func(typ uint16) uint32 { // loads convert from network byte order
		return uint32(binary.BigEndian.Uint16(binary.NativeEndian.AppendUint16(nil, typ)))
	}
	program := []bpf.Instruction{
		bpf.LoadAbsolute{Off: 4, Size: 2}, // nlmsg_type
		bpf.JumpIf{Val: kind(unix.RTM_NEWROUTE), SkipTrue: 2},
		bpf.JumpIf{Val: kind(unix.RTM_DELROUTE), SkipTrue: 1},
		pass,
		bpf.LoadAbsolute{Off: unix.SizeofNlMsghdr + 1, Size: 1}, // rtm_dst_len
		bpf.JumpIf{Val: 0, SkipFalse: 1},
		pass,
		bpf.LoadConstant{Dst: bpf.RegX, Val: unix.RTA_OIF},
		bpf.LoadConstant{Dst: bpf.RegA, Val: unix.SizeofNlMsghdr + unix.SizeofRtMsg},
		bpf.LoadExtension{Num: bpf.ExtNetlinkAttr},
		bpf.JumpIf{Val: 0, SkipFalse: 1},
		drop,
		bpf.TAX{},
		bpf.LoadIndirect{Off: unix.SizeofNlAttr, Size: 4},
	}
	for _, index := range devices {
		value := binary.BigEndian.Uint32(binary.NativeEndian.AppendUint32(nil, uint32(index)))
		program = append(program, bpf.JumpIf{Val: value, SkipFalse: 1}, pass)
	}
	return append(program, drop)
}
