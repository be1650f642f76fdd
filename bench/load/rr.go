package load

import (
	"errors"
	"io"
	"net"
	"os"
	"time"
)

// lost is how long a client waits for an answer by UDP before it counts an
// error and asks again.
const lost = 200 * time.Millisecond

// rrClient keeps one request under way on each connection.
func rrClient(o options, b *Board) error {
	failed := make(chan error, o.conns)
	for range o.conns {
		c, err := dial(o.proto, o.to)
		if err != nil {
			return err
		}
		go func() { failed <- ask(o, b, c) }()
	}
	b.setReady()
	return <-failed
}

func ask(o options, b *Board, c net.Conn) error {
	buf := make([]byte, o.size)
	for {
		if paused(b) {
			continue
		}
		start := time.Now()
		err := exchange(o.proto, c, buf)
		switch {
		case err == nil:
			b.count(1, 2*o.size)
			b.latency(time.Since(start))
		case o.proto == "udp":
			// An answer that comes too late is taken for the next one's: with
			// losses the errors say how far to trust the latencies.
			b.fail()
			if !errors.Is(err, os.ErrDeadlineExceeded) {
				time.Sleep(time.Millisecond) // nobody there yet
			}
		default:
			return err
		}
	}
}

func exchange(proto string, c net.Conn, buf []byte) error {
	if _, err := c.Write(buf); err != nil {
		return err
	}
	if proto == "tcp" {
		_, err := io.ReadFull(c, buf)
		return err
	}
	if err := c.SetReadDeadline(time.Now().Add(lost)); err != nil {
		return err
	}
	_, err := c.Read(buf)
	return err
}

// rrServer answers each request with a copy of it.
func rrServer(o options, b *Board) error {
	if o.proto == "tcp" {
		return serveTCP(o, b, func(c net.Conn) {
			buf := make([]byte, 64<<10)
			for {
				n, err := c.Read(buf)
				if err != nil {
					return
				}
				if _, err := c.Write(buf[:n]); err != nil {
					return
				}
				b.count(1, 2*n)
			}
		})
	}
	c, err := net.ListenPacket("udp", o.listen)
	if err != nil {
		return err
	}
	b.setReady()
	buf := make([]byte, 64<<10)
	for {
		n, from, err := c.ReadFrom(buf)
		if err != nil {
			return err
		}
		if _, err := c.WriteTo(buf[:n], from); err != nil {
			b.fail()
			continue
		}
		b.count(1, 2*n)
	}
}
