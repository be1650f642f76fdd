package netdev

import (
	"encoding/binary"
	"slices"
	"unsafe"

	"golang.org/x/net/bpf"
	"golang.org/x/sys/unix"
)

// mostNarrow bounds the devices of a filter. net.core.optmem_max bounds the filter's memory.
const mostNarrow = 200

// carries reports whether packets routed to the device continue inside other packets: by its kind,
// or because it has no link layer.
func (l Link) carries() bool { return l.IsTunnel() || !l.Ether && l.Kind != "device" }

// narrow makes the kernel queue only the routes of RouteChanged, so that a routing daemon's
// constant changes cause no wakeups. Without a filter the kernel queues all. s.mu is held.
func (s *space) narrow() {
	k := s.sockets[routes]
	if k == nil {
		return
	}
	links, err := s.devices.all(s.ns, MostLinks)
	links = slices.DeleteFunc(slices.Clone(links), func(l Link) bool { return !l.carries() })
	filter := []bpf.Instruction{pass}
	if err == nil && len(links) <= mostNarrow {
		filter = routeFilter(links)
	}
	program, _ := bpf.Assemble(filter)
	at := (*unix.SockFilter)(unsafe.Pointer(&program[0])) // both are struct sock_filter
	k.conn.Control(func(fd uintptr) {                     // an error means that the socket is closed
		if unix.SetsockoptSockFprog(int(fd), unix.SOL_SOCKET, unix.SO_ATTACH_FILTER, &unix.SockFprog{Len: uint16(len(program)), Filter: at}) != nil {
			_ = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_DETACH_FILTER, 0) // the previous filter has other devices
		}
	})
}

// pass is a verdict.
var pass = bpf.RetConstant{Val: 1<<32 - 1}

// routeFilter passes messages about default routes, about routes to the devices, and about anything
// other than routes. A route with several next hops has no RTA_OIF.
func routeFilter(devices []Link) []bpf.Instruction {
	drop := bpf.RetConstant{}
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
	for _, l := range devices {
		value := binary.BigEndian.Uint32(binary.NativeEndian.AppendUint32(nil, uint32(l.Index)))
		program = append(program, bpf.JumpIf{Val: value, SkipFalse: 1}, pass)
	}
	return append(program, drop)
}
