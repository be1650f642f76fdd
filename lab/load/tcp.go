package load

import (
	"errors"
	"fmt"
	"net"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// bulk is the size of one read or write of TCP bulk traffic.
const bulk = 128 << 10

// paused waits while the board pauses the sender, and reports whether it did.
func paused(b *Board) bool {
	if b.rate() != 0 {
		return false
	}
	time.Sleep(2 * time.Millisecond)
	return true
}

func tcpSend(o options, b *Board) error {
	failed := make(chan error, o.conns)
	targets := o.targets()
	for i := range o.conns {
		c, err := dial("tcp", targets[i%len(targets)], congestion(o.congestion))
		if err != nil {
			return err
		}
		go func() {
			buf := make([]byte, bulk)
			for sent := 0; o.count == 0 || sent < o.count; {
				if paused(b) {
					continue
				}
				sent++
				n, err := c.Write(buf)
				if err != nil {
					failed <- err
					return
				}
				b.count(1, n)
			}
		}()
	}
	b.setReady()
	return <-failed
}

// congestion sets the congestion control of a TCP socket before it connects; "" keeps the kernel's
// default. After the connect it would be too late: timers pace a connection that begins with bbr for
// its whole life.
func congestion(name string) func(network, addr string, c syscall.RawConn) error {
	if name == "" {
		return nil
	}
	return func(_, _ string, c syscall.RawConn) error {
		var serr error
		err := c.Control(func(fd uintptr) {
			serr = unix.SetsockoptString(int(fd), unix.IPPROTO_TCP, unix.TCP_CONGESTION, name)
		})
		if err := errors.Join(err, serr); err != nil {
			return fmt.Errorf("use congestion control %q: %w", name, err)
		}
		return nil
	}
}

// dial retries for half a minute, because the listener may start later, and a busy machine may lose or
// delay the first packets. control is net.Dialer.Control, and may be nil.
func dial(network, addr string, control func(network, addr string, c syscall.RawConn) error) (net.Conn, error) {
	d := net.Dialer{Timeout: 2 * time.Second, Control: control}
	for start := time.Now(); ; time.Sleep(5 * time.Millisecond) {
		c, err := d.Dial(network, addr)
		if err == nil {
			return c, nil
		}
		if errors.Is(err, unix.ENOENT) || time.Since(start) > 30*time.Second {
			return nil, fmt.Errorf("connect: %w", err)
		}
	}
}

func tcpRecv(o options, b *Board) error {
	return serveTCP(o, b, func(c net.Conn) {
		buf := make([]byte, bulk)
		for {
			n, err := c.Read(buf)
			if err != nil {
				return
			}
			b.count(1, n)
		}
	})
}

// serveTCP passes each connection to serve, which owns it until it returns.
func serveTCP(o options, b *Board, serve func(net.Conn)) error {
	l, err := net.Listen("tcp", o.listen)
	if err != nil {
		return err
	}
	b.setReady()
	for {
		c, err := l.Accept()
		if err != nil {
			return err
		}
		go func() {
			defer c.Close()
			serve(c)
		}()
	}
}
