package bench

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"sync"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/bench/rig"
)

// uplinkStamps are the times of a flow's packets at the NIC of a rig, taken by a
// packet socket there, as tcpdump does. It shares nothing with feature latency.
type uplinkStamps struct {
	fd   int
	port uint16
	stop chan struct{}
	done chan struct{}

	mu    sync.Mutex
	trips []wireTrip
	asked time.Time // zero: the last one was answered
}

// wireTrip is one request and its reply.
type wireTrip struct{ asked, answered time.Time }

// newUplinkStamps begins to take them, of the packets to and from a UDP port. One
// request is under way at a time.
func newUplinkStamps(r *rig.Rig, port uint16) (*uplinkStamps, error) {
	s := &uplinkStamps{fd: -1, port: port, stop: make(chan struct{}), done: make(chan struct{})}
	err := r.Node.Do(func() (err error) {
		all := int(binary.BigEndian.Uint16(binary.NativeEndian.AppendUint16(nil, unix.ETH_P_ALL)))
		if s.fd, err = unix.Socket(unix.AF_PACKET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, all); err != nil {
			return err
		}
		ifr, err := unix.NewIfreq(rig.NICDevice)
		if err != nil {
			return err
		}
		if err := unix.IoctlIfreq(s.fd, unix.SIOCGIFINDEX, ifr); err != nil {
			return err
		}
		return errors.Join(
			unix.Bind(s.fd, &unix.SockaddrLinklayer{Protocol: uint16(all), Ifindex: int(ifr.Uint32())}),
			unix.SetsockoptInt(s.fd, unix.SOL_SOCKET, unix.SO_TIMESTAMPNS, 1),
			unix.SetsockoptInt(s.fd, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, 32<<20))
	})
	if err != nil {
		if s.fd >= 0 {
			unix.Close(s.fd)
		}
		return nil, fmt.Errorf("take stamps at the NIC: %w", err)
	}
	go s.run()
	return s, nil
}

// drain is how often the socket is read. Nobody waits at it in between: who had to
// be woken for each packet would hold it up between its two stamps.
const drain = 20 * time.Millisecond

func (s *uplinkStamps) run() {
	defer close(s.done)
	buf, oob := make([]byte, 128), make([]byte, 128)
	for {
		n, m, _, from, err := unix.Recvmsg(s.fd, buf, oob, 0)
		switch {
		case errors.Is(err, unix.EINTR):
			continue
		case errors.Is(err, unix.EAGAIN):
			select {
			case <-s.stop:
				return
			case <-time.After(drain):
			}
			continue
		case err != nil:
			return // bias has too few then
		}
		link, ok := from.(*unix.SockaddrLinklayer)
		at, stamped := timestamp(oob[:m])
		if ok && stamped {
			s.take(buf[:n], link.Pkttype == unix.PACKET_OUTGOING, at)
		}
	}
}

// take notes one packet.
func (s *uplinkStamps) take(ip []byte, out bool, at time.Time) {
	const l4 = 20 // without IP options
	if len(ip) < l4+4 || ip[0] != 0x45 || ip[9] != unix.IPPROTO_UDP {
		return
	}
	port := ip[l4+2:] // its destination
	if !out {
		port = ip[l4:]
	}
	if binary.BigEndian.Uint16(port) != s.port {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if out {
		s.asked = at
		return
	}
	if !s.asked.IsZero() {
		s.trips = append(s.trips, wireTrip{s.asked, at})
	}
	s.asked = time.Time{}
}

// timestamp finds the time among control messages.
func timestamp(oob []byte) (time.Time, bool) {
	list, err := unix.ParseSocketControlMessage(oob)
	if err != nil {
		return time.Time{}, false
	}
	for _, m := range list {
		if m.Header.Level == unix.SOL_SOCKET && m.Header.Type == unix.SCM_TIMESTAMPNS && len(m.Data) >= int(unsafe.Sizeof(unix.Timespec{})) {
			sec, nsec := binary.NativeEndian.Uint64(m.Data), binary.NativeEndian.Uint64(m.Data[8:])
			return time.Unix(int64(sec), int64(nsec)), true
		}
	}
	return time.Time{}, false
}

// bias is by how much round trips are longer than at the NIC, in seconds: raw and
// corrected. Trips are joined by when they began.
func (s *uplinkStamps) bias(trips []api.LatencyTrip) (raw, corrected []float64, err error) {
	const near = 200 * time.Microsecond // requests are further apart
	s.mu.Lock()
	defer s.mu.Unlock()
	next := 0
	for _, t := range trips {
		for next < len(s.trips) && s.trips[next].asked.Before(t.Time.Add(-near)) {
			next++
		}
		if next == len(s.trips) {
			break
		}
		w := s.trips[next]
		if off := w.asked.Sub(t.Time).Seconds(); math.Abs(off) > near.Seconds() {
			continue // no stamp of this one
		}
		wire := w.answered.Sub(w.asked).Seconds()
		raw, corrected = append(raw, t.Raw-wire), append(corrected, t.Corrected-wire)
	}
	if len(raw) < len(trips)/2 || len(raw) == 0 {
		return nil, nil, fmt.Errorf("of %d round trips %d were found at the NIC, which saw %d", len(trips), len(raw), len(s.trips))
	}
	return raw, corrected, nil
}

func (s *uplinkStamps) close() {
	close(s.stop)
	<-s.done
	unix.Close(s.fd)
}
