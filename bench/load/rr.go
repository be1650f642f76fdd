package load

import (
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"time"
)

// Lost is how long a client without --count waits for an answer by UDP before it counts an
// error and asks again.
const Lost = 200 * time.Millisecond

// rrClient keeps one request under way on each connection.
func rrClient(o options, b *Board) error {
	failed := make(chan error, o.conns)
	targets := o.targets()
	speaks := protocols()[o.proto]
	for i := range o.conns {
		c, err := dial(network(o.proto), targets[i%len(targets)], nil)
		if err != nil {
			return err
		}
		request, answer := make([]byte, o.size), o.size
		if speaks.begin != nil {
			if request, answer, err = speaks.converse(c, o.size); err != nil {
				return fmt.Errorf("begin %s: %w", o.proto, err)
			}
		}
		go func() {
			if err := ask(o, b, c, request, make([]byte, answer)); err != nil {
				failed <- err
			}
		}()
	}
	b.setReady()
	return <-failed
}

func network(proto string) string {
	if proto == "udp" {
		return proto
	}
	return "tcp"
}

// ask returns nil once it has sent o.count requests. buf is as long as each answer.
func ask(o options, b *Board, c net.Conn, request, buf []byte) error {
	patience := Lost
	if o.count > 0 {
		patience = time.Minute // each is to be answered, on however slow a machine
	}
	for sent := 0; o.count == 0 || sent < o.count; {
		if paused(b) {
			continue
		}
		sent++
		start := time.Now()
		err := exchange(o.proto, c, request, buf, patience)
		switch {
		case err == nil:
			b.count(1, len(request)+len(buf))
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
	return nil
}

func exchange(proto string, c net.Conn, request, buf []byte, patience time.Duration) error {
	if _, err := c.Write(request); err != nil {
		return err
	}
	if network(proto) == "tcp" {
		_, err := io.ReadFull(c, buf)
		return err
	}
	if err := c.SetReadDeadline(time.Now().Add(patience)); err != nil {
		return err
	}
	_, err := c.Read(buf)
	return err
}

// rrServer answers each request with a copy of it.
func rrServer(o options, b *Board) error {
	if protocols()[o.proto].begin != nil {
		return fmt.Errorf("serve %s: use a real server", o.proto)
	}
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
