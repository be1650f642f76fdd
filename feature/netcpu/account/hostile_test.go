package account

import (
	"errors"
	"fmt"
	"net"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/fairlead-project/fairlead/bench/load"
	"github.com/fairlead-project/fairlead/kernel/netdev"
	"github.com/fairlead-project/fairlead/kernel/qdisc"
	"github.com/fairlead-project/fairlead/sandbox"
)

// flooding calls send in a box again and again, each time for some packets, until
// the test ends.
func (f *fabric) flooding(b *sandbox.Box, send func() error) {
	f.t.Helper()
	var stop atomic.Bool
	done := make(chan error, 1)
	must(f.t, b.Do(send)) // what does not work at all is told here
	go func() {
		done <- b.Do(func() error {
			for !stop.Load() {
				if err := send(); err != nil {
					return err
				}
				time.Sleep(200 * time.Microsecond)
			}
			return nil
		})
	}()
	f.t.Cleanup(func() {
		stop.Store(true)
		if err := <-done; err != nil {
			f.t.Error(err)
		}
	})
}

// TestForged has a container that says of its packets that they are another's:
// by their source, by its device's address, by marks and priorities, and by the
// very field that fairlead tells them by. They are charged to who has sent them.
func TestForged(t *testing.T) {
	for _, to := range []string{"10.66.0.1:9000", "10.66.0.4:9000"} { // outside, and on the same host
		t.Run(to, func(t *testing.T) {
			f := newFabric(t)
			victim, bad, third := f.add("victim", 2, f.host), f.add("bad", 3, f.host), f.add("third", 4, f.host)
			f.load(f.wire, 1, "udp-recv", "--listen", ":9000")
			f.load(third, 1, "udp-recv", "--listen", ":9000")

			var mac string
			ns := f.ns(victim)
			links, err := ns.Links(netdev.MostLinks)
			must(t, err)
			for _, l := range links {
				if l.Name == "eth0" {
					mac = l.MAC
				}
			}
			f.ip(bad, "addr", "add", "10.66.0.2/32", "dev", "eth0")
			f.ip(bad, "link", "set", "eth0", "address", mac)
			slot, ok := f.m.Slot(f.ids[victim])
			if !ok {
				t.Fatal("the victim has no slot")
			}
			// More than it could do itself: that takes CAP_BPF in the host's namespace.
			stamp, err := f.m.load("fl_stamp", slot)
			must(t, err)
			defer stamp.Close()
			forge := qdisc.Hook{NS: f.ns(bad), Index: f.device(bad, "eth0", false).Ifindex, Egress: true, Name: "forge"}
			l, err := f.m.cfg.Hooks.Attach(forge, stamp, f.m.cfg.Owner)
			must(t, err)
			defer l.Close()

			claims := []uint32{slot, qdisc.Handle | slot, 0x66000000 | slot, 0xffffffff}
			n := 0
			f.flooding(bad, func() error {
				n++
				claim := claims[n%len(claims)]
				d := net.Dialer{LocalAddr: &net.UDPAddr{IP: net.ParseIP("10.66.0.2")}, Control: func(_, _ string, c syscall.RawConn) (err error) {
					cerr := c.Control(func(fd uintptr) {
						err = errors.Join(
							unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_PRIORITY, int(int32(claim))),
							unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_MARK, int(int32(claim))))
					})
					return errors.Join(cerr, err)
				}}
				c, err := d.Dial("udp", to)
				if err != nil {
					return err
				}
				defer c.Close()
				for range 20 {
					if _, err := c.Write(make([]byte, 100)); err != nil && !errors.Is(err, unix.ECONNREFUSED) {
						return err
					}
				}
				return nil
			})
			f.measure(while, func(d delta) {
				d.addsUp()
				var sent, others uint64
				for p := range Protocols {
					sent += d.of(bad).Send[p].Packets
					others += d.of(victim).Send[p].Packets + d.of(victim).Receive[p].Packets
				}
				// Neighbour discovery, and what the bridge brings it as it is named.
				if sent < 500 || others > sent/50 {
					d.t.Errorf("%d packets were charged to who sent them, %d to whom it named", sent, others)
				}
				if cpu := d.of(victim).CPU(); cpu > d.of(bad).CPU()/50 {
					d.t.Errorf("%v were charged to whom it named, %v to it", cpu, d.of(bad).CPU())
				}
			})
		})
	}
}

// TestShortFlows brings connections that begin and end at once, and datagrams of
// as many flows as there are ports. Nothing is kept for each of them: the
// accounts stay exact, nothing is lost, and a neighbour's are as right as ever.
func TestShortFlows(t *testing.T) {
	f := newFabric(t)
	many, steady := f.add("many", 2, f.host), f.add("steady", 3, f.host)
	receiver := f.load(steady, 0, "udp-recv", "--listen", ":9000")
	f.load(f.wire, 1, "udp-send", "--to", "10.66.0.3:9000", "--rate", "5000")
	f.load(many, 0, "udp-recv", "--listen", ":9000")

	var served sync.WaitGroup
	var listen net.Listener
	must(t, many.Do(func() (err error) { listen, err = net.Listen("tcp", "10.66.0.2:9001"); return err }))
	served.Add(1)
	go func() {
		defer served.Done()
		for {
			c, err := listen.Accept()
			if err != nil {
				return // closed below
			}
			c.Close()
		}
	}()
	t.Cleanup(func() { listen.Close(); served.Wait() })

	var flows atomic.Int64
	from, err := udpPort(f.wire)
	must(t, err)
	t.Cleanup(func() { unix.Close(from) }) // after the flood that uses it
	port := 0
	f.flooding(f.wire, func() error {
		for range 4 {
			c, err := net.Dial("tcp", "10.66.0.2:9001")
			if err != nil {
				return err
			}
			c.(*net.TCPConn).SetLinger(0) // or the ports would be used up
			c.Close()
			flows.Add(1)
		}
		for range 64 {
			port = port%60_000 + 1
			if err := unix.Sendto(from, make([]byte, 64), 0, &unix.SockaddrInet4{Port: 1024 + port, Addr: [4]byte{10, 66, 0, 2}}); err != nil && !errors.Is(err, unix.ECONNREFUSED) {
				return err
			}
			flows.Add(1)
		}
		return nil
	})
	var began int64
	var was load.Reading
	f.several(func() delta {
		began, was = flows.Load(), receiver.Read()
		return f.during(2 * while)
	}, func(d delta) {
		got := receiver.Read().Since(was)
		d.addsUp()
		n := flows.Load() - began
		if n < 2000 {
			d.t.Errorf("only %d flows", n)
		}
		mostly(d.t, fmt.Sprintf("both accounts, with %d flows", n), d.of(many).CPU()+d.of(steady).CPU(), d.here(), 0.9)
		if tcp := d.of(many).Receive[TCP].Packets; tcp == 0 || d.of(many).Receive[UDP].Packets == 0 {
			d.t.Errorf("%d packets of TCP, %d of UDP", tcp, d.of(many).Receive[UDP].Packets)
		}
		counted, came := float64(d.of(steady).Receive[UDP].Packets)/d.seconds, float64(got.Ops)/got.Seconds
		if counted < 0.9*came || counted > 1.1*came || came == 0 {
			d.t.Errorf("the neighbour gets %.0f packets/s, and is charged for %.0f", came, counted)
		}
	})
}

// udpPort opens a socket in a box.
func udpPort(b *sandbox.Box) (fd int, err error) {
	err = b.Do(func() (err error) {
		fd, err = unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
		return err
	})
	return fd, err
}
