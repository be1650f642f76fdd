package testkit

import (
	"errors"
	"io"
	"net"
	"slices"
	"syscall"
	"testing"
)

// SetSockopts sets options of a socket: level, name and value of each.
func SetSockopts(c syscall.Conn, options ...int) error {
	raw, err := c.SyscallConn()
	if err != nil {
		return err
	}
	var errs []error
	err = raw.Control(func(fd uintptr) {
		for o := range slices.Chunk(options, 3) {
			errs = append(errs, syscall.SetsockoptInt(int(fd), o[0], o[1], o[2]))
		}
	})
	return errors.Join(append(errs, err)...)
}

// SendDatagrams sends n datagrams with size bytes of payload over a connection.
func SendDatagrams(c net.Conn, n, size int) error {
	for sent := 0; sent < n; {
		// Without a listener, the next call returns an ICMP error, and sends nothing.
		if _, err := c.Write(make([]byte, size)); err == nil {
			sent++
		} else if !errors.Is(err, syscall.ECONNREFUSED) {
			return err
		}
	}
	return nil
}

// Serve accepts TCP connections at addr, in its caller's network namespace, until t ends. It copies
// the data of each to the writer that to returns for it.
func Serve(t testing.TB, addr string, to func(net.Conn) io.Writer) error {
	l, err := net.Listen("tcp", addr)
	if err == nil {
		Accept(t, l, func(c net.Conn) { io.Copy(to(c), c) })
	}
	return err
}

// Accept accepts connections until t ends, and closes each after serve.
func Accept(t testing.TB, l net.Listener, serve func(net.Conn)) {
	t.Cleanup(func() { l.Close() })
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				defer c.Close()
				serve(c)
			}()
		}
	}()
}
