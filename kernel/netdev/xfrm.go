package netdev

import (
	"encoding/binary"
	"errors"
	"net/netip"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// Policy is an IPsec policy (xfrm) for packets that are sent, received or forwarded.
type Policy struct {
	Direction  Direction
	From, To   netip.Prefix // which packets match
	Protocol   uint8        // 0: any
	FromPort   PortMask
	ToPort     PortMask
	Device     int  // 0: any
	Block      bool // they are dropped
	Transforms bool // they are encrypted, authenticated or the like; else they pass as they are
}

// PortMask matches ports that equal Port under Mask.
type PortMask struct{ Port, Mask uint16 }

// Direction of the matched packets, as in linux/xfrm.h.
type Direction uint8

// The directions.
const (
	In Direction = iota
	Out
	Forward
)

// Policies lists the policies of a namespace, except those of single sockets. If there are more
// than most, the error matches [ErrMany] and comes with those seen so far. A kernel without xfrm
// has none.
func (ns *NS) Policies(most int) ([]Policy, error) {
	req := nl.NewNetlinkRequest(int(nl.XFRM_MSG_GETPOLICY), unix.NLM_F_DUMP)
	list, err := bounded(ns, unix.NETLINK_XFRM, most, false, req, parsePolicy)
	if errors.Is(err, unix.EPROTONOSUPPORT) {
		return nil, nil
	}
	return list, ns.listed("xfrm policies", most, err)
}

// parsePolicy reads struct xfrm_userpolicy_info with its attributes; ok: it is not a socket's.
func parsePolicy(msg []byte) (p Policy, ok bool, err error) {
	const (
		source, toPort, fromPort, family = 16, 32, 36, 40 // offsets in struct xfrm_selector, which comes first
		direction, action                = 0xa0, 0xa1
		socket                           = 3 // and above: XFRM_POLICY_MASK does not contain them
	)
	if len(msg) < nl.SizeofXfrmUserpolicyInfo {
		return p, false, errors.New("short policy message")
	}
	ne := binary.NativeEndian
	v6 := ne.Uint16(msg[family:]) == unix.AF_INET6
	p = Policy{
		Direction: Direction(msg[direction]),
		To:        selected(msg, v6, msg[family+2]),
		From:      selected(msg[source:], v6, msg[family+3]),
		Protocol:  msg[family+4],
		ToPort:    PortMask{port(msg[toPort:]), port(msg[toPort+2:])},
		FromPort:  PortMask{port(msg[fromPort:]), port(msg[fromPort+2:])},
		Device:    int(int32(ne.Uint32(msg[family+8:]))),
		Block:     msg[action] != 0, // XFRM_POLICY_ALLOW
	}
	err = EachAttr(msg[nl.SizeofXfrmUserpolicyInfo:], func(typ uint16, v []byte) error {
		if typ == uint16(nl.XFRMA_TMPL) {
			p.Transforms = len(v) > 0
		}
		return nil
	})
	return p, err == nil && p.Direction < socket, err
}

// selected returns an invalid prefix if bits is too large.
func selected(addr []byte, v6 bool, bits uint8) netip.Prefix {
	if v6 {
		return netip.PrefixFrom(netip.AddrFrom16([16]byte(addr)), int(bits))
	}
	return netip.PrefixFrom(netip.AddrFrom4([4]byte(addr)), int(bits))
}
