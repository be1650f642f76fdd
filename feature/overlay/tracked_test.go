package overlay

import (
	"fmt"
	"io"
	"net"
	"net/netip"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/kernel/bpf"
)

// tracks returns a node's conntrack entry of a connection from a local port: the TCP state, and its
// timeout; false: none.
func (n *node) tracks(t testing.TB, c net.Conn) (state uint8, left uint32, ok bool) {
	t.Helper()
	port := netip.MustParseAddrPort(c.LocalAddr().String()).Port()
	must(t, n.inside.Do(func() error {
		list, err := netlink.ConntrackTableList(netlink.ConntrackTable, unix.AF_INET)
		if err != nil {
			return err
		}
		for _, f := range list {
			if f.Forward.SrcPort != port {
				continue
			}
			left, ok = f.TimeOut, true
			if tcp, is := f.ProtoInfo.(*netlink.ProtoInfoTCP); is {
				state = tcp.State
			}
		}
		return nil
	}))
	return state, left, ok
}

// A connection that was fast for much more than a window, or for more than half of all sequence
// numbers, closes in order, with netfilter dropping what conntrack calls invalid: the entries leave
// ESTABLISHED, or end with the timeout of a closed one.
func TestClosesInOrder(t *testing.T) {
	t.Parallel()
	r := newRig(t, routed)
	r.onTracked()
	echo(t, r.nodes[1].web)
	must(t, r.nodes[1].web.Do(func() error {
		return testkit.Serve(t, ":9002", func(net.Conn) io.Writer { return io.Discard })
	}))
	for _, how := range []string{"FIN", "RST", "RST after 2.5 GiB"} {
		t.Run(how, func(t *testing.T) {
			r.T = t
			d := dial(t, r.nodes[0].web, "tcp", r.nodes[1].addr)
			r.fast(d, 60000)
			for range 200 { // 12 MB each way, the windows are of some
				d.ask(t, 60000)
			}
			if how == "RST after 2.5 GiB" {
				d = dialAt(t, r.nodes[0].web, "tcp", r.nodes[1].addr+":9002")
				before := r.nodes[0].report(t).Egress.Fast
				for range 2560 {
					_, err := d.Write(make([]byte, 1<<20))
					must(t, err)
				}
				if fast := r.nodes[0].report(t).Egress.Fast - before; fast < 2560 {
					t.Errorf("%d packets were fast", fast)
				}
			}
			for _, n := range r.nodes {
				if state, _, ok := n.tracks(t, d); !ok || state != 3 { // TCP_CONNTRACK_ESTABLISHED
					t.Fatalf("before: state %d, %v", state, ok)
				}
			}
			if how != "FIN" {
				must(t, d.Conn.(*net.TCPConn).SetLinger(0))
			}
			must(t, d.Close())
			for i, n := range r.nodes {
				testkit.Await(t, fmt.Sprint("the entry goes at node ", i), func() bool {
					state, left, ok := n.tracks(t, d)
					return !ok || state != 3 || left <= 10 // nf_conntrack_tcp_timeout_close
				})
			}
		})
	}
}

// A slow packet of a connection that conntrack is ready for does not undo that.
func TestStaysReady(t *testing.T) {
	r := newRig(t, routed)
	r.onTracked()
	echo(t, r.nodes[1].web)
	d := dial(t, r.nodes[0].web, "tcp", r.nodes[1].addr)
	r.fast(d, 16)
	n := r.nodes[0]
	n.f.asking.Lock()
	for number, table := range n.f.tables { // nobody answers from now on
		table.Close()
		delete(n.f.tables, number)
	}
	n.f.asking.Unlock()
	var k overlayFlowKey
	var f overlayFlow
	flows := n.f.cache.maps.FlOvFlows
	must(t, keys(flows, &k, func() {}))
	must(t, flows.Lookup(k, &f))
	for dir := range f.Dir {
		f.Dir[dir].Gen, f.Dir[dir].Until = 0, bpf.Clock()+3600e9
	}
	must(t, flows.Put(k, f))
	testkit.Await(t, "it is learnt anew", func() bool {
		d.ask(t, 16)
		must(t, flows.Lookup(k, &f))
		return f.Dir[out].Gen > 0 && f.Dir[in].Gen > 0
	})
	if f.Ready != 1 {
		t.Error("it is not ready")
	}
}

// Where conntrack cannot be made ready for them, in a zone or as node-local DNS has it, connections do
// not stall.
func TestNotReady(t *testing.T) {
	t.Parallel()
	for _, rule := range []string{"ct zone set 5", "notrack"} {
		t.Run(rule, func(t *testing.T) {
			t.Parallel()
			r := newRig(t, routed)
			for _, n := range r.nodes {
				n.nft(t, "table inet fl_raw { chain p { type filter hook prerouting priority -300; "+rule+"; }; }")
			}
			r.onTracked()
			echo(t, r.nodes[1].web)
			d := dial(t, r.nodes[0].web, "tcp", r.nodes[1].addr)
			for began := time.Now(); time.Since(began) < 3*lease; {
				d.ask(t, 60000)
			}
		})
	}
}

// While a UDP flow is fast, the slow packet of each lease keeps its conntrack entry alive, also one
// with a short timeout.
func TestKeepsEntry(t *testing.T) {
	t.Parallel()
	r := newRig(t, routed)
	for _, n := range r.nodes {
		must(t, n.inside.Sysctl("netfilter/nf_conntrack_udp_timeout", "3"))
		must(t, n.inside.Sysctl("netfilter/nf_conntrack_udp_timeout_stream", "3"))
	}
	r.onTracked()
	newSink(t, r.nodes[1].web)
	s := newStream(t, r.nodes[0].web, r.nodes[1].addr)
	r.quick(s)
	for _, n := range r.nodes { // an entry that had ended would not come again
		n.nft(t, "table inet fl_new { chain f { type filter hook forward priority 5; ct state new udp dport 9001 drop; ct state new udp sport 9001 drop; }; }")
	}
	last := time.Now()
	for began := last; time.Since(began) < 4*time.Second; {
		sent := time.Now()
		if sent.Sub(last) > time.Second {
			return // the machine has paused: the entry may have ended for that reason
		}
		if !s.call(10 * time.Second) {
			t.Fatal("a datagram is lost")
		}
		last = sent
	}
	r.quick(s)
}
