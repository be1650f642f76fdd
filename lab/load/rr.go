package load

import (
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"time"
)

// Lost is how long a client without --count waits for an answer by UDP before it counts an error
// and asks again.
const Lost = 200 * time.Millisecond

// rrClient keeps one request under way on each connection.
func rrClient(o options, b *Board) error {
	if o.block {
		return blockClient(o, b)
	}
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
		buf := make([]byte, answer)
		go func() {
			if err := ask(o, b, len(request)+answer, func() (bool, error) { return exchange(o, c, request, buf) }); err != nil {
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

// ask makes requests, and returns nil once it has made o.count of them. do makes one request, and
// returns false if no answer came. An answered request counts as bytes, the sum of both directions.
func ask(o options, b *Board, bytes int, do func() (answered bool, err error)) error {
	for sent := 0; o.count == 0 || sent < o.count; {
		if paused(b) {
			continue
		}
		sent++
		start := time.Now()
		answered, err := do()
		if err != nil {
			return err
		}
		if !answered {
			b.fail()
			continue
		}
		b.count(1, bytes)
		b.latency(time.Since(start))
		if r := b.rate(); r != Flood && r > 0 {
			time.Sleep(time.Second / time.Duration(r))
		}
	}
	return nil
}

// exchange sends a request and reads its answer, which is as long as buf. By UDP it takes a late
// answer for the next request's. With losses, the error count shows how far to trust the latencies.
func exchange(o options, c net.Conn, request, buf []byte) (answered bool, err error) {
	if network(o.proto) == "tcp" {
		if _, err := c.Write(request); err != nil {
			return false, err
		}
		_, err := io.ReadFull(c, buf)
		return err == nil, err
	}
	if _, err = c.Write(request); err == nil {
		if err := c.SetReadDeadline(time.Now().Add(patience(o))); err != nil {
			return false, err
		}
		_, err = c.Read(buf)
	}
	if err != nil && !errors.Is(err, os.ErrDeadlineExceeded) {
		time.Sleep(time.Millisecond) // no server listens yet
	}
	return err == nil, nil
}

// patience is how long a client waits for an answer by UDP.
func patience(o options) time.Duration {
	if o.count > 0 {
		return time.Minute // every request must be answered, on however slow a machine
	}
	return Lost
}

// rrServer answers each request with a copy of it.
func rrServer(o options, b *Board) error {
	if protocols()[o.proto].begin != nil {
		return fmt.Errorf("serve %s: use a real server", o.proto)
	}
	if o.block {
		return blockServer(o, b)
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
