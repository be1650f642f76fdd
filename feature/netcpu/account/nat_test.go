package account

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"syscall"
	"testing"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/lab/load"
	"github.com/fairlead-project/fairlead/lab/sandbox"
)

// NAT by the host, in both directions: for a published port, or for a container that opens the
// connection.
func TestNAT(t *testing.T) {
	testkit.InFull(t)
	f := newFabric(t, exactMeter(t))
	box, other := f.add("box", 2), f.add("other", 3)
	f.sixth(box, 2)
	f.Change(f.host, "nic0", (*netlink.Handle).LinkSetNoMaster)
	f.Change(f.wire, "wire", func(h *netlink.Handle, k netlink.Link) error {
		var errs []error
		for _, addr := range []string{"10.66.0.1/24", "fd00:66::1/64"} {
			a, err := netlink.ParseAddr(addr)
			errs = append(errs, err, h.AddrDel(k, a))
		}
		return errors.Join(errs...)
	})
	must(t, f.host.Sysctl("ipv4/ip_forward", "1"))
	must(t, f.host.Sysctl("ipv6/conf/all/forwarding", "1"))
	for _, n := range []struct{ inside, outside, nic, gateway, length string }{
		{"10.66.0.2", "10.65.0.1", "10.65.0.2", "10.66.0.254", "/24"},
		{"fd00:66::2", "fd00:65::1", "fd00:65::2", "fd00:66::254", "/64"},
	} {
		f.Address(f.host, "nic0", n.nic+n.length)
		f.Address(f.wire, "wire", n.outside+n.length)
		f.gateway(box, n.gateway)
		translate(t, f.host, "nic0", netip.MustParseAddr(n.inside))
	}
	for i, c := range testkit.Cases(t, 1, []struct {
		name           string
		proto          Protocol
		polls, out, v6 bool
	}{
		{"udp", UDP, false, false, false},
		{"udp masqueraded", UDP, false, true, false},
		{"tcp", TCP, false, false, false},
		{"tcp masqueraded", TCP, false, true, false},
		{"udp polled", UDP, true, false, false},
		{"tcp polled", TCP, true, false, false},
		{"udp ipv6", UDP, true, false, true},
	}...) {
		t.Run(c.name, func(t *testing.T) {
			f.begin(t)
			if c.polls {
				f.polls()
			}
			server, client, to, all, on := box, f.wire, "10.65.0.2", "0.0.0.0", []int{0, 1}
			if c.out { // outside can reach the container only through NAT
				server, client, to, on = f.wire, box, "10.65.0.1", []int{1, 0}
			} else if c.v6 {
				to, all = "fd00:65::2", "::"
			}
			port := fmt.Sprint(9000 + i)
			s := f.load(server, on[0], "rr-server", "--proto", c.proto.String(), "--listen", net.JoinHostPort(all, port))
			const conns = 4
			r := f.send(client, on[1], packets/conns, "rr-client", net.JoinHostPort(to, port), "--proto", c.proto.String(), "--conns", fmt.Sprint(conns))
			f.got(r, packets)
			f.expect(func(d delta) {
				a := d.of(box)
				if c.proto == TCP {
					d.streamed(a.Receive[TCP], a.Send[TCP], packets*payload)
					d.streamed(a.Send[TCP], a.Receive[TCP], packets*payload)
				} else {
					// A late answer causes a second request.
					n, size := s.Read().Since(load.Reading{}).Ops, uint64(sizeUDP4)
					if c.v6 {
						size = sizeUDP6
					}
					d.received(box, UDP, n, n*size)
					d.sent(box, UDP, n, n*size)
				}
				if w := d.of(other); !c.v6 && (w.Receive[c.proto] != (Work{}) || w.Send[c.proto] != (Work{})) { // IPv6 neighbour discovery is multicast
					d.t.Errorf("a neighbour is charged %+v", w)
				}
			})
		})
	}
}

// translate sets up NAT on a host: TCP and UDP that enter by a device go to an address, and packets
// that leave by it get the host's address. It speaks nf_tables' own netlink, as a guest
// has no programs for that.
func translate(t *testing.T, b *sandbox.Box, dev string, to netip.Addr) {
	t.Helper()
	family := byte(unix.NFPROTO_IPV4)
	if to.Is6() {
		family = unix.NFPROTO_IPV6
	}
	name := make([]byte, unix.IFNAMSIZ)
	copy(name, dev)
	n := nft{family: family}
	n.add(unix.NFT_MSG_NEWTABLE, text(unix.NFTA_TABLE_NAME, "nat"))
	for _, c := range []struct {
		name           string
		hook, priority int32
	}{{"pre", unix.NF_INET_PRE_ROUTING, -100}, {"post", unix.NF_INET_POST_ROUTING, 100}} {
		hook := nested(unix.NFTA_CHAIN_HOOK, number(unix.NFTA_HOOK_HOOKNUM, uint32(c.hook)), number(unix.NFTA_HOOK_PRIORITY, uint32(c.priority)))
		n.add(unix.NFT_MSG_NEWCHAIN, text(unix.NFTA_CHAIN_TABLE, "nat"), text(unix.NFTA_CHAIN_NAME, c.name), text(unix.NFTA_CHAIN_TYPE, "nat"), hook)
	}
	rule := func(chain string, expressions ...*nl.RtAttr) {
		n.add(unix.NFT_MSG_NEWRULE, text(unix.NFTA_RULE_TABLE, "nat"), text(unix.NFTA_RULE_CHAIN, chain), nested(unix.NFTA_RULE_EXPRESSIONS, expressions...))
	}
	for _, l4 := range []byte{unix.IPPROTO_UDP, unix.IPPROTO_TCP} {
		rule("pre", meta(unix.NFT_META_IIFNAME), equal(name), meta(unix.NFT_META_L4PROTO), equal([]byte{l4}),
			expression("immediate", number(unix.NFTA_IMMEDIATE_DREG, unix.NFT_REG_1), value(unix.NFTA_IMMEDIATE_DATA, to.AsSlice())),
			expression("nat", number(unix.NFTA_NAT_TYPE, unix.NFT_NAT_DNAT), number(unix.NFTA_NAT_FAMILY, uint32(family)),
				number(unix.NFTA_NAT_REG_ADDR_MIN, unix.NFT_REG_1)))
	}
	rule("post", meta(unix.NFT_META_OIFNAME), equal(name), expression("masq"))
	if err := b.Do(n.commit); err != nil {
		t.Fatalf("translate by %s in %s: %v", dev, b.Name, err)
	}
}

