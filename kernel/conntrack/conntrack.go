// Package conntrack changes entries of the kernel's connection tracking, in any network namespace
// of this host, over ctnetlink.
//
// It does not watch the table, and makes and deletes no entries. It is for features that hide
// packets of a connection from the table.
package conntrack

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"sync"
	"time"

	"github.com/vishvananda/netlink/nl"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"github.com/fairlead-project/fairlead/kernel/netdev"
)

// ErrUnsupported means that the kernel has no ctnetlink (CONFIG_NF_CT_NETLINK, module
// nf_conntrack_netlink).
var ErrUnsupported = errors.New("the kernel has no ctnetlink: load nf_conntrack_netlink")

// Tuple identifies a connection by the packets of one direction.
type Tuple struct{ Source, Destination netip.AddrPort }

// Table is the connection tracking table of one network namespace. It is safe for concurrent use.
type Table struct {
	mu    sync.Mutex
	s     *nl.NetlinkSocket
	inode uint64
}

// batch is how many requests are sent at a time. The answers to them fit into the receive buffer of
// a socket.
const batch = 64

// Constants of linux/netfilter/nfnetlink.h and nf_conntrack_tcp.h.
const (
	update    = 1<<8 | nl.IPCTNL_MSG_CT_NEW // NFNL_SUBSYS_CTNETLINK; without NLM_F_CREATE
	beLiberal = 0x08                        // IP_CT_TCP_FLAG_BE_LIBERAL
	maxAckSet = 0x20                        // IP_CT_TCP_FLAG_MAXACK_SET: a RST before td_maxack is invalid
)

// Open opens the table of a namespace, which stays alive until Close. Errors: ErrUnsupported.
func Open(ns *netdev.NS) (*Table, error) {
	t := &Table{inode: ns.Inode()}
	err := ns.Do(func() (err error) {
		t.s, err = nl.GetNetlinkSocketAt(netns.None(), netns.None(), unix.NETLINK_NETFILTER)
		return err
	})
	if errors.Is(err, unix.EPROTONOSUPPORT) {
		err = ErrUnsupported
	}
	if err != nil {
		return nil, t.wrap("open", err)
	}
	patience := unix.NsecToTimeval(int64(netdev.Patience))
	// Without NETLINK_CAP_ACK an answer holds the whole request.
	err = errors.Join(t.s.SetReceiveTimeout(&patience), unix.SetsockoptInt(t.s.GetFd(), unix.SOL_NETLINK, unix.NETLINK_CAP_ACK, 1))
	if err == nil {
		nowhere := netip.AddrPortFrom(netip.IPv4Unspecified(), 0)
		_, err = t.BeLiberal([]Tuple{{nowhere, nowhere}})
	}
	if err != nil {
		t.s.Close()
		return nil, t.wrap("open", err)
	}
	return t, nil
}

// Close closes the socket.
func (t *Table) Close() { t.s.Close() }

// BeLiberal makes the table accept packets of TCP connections, in both directions, outside the window
// that it has seen, as net.netfilter.nf_conntrack_tcp_be_liberal does for all connections. It reports
// for each tuple, of either direction, whether there is such a connection in the default zone. It
// does not change the connection's state or timeout. The setting lasts as long as the entry, even if
// the agent ends, because the table can never recover packets that it has not seen. So it needs no
// journal entry. An error comes with the connections found before it. Errors: ErrUnsupported.
func (t *Table) BeLiberal(tuples []Tuple) (found []bool, err error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	found = make([]bool, len(tuples))
	for at := 0; at < len(tuples); at += batch {
		part := tuples[at:min(at+batch, len(tuples))]
		if err := t.send(part, found[at:at+len(part)]); err != nil {
			return found, t.wrap("change", err)
		}
	}
	return found, nil
}

