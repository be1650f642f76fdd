package overlay

import (
	"fmt"
	"net"
	"net/netip"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/fairlead-project/fairlead/internal/testkit"
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

// Long flows to a service are fast, and their answers come from its address, as sent.
func TestService(t *testing.T) {
	r, backends := newServices(t)
	near := r.nodes[0]
	near.nft(t, `table inet fl_svc { chain n { type nat hook prerouting priority -100;
		ip daddr 10.96.0.10 meta l4proto { tcp, udp } th dport 80 dnat ip to 10.244.1.2:9001;
		ip6 daddr fd00:96::10 meta l4proto { tcp, udp } th dport 80 dnat ip6 to [fd00:244:1::2]:9001; }; }`)
	echo(t, backends[0])
	for proto, sizes := range map[string][]int{"udp": {1, 1200}, "tcp": {1, 1200, 60000}} {
		for _, to := range []string{"10.96.0.10:80", "[fd00:96::10]:80"} {
			for _, size := range sizes {
				t.Run(fmt.Sprint(proto, " ", to, " ", size), func(t *testing.T) {
					r.T = t
					if to[0] == '[' && !takesOff(t) {
						testkit.Skip(t, "kernel cannot take IPv4 off IPv6 (6.3)")
					}
					r.fast(dialAt(t, near.web, proto, to), size)
				})
			}
		}
	}
}

// A flow whose conntrack entry goes reaches the next backend, and the first one nevermore. The
// kernel tells nobody of that: the lease ends.
func TestServiceMoves(t *testing.T) {
	r, backends := newServices(t)
	near := r.nodes[0]
	near.nft(t, `table ip fl_svc { chain n { type nat hook prerouting priority -100;
		ip daddr 10.96.0.10 udp dport 9001 dnat to numgen inc mod 2 map { 0 : 10.244.1.2, 1 : 10.244.1.3 }; }; }`)
	sinks := [2]*sink{newSink(t, backends[0]), newSink(t, backends[1])}
	s := newStream(t, near.web, "10.96.0.10")
	r.quick(s)
	first := 0
	if len(sinks[1].of(s)) > 0 {
		first = 1
	}
	if len(sinks[1-first].of(s)) > 0 {
		t.Fatal("it goes to both")
	}
	must(t, near.inside.Do(func() error {
		f := &netlink.ConntrackFilter{}
		must(t, f.AddIP(netlink.ConntrackOrigDstIP, net.ParseIP("10.96.0.10")))
		n, err := netlink.ConntrackDeleteFilters(netlink.ConntrackTable, unix.AF_INET, f)
		if err == nil && n != 1 {
			t.Errorf("%d entries are deleted", n)
		}
		return err
	}))
	began := time.Now()
	testkit.Await(t, "it goes to the other backend", func() bool { s.calls(t); return len(sinks[1-first].of(s)) > 0 })
	t.Logf("after %v", time.Since(began))
	had := len(sinks[first].of(s))
	r.quick(s)
	if n := len(sinks[first].of(s)); n != had {
		t.Errorf("%d datagrams go to the first backend", n-had)
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
	for i := range 4 {
		var c net.Conn
		must(t, near.web.Do(func() (err error) {
			c, err = (&net.Dialer{LocalAddr: from, Timeout: 5 * time.Second}).Dial("tcp", "10.96.0.10:9001")
			return err
		}))
		from = c.LocalAddr().(*net.TCPAddr)
		r.fast(&dialogue{Conn: c}, 100)
		must(t, c.(*net.TCPConn).SetLinger(0)) // so that its ports are free at once
		must(t, c.Close())
		t.Logf("connection %d from %v", i, netip.MustParseAddrPort(from.String()))
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
				if !d.ask(t, 100, 10*time.Second) {
					t.Fatal("no answer")
				}
			}
			if now := near.report(t); now.Egress.Fast != before.Egress.Fast || now.Ingress.Fast != before.Ingress.Fast || now.Egress.Slow == before.Egress.Slow {
				t.Errorf("%s %s: %+v", proto, to, now)
			}
		}
	}
}
