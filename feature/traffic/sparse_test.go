package traffic_test

import (
	"encoding/binary"
	"errors"
	"net"
	"net/netip"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/feature/traffic"
	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/kernel/netdev"
	"github.com/fairlead-project/fairlead/kernel/qdisc"
	"github.com/fairlead-project/fairlead/lab/sandbox"
	"github.com/fairlead-project/fairlead/policy"
)

// datagramTo returns a frame of 128 bytes, with a separate flow for each port. Port 0 gives a fragment,
// which has no flow.
func datagramTo(port uint16) []byte {
	b := make([]byte, 128)
	b[12] = 8 // IPv4, with a header of 20 bytes
	b[14], b[23] = 0x45, unix.IPPROTO_UDP
	binary.BigEndian.PutUint16(b[36:], port)
	if port == 0 {
		b[20] = 0x20 // more fragments
	}
	return b
}

// A flow is sparse for a burst, then bulk while it lasts, and sparse again after a pause. Packets
// without a flow count as one flow. Two flows in one cell make each other bulk, but no others.
func TestSparse(t *testing.T) {
	testkit.OnKernels(t)
	testkit.NeedRoot(t)
	const arp = 1 << 16
	sort := func(cost, burst, pause time.Duration) (sparse func(flow int) bool) {
		t.Helper()
		p, done, err := traffic.Sorter(cost, burst, pause)
		must(t, err)
		t.Cleanup(func() { must(t, done()) })
		return func(flow int) bool {
			t.Helper()
			frame := datagramTo(uint16(flow))
			if flow == arp {
				frame[13] = 6
			}
			class, err := p.Run(&ebpf.RunOptions{Data: frame})
			must(t, err)
			if class != qdisc.Handle|qdisc.MinorSparse && class != qdisc.Handle|qdisc.MinorDefault {
				t.Fatalf("flow %d goes into class %x", flow, class)
			}
			return class == qdisc.Handle|qdisc.MinorSparse
		}
	}
	// 64 bytes cost an hour, so that no time passes in which a flow could pause.
	sparse := sort(time.Hour, 5*time.Hour, 5*time.Hour)
	for _, flow := range []int{1, 2, 0} {
		for i, want := range []bool{true, true, false, false, false} { // two hours each
			if got := sparse(flow); got != want {
				t.Errorf("packet %d of flow %d: sparse is %v", i, flow, got)
			}
		}
	}
	if sparse(arp) {
		t.Error("what has no flow is bulk by its fragments, and sparse as ARP")
	}
	if !sort(time.Hour, 5*time.Hour, 5*time.Hour)(arp) {
		t.Error("another queue counts the flows of this one")
	}
	others := 0
	for flow := 100; flow < 100+480; flow++ {
		if !sparse(flow) {
			others++
		}
	}
	if others == 0 || others > 100 { // three cells are bulk, and few have a third flow
		t.Errorf("of 480 new flows %d are bulk", others)
	}
	const burst, pause = 50 * time.Millisecond, 20 * time.Millisecond
	sparse = sort(5*time.Millisecond, burst, pause)
	testkit.Await(t, "a flow that is bulk", func() bool {
		for range 100 {
			if !sparse(1) {
				return true
			}
		}
		return false
	})
	time.Sleep(pause + 10*time.Millisecond) // its packet costs 10 ms
	if !sparse(1) {
		t.Error("it is bulk after a pause")
	}
}

// Beside a bulk queue, packets of other flows get through first, in both directions, whatever class the
// bulk claims. The container's rows count both classes.
func TestCeilSparse(t *testing.T) {
	testkit.OnKernels(t)
	needSharing(t)
	h := newHost(t, gbit)
	must(t, h.ns.Bridge("br0", netip.MustParsePrefix("10.70.0.254/24")))
	must(t, h.ns.Bridge("br1", netip.MustParsePrefix("10.71.0.254/24")))
	box, c := h.add("one", "10.70.0.2/24", h.ns)
	h.Wire(sandbox.End{Box: h.ns, Name: "hsecond", Bridge: "br1"}, sandbox.End{Box: box, Name: "eth1", Addr: netip.MustParsePrefix("10.71.0.2/24")})
	one, second, veth := c.Interfaces[0], h.Veth(box, "eth1", h.ns, "hsecond"), h.Index(h.ns, "hone")
	h.start()
	before := h.state()
	// However busy the machine is, the queue takes more than a minute to drain.
	const ceil, bulk = 8000, 60
	for _, way := range []struct {
		name       string
		direction  traffic.Direction
		from, at   *sandbox.Box
		to, dev    string
		interfaces []container.Interface
	}{
		{"sent", traffic.Egress, box, h.ns, "10.70.0.254:9000", netdev.IFBName(veth, false), []container.Interface{one}},
		{"received", traffic.Ingress, h.ns, box, "10.70.0.2:9000", "hone", []container.Interface{one}},
		{"received by two networks", traffic.Ingress, h.ns, box, "10.70.0.2:9000", netdev.IFBName(veth, true), []container.Interface{one, second}},
	} {
		t.Run(way.name, func(t *testing.T) {
			c.Interfaces = way.interfaces
			must(t, h.due(c, policy.Net{Ceil: ceil}, policy.Net{Ceil: ceil}))
			var in net.PacketConn
			must(t, way.at.Do(func() (err error) { in, err = net.ListenPacket("udp", ":9000"); return err }))
			defer in.Close()
			must(t, in.(*net.UDPConn).SetReadBuffer(1<<20))
			send := func(n, size int, options ...int) {
				must(t, way.from.Do(func() error {
					out, err := net.Dial("udp", way.to)
					if err != nil {
						return err
					}
					defer out.Close()
					return errors.Join(out.(*net.UDPConn).SetWriteBuffer(1<<20), testkit.SetSockopts(out.(*net.UDPConn), options...), testkit.SendDatagrams(out, n, size))
				}))
			}
			send(bulk, 1400, unix.SOL_SOCKET, unix.SO_PRIORITY, int(qdisc.Handle|qdisc.MinorSparse))
			for range 4 { // one may share its cell with the bulk
				send(1, 100)
			}
			first := 0
			for buf := make([]byte, 2000); ; first++ {
				must(t, in.SetReadDeadline(time.Now().Add(time.Minute)))
				n, _, err := in.ReadFrom(buf)
				must(t, err)
				if n == 100 {
					break
				}
			}
			if first > bulk/2 {
				t.Errorf("%d of %d packets of bulk came before", first, bulk)
			}
			passed, rows := h.passedAt(h.ns, way.dev).Packets, uint64(0)
			for _, row := range h.traffic.Read().Rows {
				if row.Direction == string(way.direction) && row.Container == api.ID(c.ID) {
					rows += row.Packets
				}
			}
			if rows < passed || passed < 2 {
				t.Errorf("the rows have %d packets, the queue %d", rows, passed)
			}
			h.removes(before, c.ID)
		})
	}
}