func (t *Table) send(tuples []Tuple, found []bool) error {
	var requests []byte
	at := make(map[uint32]int) // by sequence number
	for i, tuple := range tuples {
		if req, ok := liberal(tuple); ok {
			at[req.Seq] = i
			requests = append(requests, req.Serialize()...)
		}
	}
	if len(at) == 0 {
		return nil
	}
	if err := unix.Sendto(t.s.GetFd(), requests, 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}); err != nil {
		return err
	}
	var failed error
	for deadline := time.Now().Add(netdev.Patience); len(at) > 0; {
		if time.Now().After(deadline) {
			return os.ErrDeadlineExceeded
		}
		msgs, from, err := t.s.Receive()
		if err != nil {
			return err
		}
		if from.Pid != nl.PidKernel {
			continue // any process with CAP_NET_ADMIN in the namespace can send here
		}
		for _, m := range msgs {
			i, asked := at[m.Header.Seq]
			if m.Header.Type != unix.NLMSG_ERROR || !asked || len(m.Data) < 4 {
				continue // the answer to an earlier call that gave up
			}
			delete(at, m.Header.Seq)
			switch errno := unix.Errno(-int32(binary.NativeEndian.Uint32(m.Data))); errno {
			case 0:
				found[i] = true
			case unix.ENOENT: // no such connection
			case unix.EINVAL, unix.EOPNOTSUPP: // nfnetlink lacks this subsystem
				failed = ErrUnsupported
			default:
				failed = errno
			}
		}
	}
	return failed
}

// liberal makes the request for one connection. The kernel looks it up by the tuple called the
// original one, which may be either. It refuses addresses of two families.
func liberal(t Tuple) (req *nl.NetlinkRequest, ok bool) {
	src, dst := t.Source.Addr().Unmap(), t.Destination.Addr().Unmap()
	if !src.IsValid() || src.BitLen() != dst.BitLen() {
		return nil, false
	}
	family, srcType, dstType := unix.AF_INET, nl.CTA_IP_V4_SRC, nl.CTA_IP_V4_DST
	if src.Is6() {
		family, srcType, dstType = unix.AF_INET6, nl.CTA_IP_V6_SRC, nl.CTA_IP_V6_DST
	}
	req = nl.NewNetlinkRequest(update, unix.NLM_F_ACK)
	req.AddData(&nl.Nfgenmsg{NfgenFamily: uint8(family), Version: nl.NFNETLINK_V0})
	tuple := nested(nl.CTA_TUPLE_ORIG)
	ip := nested(nl.CTA_TUPLE_IP)
	ip.AddRtAttr(srcType, src.AsSlice())
	ip.AddRtAttr(dstType, dst.AsSlice())
	proto := nested(nl.CTA_TUPLE_PROTO)
	proto.AddRtAttr(nl.CTA_PROTO_NUM, nl.Uint8Attr(unix.IPPROTO_TCP))
	proto.AddRtAttr(nl.CTA_PROTO_SRC_PORT, nl.BEUint16Attr(t.Source.Port()))
	proto.AddRtAttr(nl.CTA_PROTO_DST_PORT, nl.BEUint16Attr(t.Destination.Port()))
	tuple.AddChild(ip)
	tuple.AddChild(proto)
	// struct nf_ct_tcp_flags: the values, and their mask.
	flags := []byte{beLiberal, beLiberal | maxAckSet}
	tcp := nested(nl.CTA_PROTOINFO_TCP)
	tcp.AddRtAttr(nl.CTA_PROTOINFO_TCP_FLAGS_ORIGINAL, flags)
	tcp.AddRtAttr(nl.CTA_PROTOINFO_TCP_FLAGS_REPLY, flags)
	info := nested(nl.CTA_PROTOINFO)
	info.AddChild(tcp)
	req.AddData(tuple)
	req.AddData(info)
	return req, true
}

func nested(typ int) *nl.RtAttr { return nl.NewRtAttr(unix.NLA_F_NESTED|typ, nil) }

func (t *Table) wrap(op string, err error) error {
	return fmt.Errorf("%s connection tracking of netns %d: %w", op, t.inode, err)
}
