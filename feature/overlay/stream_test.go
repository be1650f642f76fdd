package overlay

import (
	"encoding/binary"
	"fmt"
	"net"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/kernel/netdev"
	"github.com/fairlead-project/fairlead/lab/sandbox"
)

// sink takes numbered datagrams in a container, records them, and sends them back.
type sink struct {
	mu  sync.Mutex
	got map[[2]uint64]bool // stream and number
}

// newSink listens at port 9001 of a box until the test ends.
func newSink(t testing.TB, b *sandbox.Box) *sink {
	t.Helper()
	s := &sink{got: make(map[[2]uint64]bool)}
	var p net.PacketConn
	must(t, b.Do(func() (err error) {
		p, err = net.ListenPacket("udp", ":9001")
		return err
	}))
	t.Cleanup(func() { p.Close() })
	go func() {
		buf := make([]byte, 64<<10)
		for {
			n, from, err := p.ReadFrom(buf)
			if err != nil {
				return
			}
			if n >= 16 {
				s.mu.Lock()
				s.got[numbers(buf)] = true
				s.mu.Unlock()
			}
			p.WriteTo(buf[:n], from)
		}
	}()
	return s
}

func numbers(b []byte) [2]uint64 {
	return [2]uint64{binary.BigEndian.Uint64(b), binary.BigEndian.Uint64(b[8:])}
}

// of lists the received numbers of a stream.
func (s *sink) of(st *stream) []uint64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	var list []uint64
	for k := range s.got {
		if k[0] == st.id {
			list = append(list, k[1])
		}
	}
	slices.Sort(list)
	return list
}

// stream is the numbered datagrams of one flow. One goroutine uses it at a time.
type stream struct {
	net.Conn
	id, sent uint64
	size     int
	buf      []byte
}

var streams atomic.Uint64

// newStream makes a flow from a box to a sink. Its packets must not be fragmented.
func newStream(t testing.TB, b *sandbox.Box, to string) *stream {
	t.Helper()
	s := &stream{id: streams.Add(1), size: 100, buf: make([]byte, 64<<10)}
	must(t, b.Do(func() (err error) {
		s.Conn, err = net.Dial("udp", net.JoinHostPort(to, "9001"))
		return err
	}))
	t.Cleanup(func() { s.Close() })
	raw, err := s.Conn.(*net.UDPConn).SyscallConn()
	must(t, err)
	must(t, raw.Control(func(fd uintptr) {
		err = unix.SetsockoptInt(int(fd), unix.IPPROTO_IP, unix.IP_MTU_DISCOVER, unix.IP_PMTUDISC_PROBE)
	}))
	must(t, err)
	return s
}

// push sends a datagram and returns its number. Errors of the kernel are of earlier ones.
func (s *stream) push() uint64 {
	s.sent++
	b := make([]byte, s.size)
	binary.BigEndian.PutUint64(b, s.id)
	binary.BigEndian.PutUint64(b[8:], s.sent)
	for range 2 {
		if _, err := s.Write(b); err == nil {
			break
		}
	}
	return s.sent
}

// call sends a datagram and reports whether it comes back.
func (s *stream) call(patience time.Duration) bool {
	n := s.push()
	for end := time.Now().Add(patience); time.Now().Before(end); {
		s.SetReadDeadline(end)
		k, err := s.Read(s.buf)
		if err == nil && k >= 16 && numbers(s.buf) == [2]uint64{s.id, n} {
			return true
		}
	}
	return false
}

// calls repeats until a datagram comes back, however many are lost before.
func (s *stream) calls(t testing.TB) {
	t.Helper()
	testkit.Await(t, "a datagram comes back", func() bool { return s.call(100 * time.Millisecond) })
}

// quick makes packets of a stream fast.
func (r *rig) quick(s *stream) {
	r.T.Helper()
	r.fastBy(func() { r.T.Helper(); s.calls(r.T) })
}

// generation returns the generation of a node's only network, 0 if no network may be fast, and how
// often a cause has raised it.
func (n *node) generation(cause netdev.Cause) (gen uint32, times uint64) {
	n.f.mu.Lock()
	defer n.f.mu.Unlock()
	for _, o := range n.f.force {
		if o.err != nil {
			return 0, 0
		}
		return o.value.Gen, o.evictions[string(cause)]
	}
	return 0, 0
}

// idle reports whether a node has followed all changes, and follows one of a cause at once.
func (n *node) idle(cause netdev.Cause) bool {
	n.f.mu.Lock()
	defer n.f.mu.Unlock()
	for _, o := range n.f.force {
		if slices.Contains(fickle, cause) && time.Since(o.raised) < raiseEvery {
			return false
		}
	}
	return n.f.due == ""
}

// told makes a change at a node and waits until its feature has followed it. The kernel may report
// several changes as one, so after a while another cause counts too.
func (n *node) told(t testing.TB, cause netdev.Cause, change func()) {
	t.Helper()
	testkit.Await(t, "no change of before is due", func() bool { return n.idle(cause) })
	before, had := n.generation(cause)
	change()
	began := time.Now()
	testkit.Await(t, fmt.Sprintf("the feature follows a change of %s", cause), func() bool {
		gen, times := n.generation(cause)
		return gen == 0 && before != 0 || times > had || gen > before && time.Since(began) > 2*time.Second
	})
	t.Logf("followed %s after %v", cause, time.Since(began))
}

// coarse is more than the lag of the kernel's coarse clock (CONFIG_HZ=100).
const coarse = 20 * time.Millisecond
