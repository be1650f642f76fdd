package overlay

import (
	"net"
	"sync/atomic"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/fairlead-project/fairlead/kernel/conntrack"
	"github.com/fairlead-project/fairlead/kernel/netdev"
	"github.com/fairlead-project/fairlead/lab/sandbox"
)

// newServices returns two nodes; behind the second are two backends at port 9001.
func newServices(t *testing.T) (r *rig, backends [2]*sandbox.Box) {
	t.Helper()
	r = newRig(t, routed)
	far := r.nodes[1]
	second := r.Create(sandbox.Spec{Name: named("second", 1)})
	c := r.join(far, second, "veth1", "", "10.244.1.3", "fd00:244:1::3")
	r.onTracked()
	must(t, far.applyTo(t, c, true))
	return r, [2]*sandbox.Box{far.web, second}
}

// counter counts the questions to conntrack, and those in vain.
type counter struct {
	table
	asked, vain *atomic.Int64
}

func (c counter) BeLiberal(tuples []conntrack.Tuple) ([]bool, error) {
	found, err := c.table.BeLiberal(tuples)
	for _, is := range found {
		if c.asked.Add(1); !is {
			c.vain.Add(1)
		}
	}
	return found, err
}

// Long flows to a service are fast, and their answers come from its address, as sent; conntrack is
// asked once for each. They go on, and fast, if only the rules are removed, as their entries stay.
func TestService(t *testing.T) {
	r, backends := newServices(t)
	near := r.nodes[0]
	near.nft(t, `table inet fl_svc { chain n { type nat hook prerouting priority -100;
		ip daddr 10.96.0.10 meta l4proto { tcp, udp } th dport 80 dnat ip to 10.244.1.2:9001;
		ip6 daddr fd00:96::10 meta l4proto { tcp, udp } th dport 80 dnat ip6 to [fd00:244:1::2]:9001; }; }`)
	echo(t, backends[0])
	var asked, vain atomic.Int64
	for _, n := range r.nodes {
		n.f.asking.Lock()
		for number, table := range n.f.tables {
			n.f.tables[number] = counter{table, &asked, &vain}
		}
		n.f.asking.Unlock()
	}
	long := []*dialogue{dialAt(t, near.web, "udp", "10.96.0.10:80"), dialAt(t, near.web, "tcp", "10.96.0.10:80")}
	r.fastTo(t, "10.96.0.10", "fd00:96::10", "80")
	for _, d := range long {
		r.fast(d, 1)
	}
	near.told(t, netdev.NFTChanged, func() { near.nft(t, "flush chain inet fl_svc n") })
	for _, d := range long {
		r.fast(d, 1)
	}
	if asked.Load() == 0 || vain.Load() > 0 {
		t.Errorf("%d of %d questions were in vain", vain.Load(), asked.Load())
	}
}

// What is sent more than a lease after the conntrack entry of its flow has gone, of which the kernel
// tells nobody, goes to the next backend: another container, or the sender itself.
func TestServiceMoves(t *testing.T) {
	for _, second := range []string{"10.244.1.3", "10.244.0.2"} {
		t.Run(second, func(t *testing.T) {
			r, backends := newServices(t)
			near, box := r.nodes[0], backends[1]
			if second == near.addr {
				box = near.web // as CNI sets it, for bridges that netfilter sees
				r.Change(near.inside, "veth0", func(h *netlink.Handle, l netlink.Link) error { return h.LinkSetHairpin(l, true) })
			}
			near.nft(t, `table ip fl_svc {
				chain n { type nat hook prerouting priority -100;
					ip daddr 10.96.0.10 udp dport 9001 dnat to numgen inc mod 2 map { 0 : 10.244.1.2, 1 : `+second+` }; };
				chain m { type nat hook postrouting priority 100; ip saddr 10.244.0.2 ip daddr 10.244.0.2 masquerade; }; }`)
			from := newSink(t, backends[0])
			newSink(t, box)
			s := newStream(t, near.web, "10.96.0.10")
			r.quick(s)
			must(t, near.inside.Do(func() error {
				f := &netlink.ConntrackFilter{}
				must(t, f.AddIP(netlink.ConntrackOrigDstIP, net.ParseIP("10.96.0.10")))
				n, err := netlink.ConntrackDeleteFilters(netlink.ConntrackTable, unix.AF_INET, f)
				if err == nil && n != 1 {
					t.Errorf("%d entries are deleted", n)
				}
				return err
			}))
			for began := time.Now(); time.Since(began) < lease+coarse; {
				s.calls(t)
			}
			late, before := s.sent+1, near.report(t)
			for range 100 {
				s.calls(t)
			}
			if list := from.of(s); list[len(list)-1] >= late {
				t.Errorf("datagram %d goes to the first backend, the first late one is %d", list[len(list)-1], late)
			}
			if second != near.addr {
				r.quick(s)
			} else if now := near.report(t); now.Egress.Fast > before.Egress.Fast {
				t.Errorf("to itself: %+v, then %+v", before.Egress, now.Egress)
			}
		})
	}
}

// A connection begins anew with the ports of one that was fast: it goes where its own entry says.
func TestServiceBeginsAnew(t *testing.T) {
	r, backends := newServices(t)
	near := r.nodes[0]
	near.nft(t, `table ip fl_svc { chain n { type nat hook prerouting priority -100;
		ip daddr 10.96.0.10 tcp dport 9001 dnat to numgen inc mod 2 map { 0 : 10.244.1.2, 1 : 10.244.1.3 }; }; }`)
	for _, b := range backends {
		echo(t, b)
	}
	from := &net.TCPAddr{}
	for range 4 {
		var c net.Conn
		must(t, near.web.Do(func() (err error) {
			c, err = (&net.Dialer{LocalAddr: from, Timeout: 5 * time.Second}).Dial("tcp", "10.96.0.10:9001")
			return err
		}))
		from = c.LocalAddr().(*net.TCPAddr)
		r.fast(&dialogue{Conn: c}, 100)
		must(t, c.(*net.TCPConn).SetLinger(0)) // so that its ports are free at once
		must(t, c.Close())
	}
	for range 100 { // short ones
		d := dial(t, near.web, "tcp", "10.96.0.10")
		d.ask(t, 100)
		must(t, d.Close())
	}
}

// What else NAT changes stays slow, and right.
func TestServiceMasqueraded(t *testing.T) {
	r, backends := newServices(t)
	near := r.nodes[0]
	near.nft(t, `table ip fl_svc {
		chain n { type nat hook prerouting priority -100; ip daddr 10.96.0.10 dnat to 10.244.1.2; };
		chain m { type nat hook postrouting priority 100; oifname "vx0" ip daddr 10.244.1.2 masquerade; }; }`)
	echo(t, backends[0])
	for _, proto := range []string{"udp", "tcp"} {
		for _, to := range []string{"10.96.0.10", "10.244.1.2"} {
			d := dial(t, near.web, proto, to)
			before := near.report(t)
			for range 300 {
				d.ask(t, 100)
			}
			if now := near.report(t); now.Egress.Fast != before.Egress.Fast || now.Ingress.Fast != before.Ingress.Fast || now.Egress.Slow == before.Egress.Slow {
				t.Errorf("%s %s: %+v", proto, to, now)
			}
		}
	}
}
