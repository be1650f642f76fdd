package e2e

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"net"
	"path/filepath"
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
func joined(t *testing.T, a *agent, d *testkit.Docker, network, name string) *overlaid {
	t.Helper()
	d.Must(t, "run", "-d", "--name", name, "--network", network, d.Image, "sleep", "1000")
	c := &overlaid{agent: a, engine: d, name: name}
	c.addr = d.Must(t, "inspect", "--format", "{{(index .NetworkSettings.Networks \""+network+"\").IPAddress}}", name)
	return c
}

// do runs fn in the network of the container.
func (c *overlaid) do(fn func() error) error {
	c.t.Helper()
	pid := c.engine.Must(c.t, "inspect", "--format", "{{.State.Pid}}", c.name)
	return in(filepath.Join("/proc", pid, "ns", "net"), fn)
}

// in runs fn in a network namespace.
func in(path string, fn func() error) error {
	ns, err := netdev.Open(path)
	if err != nil {
		return err
	}
	defer ns.Close()
	return ns.Do(fn)
}

// echo answers at port 9000, by TCP and UDP, until the test ends.
func (c *overlaid) echo() {
	c.t.Helper()
	var p net.PacketConn
	must(c.t, c.do(func() (err error) {
		if p, err = net.ListenPacket("udp", ":9000"); err != nil {
			return err
		}
		return testkit.Serve(c.t, ":9000", func(c net.Conn) io.Writer { return c })
	}))
	c.t.Cleanup(func() { p.Close() })
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
}

// dialogue is a connection with an echo.
type dialogue struct {
	net.Conn
	t *testing.T
	n int
}

// dial connects to an address from where in runs it.
func dial(t *testing.T, in func(func() error) error, proto, to string) *dialogue {
	t.Helper()
	d := &dialogue{t: t}
	must(t, in(func() (err error) {
		d.Conn, err = net.DialTimeout(proto, to, patience)
		return err
	}))
	t.Cleanup(func() { d.Close() })
	return d
}

// ask sends a line and waits for its echo. It sends a lost datagram again.
func (d *dialogue) ask() error {
	d.n++
	if d.LocalAddr().Network() != "udp" {
		return d.try(patience)
	}
	return within(patience, func() error { return d.try(time.Second / 4) })
}

// denied checks that nothing sent by UDP a second from now, or later, comes back.
func (d *dialogue) denied() {
	d.t.Helper()
	for began, late := time.Now(), false; !late; {
		late = time.Since(began) > time.Second
		d.n++
		if err := d.try(time.Second / 20); err == nil && late {
			d.t.Error("a second after it was denied, a datagram comes back")
		}
	}
}

// try sends the line once.
func (d *dialogue) try(wait time.Duration) error {
	line := fmt.Appendf(nil, "%80d\n", d.n)
	got := make([]byte, len(line))
	err := d.SetDeadline(time.Now().Add(wait))
	d.Write(line) // by UDP, an error is an earlier one's
	for err == nil && !bytes.Equal(got, line) {
		_, err = io.ReadFull(d, got)
	}
	return err
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
