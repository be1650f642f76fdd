package e2e

import (
	"bytes"
	"errors"
	"fmt"
	"net"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/kernel/netdev"
)

// overlaid is a container on an overlay network between nodes.
type overlaid struct {
	*agent
	engine *testkit.Docker
	name   string
	addr   string // on the network
}

// joined starts a container on an overlay network.
func joined(t *testing.T, a *agent, d *testkit.Docker, network, name string, flags ...string) *overlaid {
	t.Helper()
	args := append([]string{"run", "-d", "--name", name, "--network", network}, flags...)
	d.Must(t, append(args, d.Image, "sleep", "1000")...)
	c := &overlaid{agent: a, engine: d, name: name}
	c.addr = d.Must(t, "inspect", "--format", "{{(index .NetworkSettings.Networks \""+network+"\").IPAddress}}", name)
	return c
}

// do runs fn in the network of the container.
func (c *overlaid) do(fn func() error) {
	c.t.Helper()
	pid := c.engine.Must(c.t, "inspect", "--format", "{{.State.Pid}}", c.name)
	ns, err := netdev.Open(filepath.Join("/proc", pid, "ns", "net"))
	must(c.t, err)
	defer ns.Close()
	must(c.t, ns.Do(fn))
}

// echo answers at port 9000, by TCP and UDP, until stop is called or the test ends.
func (c *overlaid) echo() (stop func()) {
	c.t.Helper()
	var l net.Listener
	var p net.PacketConn
	c.do(func() (err error) {
		if l, err = net.Listen("tcp", ":9000"); err != nil {
			return err
		}
		p, err = net.ListenPacket("udp", ":9000")
		return err
	})
	var conns sync.Map
	stop = sync.OnceFunc(func() {
		l.Close()
		p.Close()
		conns.Range(func(conn, _ any) bool { return conn.(net.Conn).Close() == nil })
	})
	c.t.Cleanup(stop)
	go func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			conns.Store(conn, nil)
			go func() {
				buf := make([]byte, 4096)
				for {
					n, err := conn.Read(buf)
					if err == nil {
						_, err = conn.Write(buf[:n])
					}
					if err != nil {
						conn.Close()
						return
					}
				}
			}()
		}
	}()
	go func() {
		buf := make([]byte, 4096)
		for {
			n, from, err := p.ReadFrom(buf)
			if err != nil {
				return
			}
			p.WriteTo(buf[:n], from)
		}
	}()
	return stop
}

// dialogue is a connection with an echo.
type dialogue struct {
	net.Conn
	n int
}

func (c *overlaid) dial(proto, to string) *dialogue {
	c.t.Helper()
	d := &dialogue{}
	c.do(func() (err error) {
		d.Conn, err = net.DialTimeout(proto, net.JoinHostPort(to, "9000"), patience)
		return err
	})
	c.t.Cleanup(func() { d.Close() })
	return d
}

// ask sends a line and waits for its echo. It sends a lost datagram again.
func (d *dialogue) ask() error {
	d.n++
	line := fmt.Appendf(nil, "%80d\n", d.n)
	got := make([]byte, len(line))
	udp := d.LocalAddr().Network() == "udp"
	for end := time.Now().Add(patience); ; {
		wait := patience
		if udp {
			wait = time.Second / 4
		}
		if err := d.SetDeadline(time.Now().Add(wait)); err != nil {
			return err
		}
		if _, err := d.Write(line); err != nil && !udp { // by UDP, an earlier ICMP error
			return err
		}
		err := d.read(got)
		if err == nil && bytes.Equal(got, line) {
			return nil
		}
		if !udp || time.Now().After(end) {
			return fmt.Errorf("%s: %q came back for %q: %w", d.LocalAddr().Network(), got, line, err)
		}
	}
}

func (d *dialogue) read(got []byte) error {
	for n := 0; n < len(got); {
		k, err := d.Read(got[n:])
		if err != nil {
			return err
		}
		n += k
	}
	return nil
}

// fast asks until packets of both directions take the fast path, at both nodes.
func fast(t *testing.T, d *dialogue, at ...*overlaid) {
	t.Helper()
	before := make([]api.OverlayEnd, len(at))
	for i, c := range at {
		var err error
		before[i], err = c.overlayEnd(c.name)
		must(t, err)
	}
	await(t, "both directions to be fast", func() error {
		for range 20 {
			if err := d.ask(); err != nil {
				return err
			}
		}
		var slow []error
		for i, c := range at {
			now, err := c.overlayEnd(c.name)
			if err == nil && (now.Egress.Fast < before[i].Egress.Fast+20 || now.Ingress.Fast < before[i].Ingress.Fast+20) {
				err = fmt.Errorf("%s is at %+v, was at %+v; %v", c.name, now, before[i], c.run("overlay", "--total"))
			}
			slow = append(slow, err)
		}
		return errors.Join(slow...)
	})
}
