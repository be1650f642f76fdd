package netdev

import "encoding/binary"

// Counters are what has passed a device since it was made, as the device counts: bytes with link
// headers. A super-packet is one packet, and has one header.
type Counters struct{ RxPackets, TxPackets, RxBytes, TxBytes uint64 }

// stats64 reads a struct rtnl_link_stats64.
func stats64(b []byte) (c Counters, ok bool) {
	if len(b) < 4*8 {
		return Counters{}, false
	}
	v := func(i int) uint64 { return binary.NativeEndian.Uint64(b[8*i:]) }
	return Counters{RxPackets: v(0), TxPackets: v(1), RxBytes: v(2), TxBytes: v(3)}, true
}
