package netdev

import (
	"encoding/binary"
	"errors"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// Count is what the kernel has counted at a device since it was made. A super-packet is one packet.
type Count struct {
	RxPackets, TxPackets, RxBytes, TxBytes uint64
}

// The attributes of RTM_GETSTATS (include/uapi/linux/if_link.h).
const (
	statsHeader = 12 // struct if_stats_msg
	statsLink64 = 1  // IFLA_STATS_LINK_64: struct rtnl_link_stats64
)

// statsRequest is the body of RTM_GETSTATS: struct if_stats_msg.
type statsRequest struct{}

func (statsRequest) Len() int { return statsHeader }

func (statsRequest) Serialize() []byte {
	b := make([]byte, statsHeader)
	binary.NativeEndian.PutUint32(b[8:], 1<<(statsLink64-1))
	return b
}

// Counts returns what the kernel counts at the devices of the namespace, by index. The error
// matches ErrMany after most devices; what was read until then is returned, too.
func (ns *NS) Counts(most int) (map[int]Count, error) {
	req := nl.NewNetlinkRequest(unix.RTM_GETSTATS, unix.NLM_F_DUMP)
	req.AddData(statsRequest{})
	counts := make(map[int]Count)
	err := ns.Do(func() error {
		return dump(unix.NETLINK_ROUTE, req, func(msg []byte) (bool, error) {
			if len(counts) == most {
				return false, ErrMany
			}
			index, c, err := parseCount(msg)
			if err == nil {
				counts[index] = c
			}
			return true, err
		})
	})
	if err != nil {
		err = ns.listed("counters", most, err)
	}
	return counts, err
}

// parseCount reads one answer to RTM_GETSTATS.
func parseCount(msg []byte) (index int, c Count, err error) {
	if len(msg) < statsHeader {
		return 0, Count{}, errors.New("short message with counters")
	}
	attrs, err := nl.ParseRouteAttr(msg[statsHeader:])
	if err != nil {
		return 0, Count{}, err
	}
	for _, a := range attrs {
		if a.Attr.Type == statsLink64 && len(a.Value) >= 32 {
			v := func(i int) uint64 { return binary.NativeEndian.Uint64(a.Value[8*i:]) }
			c = Count{RxPackets: v(0), TxPackets: v(1), RxBytes: v(2), TxBytes: v(3)}
		}
	}
	return int(binary.NativeEndian.Uint32(msg[4:])), c, nil
}
