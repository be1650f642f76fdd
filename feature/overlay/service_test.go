package overlay

import (
	"encoding/binary"
	"errors"
	"net"
	"net/netip"
	"sync/atomic"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/internal/testkit/topology"
	"github.com/fairlead-project/fairlead/kernel/conntrack"
	"github.com/fairlead-project/fairlead/kernel/netdev"
	"github.com/fairlead-project/fairlead/lab/sandbox"
)

// newServices returns two nodes; behind the second are two backends at port 9001.
func newServices(t *testing.T) (r *rig, backends [2]*sandbox.Box) {
	t.Helper()
	r = newRig(t, routed)
	far := r.nodes[1]
	second := r.Create(sandbox.Spec{Name: "second"})
	c := r.join(far, second, "veth1", "", "10.244.1.3", "fd00:244:1::3")
	r.onTracked()
	must(t, far.applyTo(t, c, true))
	return r, [2]*sandbox.Box{far.web, second}
}

// counter counts the lookups in conntrack, and the failed ones.
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

// After a flow's conntrack entry has gone, which the kernel does not report, packets go to the next
// backend once the lease is over: to another container, or to the sender itself.
func TestServiceMoves(t *testing.T) {
	t.Parallel()
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

// A new connection uses the ports of one that was fast: it goes where its own entry says.
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

// ipvs makes a service of a node, as kube-proxy does in this mode: its address is local, and conntrack
// has its connections. The returned function takes its backend away.
func (n *node) ipvs(t *testing.T, addr, backend string) (end func()) {
	t.Helper()
	family, err := netlink.GenlFamilyGet("IPVS")
	if err != nil {
		testkit.Skip(t, "kernel has no IPVS")
	}
	must(t, n.inside.Sysctl("ipv4/vs/conntrack", "1"))
	must(t, n.inside.Add(&netlink.Dummy{}, sandbox.End{Box: n.inside, Name: "kube-ipvs0", Addr: netip.MustParsePrefix(addr + "/32")}))
	const newService, newDest, delDest = 1, 5, 7 // linux/ip_vs.h
	port := func(p uint16) []byte { return binary.BigEndian.AppendUint16(nil, p) }
	ask := func(command uint8, attrs ...*nl.RtAttr) {
		must(t, n.inside.Do(func() error {
			r := nl.NewNetlinkRequest(int(family.ID), unix.NLM_F_ACK)
			r.AddData(&nl.Genlmsg{Command: command, Version: 1})
			for _, a := range attrs {
				r.AddData(a)
			}
			_, err := r.Execute(unix.NETLINK_GENERIC, 0)
			return err
		}))
	}
	var ends []func()
	for _, proto := range []uint16{unix.IPPROTO_TCP, unix.IPPROTO_UDP} {
		service := nl.NewRtAttr(1|unix.NLA_F_NESTED, nil)
		service.AddRtAttr(1, nl.Uint16Attr(unix.AF_INET))
		service.AddRtAttr(2, nl.Uint16Attr(proto))
		service.AddRtAttr(3, netip.MustParseAddr(addr).AsSlice())
		service.AddRtAttr(4, port(21)) // for this one alone IPVS has connections tracked where no rule has
		service.AddRtAttr(6, nl.ZeroTerminated("rr"))
		service.AddRtAttr(7, make([]byte, 8)) // flags and their mask
		service.AddRtAttr(8, nl.Uint32Attr(0))
		service.AddRtAttr(9, nl.Uint32Attr(^uint32(0)))
		ask(newService, service)
		dest := nl.NewRtAttr(2|unix.NLA_F_NESTED, nil)
		dest.AddRtAttr(1, netip.MustParseAddr(backend).AsSlice())
		dest.AddRtAttr(2, port(9001))
		dest.AddRtAttr(3, nl.Uint32Attr(0)) // by NAT
		dest.AddRtAttr(4, nl.Uint32Attr(1))
		dest.AddRtAttr(5, nl.Uint32Attr(0))
		dest.AddRtAttr(6, nl.Uint32Attr(0))
		ask(newDest, service, dest)
		ends = append(ends, func() { ask(delDest, service, dest) })
	}
	return func() {
		for _, end := range ends {
			end()
		}
	}
}

// Flows to a service of IPVS are fast, too, and get no answer once it has no backend.
func TestServiceIPVS(t *testing.T) {
	testkit.OnKernels(t)
	r := makeRig(&rig{Host: topology.New(t), form: routed})
	end := r.nodes[0].ipvs(t, "10.96.0.10", "10.244.1.2")
	r.onTracked()
	echo(t, r.nodes[1].web)
	var flows []*dialogue
	for _, proto := range []string{"udp", "tcp"} {
		flows = append(flows, dialAt(t, r.nodes[0].web, proto, "10.96.0.10:21"))
		r.fast(flows[len(flows)-1], 100)
	}
	end()
	for _, d := range flows {
		testkit.Await(t, "a question without an answer", func() bool {
			must(t, d.SetDeadline(time.Now().Add(time.Second)))
			_, asked := d.Write(cookie)
			_, err := d.Read(make([]byte, len(cookie)))
			return errors.Join(asked, err) != nil
		})
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
