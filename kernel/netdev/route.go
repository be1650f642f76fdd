package netdev

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// Route is a route that leads to a device.
type Route struct {
	To     netip.Prefix
	Device int
}

// Routes lists the unicast routes of a namespace, in any table, that lead to the device with an
// index; it leaves out multipath routes. If there are more than most, the error matches [ErrMany]
// and comes with those seen so far.
func (ns *NS) Routes(index, most int) ([]Route, error) {
	var all []Route
	for _, family := range []uint8{unix.AF_INET, unix.AF_INET6} {
		req := nl.NewNetlinkRequest(unix.RTM_GETROUTE, unix.NLM_F_DUMP)
		req.AddData(&nl.RtMsg{RtMsg: unix.RtMsg{Family: family}})
		req.AddData(nl.NewRtAttr(unix.RTA_OIF, nl.Uint32Attr(uint32(index))))
		list, err := bounded(ns, unix.NETLINK_ROUTE, most-len(all), true, req, func(msg []byte) (Route, bool, error) {
			r, ok, err := parseRoute(msg)
			return r, ok && r.Device == index, err
		})
		all = append(all, list...)
		if err != nil {
			return all, ns.listed("routes", most, err)
		}
	}
	return all, nil
}

// RouteTo returns the indexes of the devices by which the namespace sends UDP packets to an
// address: several if the route has several next hops. source, if valid, is the packets' source address; by, if not 0, the device they are bound to. The error
// matches errNoRoute without a route.
func (ns *NS) RouteTo(to, source netip.Addr, by int) (list []int, err error) {
	family, bits := uint8(unix.AF_INET), to.BitLen()
	if to.Is6() {
		family = unix.AF_INET6
	}
	err = ns.Do(func() error {
		req := nl.NewNetlinkRequest(unix.RTM_GETROUTE, 0)
		head := &nl.RtMsg{RtMsg: unix.RtMsg{Family: family, Dst_len: uint8(bits), Flags: unix.RTM_F_FIB_MATCH}}
		if source.IsValid() {
			head.Src_len = uint8(source.BitLen())
		}
		req.AddData(head)
		req.AddData(nl.NewRtAttr(unix.RTA_DST, to.AsSlice()))
		if source.IsValid() {
			req.AddData(nl.NewRtAttr(unix.RTA_SRC, source.AsSlice()))
		}
		if by != 0 {
			req.AddData(nl.NewRtAttr(unix.RTA_OIF, nl.Uint32Attr(uint32(by))))
		}
		req.AddData(nl.NewRtAttr(unix.RTA_IP_PROTO, nl.Uint8Attr(unix.IPPROTO_UDP)))
		return dump(unix.NETLINK_ROUTE, false, req, func(msg []byte) (bool, error) {
			if len(msg) < unix.SizeofRtMsg {
				return false, errors.New("short route message")
			}
			return false, EachAttr(msg[unix.SizeofRtMsg:], func(typ uint16, v []byte) error {
				switch typ {
				case unix.RTA_OIF:
					list = append(list, int(number(v)))
				case unix.RTA_MULTIPATH: // struct rtnexthop, each with attributes
					for len(v) >= unix.SizeofRtNexthop {
						list = append(list, int(number(v[4:8])))
						v = v[min(len(v), max(int(binary.NativeEndian.Uint16(v)), unix.SizeofRtNexthop)):]
					}
				}
				return nil
			})
		})
	})
	if errors.Is(err, unix.ENETUNREACH) || errors.Is(err, unix.EHOSTUNREACH) || err == nil && len(list) == 0 {
		err = errNoRoute
	}
	if err != nil {
		return nil, fmt.Errorf("route to %s in netns %d: %w", to, ns.inode, err)
	}
	return list, nil
}

// errNoRoute means that a namespace has no route to an address.
var errNoRoute = errors.New("no route")

// parseRoute reads an RTM_NEWROUTE message; ok: it is a unicast route.
func parseRoute(msg []byte) (r Route, ok bool, err error) {
	if len(msg) < unix.SizeofRtMsg {
		return r, false, errors.New("short route message")
	}
	to := netip.IPv4Unspecified()
	if msg[0] == unix.AF_INET6 {
		to = netip.IPv6Unspecified()
	}
	err = EachAttr(msg[unix.SizeofRtMsg:], func(typ uint16, v []byte) error {
		switch typ {
		case unix.RTA_DST:
			if dst, ok := netip.AddrFromSlice(v); ok && dst.BitLen() == to.BitLen() {
				to = dst
			}
		case unix.RTA_OIF:
			r.Device = int(number(v))
		}
		return nil
	})
	r.To = netip.PrefixFrom(to, int(msg[1]))
	return r, err == nil && msg[7] == unix.RTN_UNICAST && (msg[0] == unix.AF_INET || msg[0] == unix.AF_INET6) && r.To.IsValid(), err
}