// nft is a transaction of nf_tables: include/uapi/linux/netfilter/nf_tables.h.
type nft struct {
	family byte
	batch  []byte
	count  uint32
}

func (n *nft) add(message int, attrs ...*nl.RtAttr) {
	n.message(unix.NFNL_SUBSYS_NFTABLES<<8|message, unix.NLM_F_CREATE|unix.NLM_F_ACK, n.family, 0, attrs...)
}

// message appends a message to the batch: nlmsghdr, nfgenmsg, attributes.
func (n *nft) message(kind, flags int, family byte, resource uint16, attrs ...*nl.RtAttr) {
	body := []byte{family, unix.NFNETLINK_V0, byte(resource >> 8), byte(resource)}
	for _, a := range attrs {
		body = append(body, a.Serialize()...)
	}
	n.count++
	b := binary.NativeEndian.AppendUint32(n.batch, uint32(unix.SizeofNlMsghdr+len(body)))
	b = binary.NativeEndian.AppendUint16(b, uint16(kind))
	b = binary.NativeEndian.AppendUint16(b, uint16(unix.NLM_F_REQUEST|flags))
	b = binary.NativeEndian.AppendUint32(b, n.count)
	b = binary.NativeEndian.AppendUint32(b, 0)
	n.batch = append(b, body...)
}

// commit sends the batch in the network namespace of the calling thread.
func (n *nft) commit() error {
	all := nft{}
	all.message(unix.NFNL_MSG_BATCH_BEGIN, 0, unix.AF_UNSPEC, unix.NFNL_SUBSYS_NFTABLES)
	wanted := n.count
	all.batch = append(all.batch, n.batch...)
	all.message(unix.NFNL_MSG_BATCH_END, 0, unix.AF_UNSPEC, unix.NFNL_SUBSYS_NFTABLES)
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.NETLINK_NETFILTER)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	if err := unix.Sendto(fd, all.batch, 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}); err != nil {
		return err
	}
	buf := make([]byte, 1<<16)
	for wanted > 0 {
		got, _, err := unix.Recvfrom(fd, buf, 0)
		if err != nil {
			return err
		}
		answers, err := syscall.ParseNetlinkMessage(buf[:got])
		if err != nil {
			return err
		}
		for _, a := range answers {
			if code := int32(binary.NativeEndian.Uint32(a.Data)); a.Header.Type == unix.NLMSG_ERROR && code != 0 {
				return fmt.Errorf("message %d: %w", a.Header.Seq, unix.Errno(-code))
			}
			wanted--
		}
	}
	return nil
}

func text(kind int, s string) *nl.RtAttr { return nl.NewRtAttr(kind, nl.ZeroTerminated(s)) }

func number(kind int, n uint32) *nl.RtAttr {
	return nl.NewRtAttr(kind, binary.BigEndian.AppendUint32(nil, n))
}

func nested(kind int, attrs ...*nl.RtAttr) *nl.RtAttr {
	a := nl.NewRtAttr(kind|unix.NLA_F_NESTED, nil)
	for _, c := range attrs {
		a.AddChild(c)
	}
	return a
}

func value(kind int, b []byte) *nl.RtAttr {
	return nested(kind, nl.NewRtAttr(unix.NFTA_DATA_VALUE, b))
}

func expression(name string, attrs ...*nl.RtAttr) *nl.RtAttr {
	return nested(unix.NFTA_LIST_ELEM, text(unix.NFTA_EXPR_NAME, name), nested(unix.NFTA_EXPR_DATA, attrs...))
}

// meta loads a property of a packet, and equal ends the rule unless it has this value.
func meta(key uint32) *nl.RtAttr {
	return expression("meta", number(unix.NFTA_META_KEY, key), number(unix.NFTA_META_DREG, unix.NFT_REG_1))
}

func equal(b []byte) *nl.RtAttr {
	return expression("cmp", number(unix.NFTA_CMP_SREG, unix.NFT_REG_1), number(unix.NFTA_CMP_OP, unix.NFT_CMP_EQ), value(unix.NFTA_CMP_DATA, b))
}
