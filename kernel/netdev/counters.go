package netdev

import (
	"encoding/binary"
	"errors"
	"fmt"

	"github.com/vishvananda/netlink/nl"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

// Counters are the totals of a device since it was made, as the device counts: bytes include link
// headers. A super-packet counts as one packet with one header.
type Counters struct{ RxPackets, TxPackets, RxBytes, TxBytes uint64 }

// The attributes of RTM_GETSTATS (include/uapi/linux/if_link.h).
const (
	statsHeader = 12 // struct if_stats_msg
	statsLink64 = 1  // IFLA_STATS_LINK_64: struct rtnl_link_stats64
)

// AllCounters returns the counters of the namespace's devices, by index. It is much cheaper than
// [NS.Links]. The error matches ErrMany if there are more than most devices; the counters read
// until then are returned, too.
func (ns *NS) AllCounters(most int) (map[int]Counters, error) {
	c, err := ns.Counting()
	if err != nil {
		return nil, err
	}
	defer c.Close()
	return c.Read(most)
}

// Counting reads the counters of a namespace's devices repeatedly, which is cheaper than
// [NS.AllCounters]. Until Close it keeps the namespace alive, and with it the devices. It is not
// safe for concurrent use.
type Counting struct {
	ns *NS // may be closed
	s  *nl.NetlinkSocket
}

// Counting opens a Counting, which does not need ns any more.
func (ns *NS) Counting() (*Counting, error) {
	c := &Counting{ns: ns}
	if err := ns.Do(func() (err error) {
		c.s, err = nl.GetNetlinkSocketAt(netns.None(), netns.None(), unix.NETLINK_ROUTE)
		return err
	}); err != nil {
		return nil, fmt.Errorf("read counters of netns %d: %w", ns.inode, err)
	}
	return c, nil
}

// Read does what [NS.AllCounters] does. After an error the Counting can only be closed.
func (c *Counting) Read(most int) (map[int]Counters, error) {
	req := nl.NewNetlinkRequest(unix.RTM_GETSTATS, unix.NLM_F_DUMP)
	head := make([]byte, statsHeader)
	binary.NativeEndian.PutUint32(head[8:], 1<<(statsLink64-1))
	req.AddRawData(head)
	counts := make(map[int]Counters)
	err := dumpBy(c.s, req, func(msg []byte) (bool, error) {
		if len(counts) == most {
			return false, ErrMany
		}
		index, of, err := parseCounters(msg)
		if err == nil {
			counts[index] = of
		}
		return true, err
	})
	return counts, c.ns.listed("counters", most, err)
}

// Close releases the namespace.
func (c *Counting) Close() { c.s.Close() }

// parseCounters reads one answer to RTM_GETSTATS.
func parseCounters(msg []byte) (index int, c Counters, err error) {
	if len(msg) < statsHeader {
		return 0, Counters{}, errors.New("short message with counters")
	}
	err = eachAt(msg[statsHeader:], func(b []byte) {
		if len(b) >= 4*8 {
			v := func(i int) uint64 { return binary.NativeEndian.Uint64(b[8*i:]) }
			c = Counters{RxPackets: v(0), TxPackets: v(1), RxBytes: v(2), TxBytes: v(3)}
		}
	}, statsLink64)
	return int(binary.NativeEndian.Uint32(msg[4:])), c, err
}
