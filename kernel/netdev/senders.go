package netdev

import (
	"encoding/binary"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// Sender is a TCP socket with data in flight or unsent, as sock_diag(7) reports it. Its counters
// cover the socket's life.
type Sender struct {
	Cookie uint64 // the socket's, never used again
	Cgroup uint64 // id of the cgroup v2 directory in which it was made; 0: not known

	Acked                 uint64 // bytes acknowledged
	Segments, Retransmits uint64
	Busy                  time.Duration // with data in flight or unsent
	Window, Buffer        time.Duration // parts of Busy in which the peer's window, or the socket's buffer, was full

	Unsent, InFlight uint64        // bytes
	Room             uint64        // bytes that the peer accepts before it answers
	RTT, Least       time.Duration // recent mean, and the least of the last minutes
	Paced            bool          // its program or its congestion control paces it
}

// Offsets in struct tcp_info (linux/tcp.h). The last is of Linux 5.4.
const (
	tcpSendMSS     = 16
	tcpUnacked     = 24
	tcpRTT         = 68
	tcpRetrans     = 100
	tcpMaxPacing   = 112
	tcpAcked       = 120
	tcpNotSent     = 144
	tcpMinRTT      = 148
	tcpDataSegsOut = 156
	tcpBusy        = 168
	tcpWindow      = 176
	tcpBuffer      = 184
	tcpSendWindow  = 228
	sizeofTCPInfo  = 232
)

// inet_diag (linux/inet_diag.h, linux/sock_diag.h).
const (
	diagByFamily    = 20 // SOCK_DIAG_BY_FAMILY
	diagInfo        = 2  // INET_DIAG_INFO
	diagCongestion  = 4  // INET_DIAG_CONG
	diagCgroup      = 21 // INET_DIAG_CGROUP_ID, Linux 5.9
	diagCookie      = 44 // offset in struct inet_diag_msg
	sizeofDiag      = 72
	tcpEstablished  = 1
	unlimitedPacing = ^uint64(0)
)

// Senders lists the TCP sockets of the namespace with data in flight or unsent. The error matches
// ErrMany beyond most established sockets of a family.
func (ns *NS) Senders(most int) (list []Sender, err error) {
	for _, family := range []uint8{unix.AF_INET, unix.AF_INET6} {
		req := nl.NewNetlinkRequest(diagByFamily, unix.NLM_F_DUMP)
		about := make([]byte, 56) // struct inet_diag_req_v2
		about[0], about[1], about[2] = family, unix.IPPROTO_TCP, 1<<(diagInfo-1)|1<<(diagCongestion-1)
		binary.NativeEndian.PutUint32(about[4:], 1<<tcpEstablished)
		req.AddRawData(about)
		of, err := bounded(ns, unix.NETLINK_SOCK_DIAG, most, false, req, parseSender)
		if family == unix.AF_INET6 && errors.Is(err, unix.ENOENT) {
			err = nil // no IPv6
		}
		if err = ns.listed("sockets", most, err); err != nil {
			return nil, err
		}
		list = append(list, of...)
	}
	return list, nil
}

// micro converts microseconds.
func micro(n uint64) time.Duration { return time.Duration(min(n, 1<<50)) * time.Microsecond }

// parseSender parses one struct inet_diag_msg; ok means that it is a Sender.
func parseSender(b []byte) (s Sender, ok bool, err error) {
	if len(b) < sizeofDiag {
		return s, false, fmt.Errorf("socket message of %d bytes", len(b))
	}
	ne := binary.NativeEndian
	s.Cookie = uint64(ne.Uint32(b[diagCookie:])) | uint64(ne.Uint32(b[diagCookie+4:]))<<32
	err = EachAttr(b[sizeofDiag:], func(typ uint16, v []byte) error {
		switch {
		case typ == diagCgroup && len(v) >= 8:
			s.Cgroup = ne.Uint64(v)
		case typ == diagCongestion:
			// Other algorithms measure their pace at a bottleneck, which may be elsewhere.
			name, _, _ := strings.Cut(string(v), "\x00")
			s.Paced = s.Paced || name != "cubic" && name != "reno"
		case typ == diagInfo && len(v) >= sizeofTCPInfo:
			s.Unsent = uint64(ne.Uint32(v[tcpNotSent:]))
			s.InFlight = uint64(ne.Uint32(v[tcpUnacked:])) * uint64(ne.Uint32(v[tcpSendMSS:]))
			ok = s.Unsent > 0 || s.InFlight > 0
			s.Buffer = micro(ne.Uint64(v[tcpBuffer:]))
			s.Acked, s.Room = ne.Uint64(v[tcpAcked:]), uint64(ne.Uint32(v[tcpSendWindow:]))
			s.Segments, s.Retransmits = uint64(ne.Uint32(v[tcpDataSegsOut:])), uint64(ne.Uint32(v[tcpRetrans:]))
			s.Busy, s.Window = micro(ne.Uint64(v[tcpBusy:])), micro(ne.Uint64(v[tcpWindow:]))
			s.RTT, s.Least = micro(uint64(ne.Uint32(v[tcpRTT:]))), micro(uint64(ne.Uint32(v[tcpMinRTT:])))
			s.Paced = s.Paced || ne.Uint64(v[tcpMaxPacing:]) != unlimitedPacing
		}
		return nil
	})
	if err != nil {
		return s, false, fmt.Errorf("socket message: %w", err)
	}
	return s, ok, nil
}
