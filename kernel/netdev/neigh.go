package netdev

import (
	"bytes"
	"encoding/binary"
	"errors"
	"net"
	"net/netip"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// MostNeighbours limits a look at the neighbours of a namespace.
const MostNeighbours = 1 << 16

// Neighbour is an entry of a device's neighbour table (ARP, NDP), or of its FDB.
type Neighbour struct {
	NeighbourKey
	Reach
}

// NeighbourKey identifies an entry.
type NeighbourKey struct {
	Device int        // of the table: a bridge, for its FDB
	Addr   netip.Addr // of a neighbour; invalid in an FDB
	MAC    string     // in colon form; in an FDB only
	VLAN   uint16     // of a bridge's FDB; 0 for none
	VNI    uint32     // of an external tunnel's FDB
	Flood  netip.Addr // the VTEP of an entry for groups, or of a default entry; there may be many
}

// Reach says how to reach it. The zero value means unreachable.
type Reach struct {
	LLAddr  string     // of a resolved neighbour, in colon form
	VTEP    netip.Addr // in the FDB of a tunnel; invalid if there is none
	NextHop uint32     // instead of VTEP: the id of a nexthop group
	Port    int        // in the FDB of a bridge: index of the device
}

// FDB reports whether the entry is one of an FDB.
func (n Neighbour) FDB() bool { return n.MAC != "" }

// Neighbours lists the neighbour tables and the FDBs of all devices in the namespace. If there are
// more entries than most, the error matches [ErrMany] and comes with those seen so far.
func (ns *NS) Neighbours(most int) ([]Neighbour, error) {
	var all []Neighbour
	for _, family := range []uint8{unix.AF_UNSPEC, unix.AF_BRIDGE} {
		req := nl.NewNetlinkRequest(unix.RTM_GETNEIGH, unix.NLM_F_DUMP)
		if family == unix.AF_BRIDGE {
			// The kernel parses this request as one about links.
			req.AddData(nl.NewIfInfomsg(int(family)))
		} else {
			req.AddRawData(make([]byte, unix.SizeofNdMsg))
		}
		list, err := bounded(ns, unix.NETLINK_ROUTE, most-len(all), false, req, parseNeighbour)
		all = append(all, list...)
		if err != nil {
			return all, ns.listed("neighbours", most, err)
		}
	}
	return all, nil
}

const ndaNextHop = 13 // NDA_NH_ID

// resolved are the states with a link-layer address (NUD_VALID).
const resolved = unix.NUD_REACHABLE | unix.NUD_STALE | unix.NUD_DELAY | unix.NUD_PROBE | unix.NUD_PERMANENT | unix.NUD_NOARP

// parseNeighbour parses an RTM_NEWNEIGH message; ok means that it is from a neighbour table or an
// FDB. It omits entries for IP multicast, which need no resolution.
func parseNeighbour(msg []byte) (n Neighbour, ok bool, err error) {
	if len(msg) < unix.SizeofNdMsg {
		return n, false, errors.New("short neighbour message")
	}
	n.Device = int(int32(binary.NativeEndian.Uint32(msg[4:])))
	state := binary.NativeEndian.Uint16(msg[8:])
	var dst netip.Addr
	var lladdr string
	var group bool
	var master int
	err = EachAttr(msg[unix.SizeofNdMsg:], func(typ uint16, v []byte) error {
		switch typ {
		case unix.NDA_DST:
			dst, _ = netip.AddrFromSlice(v)
		case unix.NDA_LLADDR:
			if len(v) <= 32 { // MAX_ADDR_LEN
				lladdr = net.HardwareAddr(v).String()
				group = len(v) > 0 && (v[0]&1 != 0 || len(bytes.Trim(v, "\x00")) == 0)
			}
		case unix.NDA_VLAN:
			if len(v) >= 2 {
				n.VLAN = binary.NativeEndian.Uint16(v)
			}
		case unix.NDA_VNI, unix.NDA_SRC_VNI:
			n.VNI = number(v)
		case unix.NDA_MASTER:
			master = int(number(v))
		case ndaNextHop:
			n.NextHop = number(v)
		}
		return nil
	})
	if err != nil {
		return n, false, err
	}
	if msg[0] == unix.AF_BRIDGE {
		n.MAC = lladdr
		if dst.IsValid() && !dst.IsUnspecified() {
			n.VTEP = dst
		}
		if master != 0 {
			n.Device, n.Port = master, n.Device
		}
		if group {
			n.Flood = n.VTEP
		}
		return n, lladdr != "", nil
	}
	n.Addr = dst
	if state&resolved != 0 {
		n.LLAddr = lladdr
	}
	return n, dst.IsValid() && !dst.IsMulticast(), nil
}
