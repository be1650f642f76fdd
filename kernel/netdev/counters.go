package netdev

import (
	"encoding/binary"

	"github.com/vishvananda/netlink"
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

// stats64 reads a struct rtnl_link_stats64.
func stats64(b []byte) (c Counters, ok bool) {
	if len(b) < 4*8 {
		return Counters{}, false
	}
	v := func(i int) uint64 { return binary.NativeEndian.Uint64(b[8*i:]) }
	return Counters{RxPackets: v(0), TxPackets: v(1), RxBytes: v(2), TxBytes: v(3)}, true
}
