package netdev

import (
	"encoding/binary"
	"errors"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

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

// AllCounters returns the counters of the devices of the namespace, by index. It is much cheaper than
// [NS.Links]. The error matches ErrMany after most devices; what was read until then is returned,
// too.
func (ns *NS) AllCounters(most int) (map[int]Counters, error) {
	req := nl.NewNetlinkRequest(unix.RTM_GETSTATS, unix.NLM_F_DUMP)
	req.AddData(statsRequest{})
	counts := make(map[int]Counters)
	err := ns.Do(func() error {
		return dump(unix.NETLINK_ROUTE, req, func(msg []byte) (bool, error) {
			if len(counts) == most {
				return false, ErrMany
			}
			index, c, err := parseCounters(msg)
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

// parseCounters reads one answer to RTM_GETSTATS.
func parseCounters(msg []byte) (index int, c Counters, err error) {
	if len(msg) < statsHeader {
		return 0, Counters{}, errors.New("short message with counters")
	}
	attrs, err := nl.ParseRouteAttr(msg[statsHeader:])
	if err != nil {
		return 0, Counters{}, err
	}
	for _, a := range attrs {
		if a.Attr.Type == statsLink64 {
			c, _ = stats64(a.Value)
		}
	}
	return int(binary.NativeEndian.Uint32(msg[4:])), c, nil
}
