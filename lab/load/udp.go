package load

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"runtime"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// batch limits the datagrams per system call.
const batch = 64

// mmsghdr is struct mmsghdr of recvmmsg(2).
type mmsghdr struct {
	hdr unix.Msghdr
	len uint32
}

// messages is the argument of sendmmsg and recvmmsg.
type messages struct {
	hdrs  [batch]mmsghdr
	iovs  [batch]unix.Iovec
	names []unix.RawSockaddrAny // the senders, if requested by named
}

// named makes each call of recvmmsg return the senders.
func (m *messages) named() {
	m.names = make([]unix.RawSockaddrAny, batch)
	for i := range m.names {
		m.hdrs[i].hdr.Name = (*byte)(unsafe.Pointer(&m.names[i]))
	}
}

// newMessages creates messages of size bytes each. With shared all messages use one buffer, which is
// enough to send.
func newMessages(size int, shared bool) *messages {
	m := new(messages)
	n := batch
	if shared {
		n = 1
	}
	buf := make([]byte, n*size)
	for i := range batch {
		m.iovs[i].Base = &buf[i%n*size]
		m.iovs[i].SetLen(size)
		m.hdrs[i].hdr.Iov = &m.iovs[i]
		m.hdrs[i].hdr.SetIovlen(1)
	}
	return m
}

// call sends or receives up to n messages and returns their number.
func (m *messages) call(trap uintptr, fd, n, flags int) (int, error) {
	for i := range m.names {
		m.hdrs[i].hdr.Namelen = unix.SizeofSockaddrAny // the kernel shortens it
	}
	for {
		r, _, e := unix.Syscall6(trap, uintptr(fd), uintptr(unsafe.Pointer(&m.hdrs)), uintptr(n), uintptr(flags), 0, 0)
		switch e {
		case 0:
			return int(r), nil
		case unix.EINTR:
		default:
			return 0, e
		}
	}
}

// udpSend floods its destinations in turn, from one thread with its own clock. No other process needs
// the sender's CPU, so it spins instead of sleeping too long.
func udpSend(o options, b *Board) error {
	runtime.LockOSThread()
	var fds []int
	for _, to := range o.targets() {
		fd, err := udpSocket(to, unix.Connect)
		if err != nil {
			return err
		}
		if err := setBuffer(fd, unix.SO_SNDBUFFORCE, o.buffer); err != nil {
			return err
		}
		if o.segments > 1 {
			if err := unix.SetsockoptInt(fd, unix.SOL_UDP, unix.UDP_SEGMENT, o.size); err != nil {
				return fmt.Errorf("send in super-packets: %w", err)
			}
		}
		if o.greet {
			if err := greet(fd, b); err != nil {
				return err
			}
		}
		fds = append(fds, fd)
	}
	flags := 0
	if len(fds) > 1 {
		flags = unix.MSG_DONTWAIT // a full queue must not delay the other destinations
	}
	b.setReady()
	m := newMessages(o.size*o.segments, true)
	var p pacer
	done := 0
	for i := 0; ; i = (i + 1) % len(fds) {
		n := p.due(b.rate(), time.Now())
		if o.count > 0 {
			if done >= o.count {
				select {} // the receivers may still be busy
			}
			n = min(n, o.count-done)
		}
		if n == 0 {
			p.wait()
			continue
		}
		sent, err := m.call(unix.SYS_SENDMMSG, fds[i], (n+o.segments-1)/o.segments, flags)
		sent *= o.segments
		if err != nil {
			// The queue is full, or there is no receiver. A flood continues, and does not make up
			// for failed sends.
			b.fail()
			sent = n
		} else {
			b.count(sent, sent*o.size)
			done += sent
		}
		p.sent += uint64(sent)
	}
}

// greeting is the length of the datagram that --greet sends first.
const greeting = 1

// greet sends a datagram and waits for its answer, as iperf3 does, so that connection tracking has
// seen both directions of the flow.
func greet(fd int, b *Board) error {
	tv := unix.NsecToTimeval(int64(Lost))
	if err := unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &tv); err != nil {
		return err
	}
	buf := make([]byte, greeting)
	for {
		if _, err := unix.Write(fd, buf); refused(err) != nil {
			return fmt.Errorf("greet: %w", err)
		}
		_, err := unix.Read(fd, buf)
		switch {
		case err == nil:
			return nil
		case err == unix.EINTR || err == unix.EAGAIN:
			b.fail()
		case refused(err) != nil:
			return fmt.Errorf("greet: %w", err)
		}
	}
}

