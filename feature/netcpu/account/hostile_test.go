package account

import (
	"errors"
	"io"
	"net"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/hook"
	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/kernel/bpf"
	"github.com/fairlead-project/fairlead/kernel/qdisc"
	"github.com/fairlead-project/fairlead/lab/sandbox"
)

// TestForged has a container that marks its packets as another's: by source address, by its device's
// MAC address, by marks and priorities, and by the field that fairlead stamps. The sender pays for
// them.
func TestForged(t *testing.T) {
	testkit.InFull(t)
	f := newFabric(t, exactMeter(t))
	victim, bad, third := f.add("victim", 2), f.add("bad", 3), f.add("third", 4)
	f.Address(bad, "eth0", "10.66.0.2/32")
	hw := f.mac(victim, "eth0")
	f.Change(bad, "eth0", func(h *netlink.Handle, k netlink.Link) error { return h.LinkSetHardwareAddr(k, hw) })
	for _, addr := range f.ends { // the change of address made the device forget them
		must(t, bad.Neighbour("eth0", addr, mac(addr)))
	}
	slot := f.m.accounts[f.ids[victim]].slot
	// It could not do this itself: that takes CAP_BPF in the host's namespace.
	var forger hook.Set
	defer forger.Close()
	d := f.device(bad, "eth0", false)
	forge := hook.Place{Device: container.Device{NetNS: d.Netns, Index: d.Ifindex}, Egress: true, Name: "forge", Owner: f.m.cfg.Owner}
	must(t, forger.PutCopy(f.m.cfg.Ends, forge, func() (*bpf.Copy, error) { return f.m.stampOf(f.m.accounts[f.ids[victim]]) }))
	claims := []uint32{slot, qdisc.Handle | slot, 0x66000000 | slot, 0xffffffff}
	for _, c := range []struct {
		to string
		at *sandbox.Box
	}{{"10.66.0.1:9000", f.wire}, {"10.66.0.4:9000", third}} { // outside, and on the same host
		t.Run(c.to, func(t *testing.T) {
			f.begin(t)
			r := f.receive(c.at, 1, ":9000")
			must(t, bad.Do(func() error {
				for _, claim := range claims {
					if err := claimed(claim, c.to, packets/len(claims)); err != nil {
						return err
					}
				}
				return nil
			}))
			f.got(r, packets)
			f.expect(func(d delta) {
				d.sent(bad, UDP, packets, packets*sizeUDP4)
				d.nothing(victim)
				if c.at == third {
					d.received(third, UDP, packets, packets*sizeUDP4)
				} else {
					d.nothing(third)
				}
			})
		})
	}
}

// claimed sends datagrams from 10.66.0.2 with a mark and a priority.
func claimed(claim uint32, to string, count int) error {
	d := net.Dialer{LocalAddr: &net.UDPAddr{IP: net.ParseIP("10.66.0.2")}}
	c, err := d.Dial("udp", to)
	if err != nil {
		return err
	}
	defer c.Close()
	mark := int(int32(claim))
	if err := testkit.SetSockopts(c.(*net.UDPConn), unix.SOL_SOCKET, unix.SO_PRIORITY, mark, unix.SOL_SOCKET, unix.SO_MARK, mark); err != nil {
		return err
	}
	for range count {
		if _, err := c.Write(make([]byte, payload)); err != nil {
			return err
		}
		time.Sleep(time.Millisecond) // no queue overflows
	}
	return nil
}

// TestShortFlows sends connections that begin and end at once, and datagrams of many flows. The
// meter keeps no state for each of them: every packet is counted, nothing is lost, and a
// neighbour's account stays exact.
func TestShortFlows(t *testing.T) {
	testkit.InFull(t)
	f := newFabric(t, exactMeter(t))
	many, steady := f.add("many", 2), f.add("steady", 3)
	r := f.receive(steady, 0, ":9000")
	f.send(f.wire, 1, packets, "udp-send", "10.66.0.3:9000")

	must(t, many.Do(func() error {
		return testkit.Serve(t, "10.66.0.2:9001", func(net.Conn) io.Writer { return io.Discard })
	}))
	const connections = 50
	must(t, f.wire.Do(func() error {
		for range connections {
			c, err := net.Dial("tcp", "10.66.0.2:9001")
			if err != nil {
				return err
			}
			c.(*net.TCPConn).SetLinger(0) // or the ports would run out
			c.Close()
		}
		fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			return err
		}
		defer unix.Close(fd)
		for port := range packets { // without a listener
			if err := unix.Sendto(fd, make([]byte, payload), 0, &unix.SockaddrInet4{Port: 20000 + port, Addr: [4]byte{10, 66, 0, 2}}); err != nil && !errors.Is(err, unix.ECONNREFUSED) {
				return err
			}
			time.Sleep(time.Millisecond)
		}
		return nil
	}))
	f.got(r, packets)
	f.expect(func(d delta) {
		d.received(many, UDP, packets, packets*sizeUDP4)
		d.received(steady, UDP, packets, packets*sizeUDP4)
		// A connection has at least a SYN, an acknowledgement and a reset.
		a := d.of(many)
		if in, out := a.Receive[TCP], a.Send[TCP]; in.Packets < 2*connections || out.Packets < connections || in.CPU <= 0 || out.CPU <= 0 {
			d.t.Errorf("%d connections: received %+v, sent %+v", connections, in, out)
		}
		if s := d.of(steady); s.Receive[TCP] != (Work{}) || s.Send != ([Protocols]Work{}) {
			d.t.Errorf("the neighbour is charged %+v", s)
		}
	})
}
