package netdev

import (
	"errors"
	"fmt"
	"net"
	"slices"
	"strconv"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// MostLinks limits a look at the host's namespace, where each of 65,534 containers may have a
// device or two.
const MostLinks = 1 << 18

// maxAddrs is how many addresses of one device are reported.
const maxAddrs = 64

// Link is a network device as its namespace shows it.
type Link struct {
	Name   string
	Index  int
	Kind   string // as the kernel names it: "veth", "macvlan", "bridge", ...; "device" for hardware and lo
	MAC    string // in colon form, "" if it has none
	MTU    int    // bytes
	Up     bool
	Ether  bool     // its packets have Ethernet headers, unlike those of WireGuard, tun, PPP
	Addrs  []string // prefixes in CIDR form, IPv4 and IPv6
	Master int      // index of the bridge or bond that it is a port of; 0 if none

	// Peer is the index of the other end of a veth, or of the device below a macvlan or VLAN; 0 if
	// none. PeerNS is the id of Peer's namespace inside this one (see [NS.ID]), -1 for this one.
	Peer   int
	PeerNS int

	RxQueues, TxQueues int
}

// Leaves reports whether packets leave the host by this device of all, and not by one above it: by
// a bond, and not by its ports.
func (l Link) Leaves(all []Link) bool {
	if !l.Up || l.Name == "lo" || l.Kind != "device" && l.Kind != "bond" {
		return false
	}
	i := slices.IndexFunc(all, func(m Link) bool { return m.Index == l.Master })
	return i < 0 || all[i].Kind != "bond" && all[i].Kind != "team"
}

// Links lists the devices in the namespace, loopback included, with up to 64 addresses each. If
// there are more than most devices or addresses, the error matches [ErrMany], and Links also
// returns those seen so far. It may omit a device that is removed or renamed at the same time.
func (ns *NS) Links(most int) ([]Link, error) {
	var links []Link
	err := ns.Do(func() error {
		at := make(map[int]int) // by index
		seen := 0
		err := dump(unix.NETLINK_ROUTE, false, linksRequest(0), func(msg []byte) (bool, error) {
			if seen++; seen > most {
				return false, ErrMany
			}
			link, err := parseLink(msg)
			if err != nil {
				return false, err
			}
			if _, twice := at[link.Index]; !twice {
				at[link.Index] = len(links)
				links = append(links, link)
			}
			return true, nil
		})
		if err != nil && !errors.Is(err, ErrMany) {
			return err
		}
		return errors.Join(err, addresses(most, func(index int, prefix string) {
			if i, ok := at[index]; ok && len(links[i].Addrs) < maxAddrs {
				links[i].Addrs = append(links[i].Addrs, prefix)
			}
		}))
	})
	if err != nil && !errors.Is(err, ErrMany) {
		links = nil
	}
	return links, ns.listed("links", most, err)
}

// addresses passes the addresses of all devices to see, as prefixes. The error is ErrMany if there
// are more than most.
func addresses(most int, see func(index int, prefix string)) error {
	req := nl.NewNetlinkRequest(unix.RTM_GETADDR, unix.NLM_F_DUMP)
	req.AddData(nl.NewIfAddrmsg(unix.AF_UNSPEC))
	seen := 0
	return dump(unix.NETLINK_ROUTE, false, req, func(msg []byte) (bool, error) {
		if seen++; seen > most {
			return false, ErrMany
		}
		index, prefix, err := parseAddr(msg)
		if err == nil && prefix != "" {
			see(index, prefix)
		}
		return true, err
	})
}

// linksRequest requests the device with an index, or all devices for 0, without counters.
func linksRequest(index int) *nl.NetlinkRequest {
	const skipStats = 1 << 3 // RTEXT_FILTER_SKIP_STATS of linux/rtnetlink.h
	req := nl.NewNetlinkRequest(unix.RTM_GETLINK, unix.NLM_F_DUMP)
	if index != 0 {
		req.Flags = unix.NLM_F_REQUEST | unix.NLM_F_ACK
	}
	head := nl.NewIfInfomsg(unix.AF_UNSPEC)
	head.Index = int32(index)
	req.AddData(head)
	req.AddData(nl.NewRtAttr(unix.IFLA_EXT_MASK, nl.Uint32Attr(skipStats)))
	return req
}

// parseAddr parses the device and the prefix of an RTM_NEWADDR message. On a point-to-point link
// IFA_LOCAL is our end, and IFA_ADDRESS the other one.
func parseAddr(msg []byte) (index int, prefix string, err error) {
	if len(msg) < unix.SizeofIfAddrmsg {
		return 0, "", errors.New("short address message")
	}
	head := nl.DeserializeIfAddrmsg(msg)
	var addr, local net.IP
	err = EachAttr(msg[unix.SizeofIfAddrmsg:], func(typ uint16, value []byte) error {
		switch typ {
		case unix.IFA_ADDRESS:
			addr = value
		case unix.IFA_LOCAL:
			local = value
		}
		return nil
	})
	if err != nil {
		return 0, "", err
	}
	bits := int(head.Prefixlen)
	if local != nil && !local.Equal(addr) {
		addr, bits = local, 8*len(local)
	}
	if len(addr) != net.IPv4len && len(addr) != net.IPv6len {
		return 0, "", nil
	}
	return int(head.Index), (&net.IPNet{IP: addr, Mask: net.CIDRMask(bits, 8*len(addr))}).String(), nil
}

// Link returns the device with the given index, without its addresses. The error matches
// [ErrNoLink] if there is none.
func (ns *NS) Link(index int) (Link, error) {
	list, err := bounded(ns, unix.NETLINK_ROUTE, 1, false, linksRequest(index), func(msg []byte) (Link, bool, error) {
		l, err := parseLink(msg)
		return l, true, err
	})
	if NoLink(err) || err == nil && len(list) == 0 {
		err = ErrNoLink
	}
	if err != nil {
		return Link{}, fmt.Errorf("link %d of netns %d: %w", index, ns.inode, err)
	}
	return list[0], nil
}

// Index returns the index of the device with a name. The error matches [ErrNoLink] if there is
// none.
func (ns *NS) Index(name string) (index int, err error) {
	err = ns.with(func(h *netlink.Handle) error {
		l, err := h.LinkByName(name)
		if err == nil {
			index = l.Attrs().Index
		}
		return err
	})
	if NoLink(err) {
		err = ErrNoLink
	}
	if err != nil {
		return 0, fmt.Errorf("link %s of netns %d: %w", name, ns.inode, err)
	}
	return index, nil
}

// ErrNoLink means that a namespace has no device with that index.
var ErrNoLink = errors.New("no such network device")

// NoLink reports whether an error of rtnetlink, or its library, means a missing device.
func NoLink(err error) bool {
	var missing netlink.LinkNotFoundError
	return errors.As(err, &missing) || errors.Is(err, unix.ENODEV)
}

// parseLink parses an RTM_NEWLINK message. The netlink library takes ten times as long, because it
// also parses the counters and driver-specific attributes.
func parseLink(msg []byte) (Link, error) {
	if len(msg) < unix.SizeofIfInfomsg {
		return Link{}, errors.New("short link message")
	}
	head := nl.DeserializeIfInfomsg(msg)
	l := Link{
		Index: int(head.Index), Kind: "device", PeerNS: -1,
		Up: head.Flags&unix.IFF_UP != 0, Ether: head.Type == unix.ARPHRD_ETHER,
	}
	err := EachAttr(msg[unix.SizeofIfInfomsg:], func(typ uint16, v []byte) error {
		switch typ {
		case unix.IFLA_IFNAME:
			l.Name = unix.ByteSliceToString(v)
		case unix.IFLA_ADDRESS:
			if slices.ContainsFunc(v, func(b byte) bool { return b != 0 }) {
				l.MAC = net.HardwareAddr(v).String()
			}
		case unix.IFLA_MTU:
			l.MTU = int(int32(number(v)))
		case unix.IFLA_MASTER:
			l.Master = int(int32(number(v)))
		case unix.IFLA_LINK:
			l.Peer = int(int32(number(v)))
		case unix.IFLA_LINK_NETNSID:
			l.PeerNS = int(int32(number(v)))
		case unix.IFLA_NUM_RX_QUEUES:
			l.RxQueues = int(int32(number(v)))
		case unix.IFLA_NUM_TX_QUEUES:
			l.TxQueues = int(int32(number(v)))
		case unix.IFLA_LINKINFO:
			return eachAt(v, func(kind []byte) {
				if l.Kind = unix.ByteSliceToString(kind); l.Kind == "tun" {
					l.Kind = "tuntap"
				}
			}, unix.IFLA_INFO_KIND)
		}
		return nil
	})
	if err != nil {
		return Link{}, err
	}
	return l, nil
}

// Speed returns the rate of a device in bit/s as its driver reports it, or 0: virtual devices often
// have no rate, or make one up.
func (ns *NS) Speed(index int) (uint64, error) {
	text, err := attribute{ns, index, "speed"}.read()
	if errors.Is(err, unix.EINVAL) || errors.Is(err, unix.EOPNOTSUPP) {
		return 0, nil // no carrier, or no such notion
	}
	if err != nil {
		return 0, err
	}
	mbit, err := strconv.ParseInt(text, 10, 64) // -1 is SPEED_UNKNOWN
	if err != nil || mbit <= 0 || mbit > 1<<32 {
		return 0, nil
	}
	return uint64(mbit) * 1e6, nil
}