// refused returns nil if err only means that no server listens yet, else the error.
func refused(err error) error {
	if errors.Is(err, unix.ECONNREFUSED) {
		time.Sleep(time.Millisecond)
		return nil
	}
	return err
}

// answer sends a greeting back to its sender.
func (m *messages) answer(fd, i int) {
	size := m.iovs[i].Len
	m.iovs[i].SetLen(greeting)
	defer m.iovs[i].SetLen(int(size))
	unix.Syscall(unix.SYS_SENDMSG, uintptr(fd), uintptr(unsafe.Pointer(&m.hdrs[i].hdr)), 0)
}

// pacer computes how many packets are due.
type pacer struct {
	rate  uint64
	start time.Time
	sent  uint64
	next  time.Duration // until the next packet is due
}

// catchUp is the longest part of a pause that a sender makes up for after it could not run. A longer
// burst would be more load than requested.
const catchUp = 2 * time.Millisecond

func (p *pacer) due(rate uint64, now time.Time) int {
	if rate != p.rate || p.start.IsZero() {
		p.rate, p.start, p.sent = rate, now, 0
	}
	switch rate {
	case 0:
		p.next = 5 * time.Millisecond
		return 0
	case Flood:
		return batch
	}
	gap := time.Duration(float64(time.Second) / float64(rate))
	at := time.Duration(float64(p.sent) / float64(rate) * float64(time.Second))
	late := now.Sub(p.start) - at
	if late < 0 {
		p.next = -late
		return 0
	}
	if late > catchUp+gap {
		p.start = p.start.Add(late - catchUp)
		late = catchUp
	}
	return int(min(uint64(late.Seconds()*float64(rate))+1, batch))
}

// wait sleeps for a part of the time until the next packet.
func (p *pacer) wait() {
	const tooShort = 300 * time.Microsecond // a sleep may be late by this
	if p.next > tooShort {
		time.Sleep(p.next - tooShort)
	}
}

// udpRecv receives as fast as it can.
func udpRecv(o options, b *Board) error {
	runtime.LockOSThread()
	fd, err := udpSocket(o.listen, unix.Bind)
	if err != nil {
		return err
	}
	if err := setBuffer(fd, unix.SO_RCVBUFFORCE, o.buffer); err != nil {
		return err
	}
	b.setReady()
	m := newMessages(2048, false)
	if o.greet {
		m.named()
	}
	for {
		n, err := m.call(unix.SYS_RECVMMSG, fd, batch, unix.MSG_WAITFORONE)
		if err != nil {
			return fmt.Errorf("receive: %w", err)
		}
		bytes := 0
		for i := range m.hdrs[:n] {
			h := &m.hdrs[i]
			bytes += int(h.len)
			if o.greet && h.len == greeting {
				m.answer(fd, i)
			}
		}
		b.count(n, bytes)
	}
}

// udpSocket creates a blocking socket and binds or connects it. The runtime's poller would add a
// second system call before each batch.
func udpSocket(addr string, attach func(int, unix.Sockaddr) error) (int, error) {
	if len(addr) > 0 && addr[0] == ':' {
		addr = "0.0.0.0" + addr
	}
	ap, err := netip.ParseAddrPort(addr)
	if err != nil {
		return -1, fmt.Errorf("parse address %q: %w", addr, err)
	}
	family, sa := sockaddr(ap)
	fd, err := unix.Socket(family, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return -1, os.NewSyscallError("socket", err)
	}
	if err := attach(fd, sa); err != nil {
		unix.Close(fd)
		return -1, fmt.Errorf("use %s: %w", addr, err)
	}
	return fd, nil
}

// sockaddr converts an address to the kernel's form and its family.
func sockaddr(ap netip.AddrPort) (family int, sa unix.Sockaddr) {
	if ap.Addr().Is4() {
		return unix.AF_INET, &unix.SockaddrInet4{Port: int(ap.Port()), Addr: ap.Addr().As4()}
	}
	return unix.AF_INET6, &unix.SockaddrInet6{Port: int(ap.Port()), Addr: ap.Addr().As16()}
}

func setBuffer(fd, option, bytes int) error {
	if bytes == 0 {
		return nil
	}
	if err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, option, bytes); err != nil {
		return fmt.Errorf("set socket buffer to %d: %w", bytes, err)
	}
	return nil
}
