package account

import (
	"fmt"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/lab/load"
	"github.com/fairlead-project/fairlead/lab/sandbox"
)

// With a queue in the way, packets go out in NET_TX and by timers, and are charged to their sender.
// The victim is chance.
func TestQdisc(t *testing.T) {
	testkit.InFull(t)
	f := newFabric(t, exactMeter(t))
	f.shape(f.host, "nic0", 500e3) // 1.7 ms for a packet
	a, b := f.add("a", 2), f.add("b", 3)
	victim := f.victim()
	r := f.receive(f.wire, 1, ":9000")
	// At once: queued packets go out while the senders do nothing.
	f.load(a, 0, "udp-send", "--to", "10.66.0.1:9000", "--size", fmt.Sprint(payload), "--count", fmt.Sprint(packets))
	f.load(b, 0, "udp-send", "--to", "10.66.0.1:9000", "--size", fmt.Sprint(payload), "--count", fmt.Sprint(packets/2))
	f.got(r, packets+packets/2)
	f.expect(func(d delta) {
		d.sent(a, UDP, packets, packets*sizeUDP4)
		d.sent(b, UDP, packets/2, packets/2*sizeUDP4)
		d.nothing(victim)
		if w := d.system().Send[UDP]; w != (Work{}) {
			d.t.Errorf("the system is charged %+v for sending", w)
		}
	})
}

// An IFB works in a tasklet: packets from the uplink pass it before they reach the bridge. Their
// owner is known only after it.
func TestIFB(t *testing.T) {
	testkit.InFull(t)
	f := newFabric(t, exactMeter(t))
	f.redirect(f.host, "nic0", "ifb0")
	a, b, other := f.add("a", 2), f.add("b", 3), f.add("other", 4)
	far := f.behindRouter(a, b)
	receivers := []*load.Board{f.receive(a, 0, ":9000"), f.receive(b, 0, ":9000")}
	for turn, shaped := range []bool{false, true} {
		t.Run(fmt.Sprint("shaped ", shaped), func(t *testing.T) {
			if shaped {
				f.shape(f.host, "ifb0", 2e6)
			}
			f.begin(t)
			f.send(far, 1, packets, "udp-send", "10.66.0.2:9000")
			f.send(far, 1, packets/2, "udp-send", "10.66.0.3:9000")
			for i, r := range receivers {
				f.got(r, uint64((1+turn)*packets/(1+i)))
			}
			f.expect(func(d delta) {
				d.received(a, UDP, packets, packets*sizeUDP4)
				d.received(b, UDP, packets/2, packets/2*sizeUDP4)
				d.nothing(other)
			})
		})
	}
}

// behindRouter adds senders behind a router: like packets from a NIC, their packets have no socket
// that would identify the sender.
func (f *fabric) behindRouter(boxes ...*sandbox.Box) *sandbox.Box {
	f.t.Helper()
	far := f.box("far")
	f.lab.wire(sandbox.End{Box: far, Name: "eth0", Addr: prefix("10.68.0.1/24")},
		sandbox.End{Box: f.wire, Name: "far", Addr: prefix("10.68.0.254/24")}, "")
	f.gateway(far, "10.68.0.254")
	must(f.t, f.wire.Sysctl("ipv4/ip_forward", "1"))
	for _, b := range boxes { // reverse path filtering may drop the source
		f.gateway(b, "10.66.0.1")
	}
	return far
}

// In a flood the kernel works in ksoftirqd: the time that packets take from it is recorded with its
// culprit.
func TestKsoftirqd(t *testing.T) {
	f := newFabric(t, exactMeter(t))
	box, other := f.add("box", 2), f.add("other", 3)
	victim := f.victim()
	f.load(box, 0, "udp-recv", "--listen", ":9000")
	flood := f.load(f.wire, 1, "udp-send", "--to", "10.66.0.2:9000", "--rate", "flood", "--size", fmt.Sprint(payload))
	theft := Theft{Victim: Party{Kind: Ksoftirqd}, Culprit: f.ids[box]}
	f.await(func() string {
		if f.between(f.began, f.read()).thefts[theft] <= 0 {
			return "nothing was taken from ksoftirqd"
		}
		return ""
	})
	flood.SetRate(0)
	f.expect(func(d delta) { d.nothing(other, victim) })
}

// Reordered packets, and the ones sent in place of missing packets, belong to the connection.
func TestReordered(t *testing.T) {
	testkit.InFull(t)
	f := newFabric(t, exactMeter(t))
	// Without netem: every second packet takes the slower way.
	f.segmented(f.wire, "wire")
	f.shape(f.wire, "wire", 10e9, 20e6)
	f.Change(f.wire, "wire", func(h *netlink.Handle, k netlink.Link) error {
		return h.FilterAdd(&netlink.U32{
			FilterAttrs: netlink.FilterAttrs{LinkIndex: k.Attrs().Index, Parent: netlink.MakeHandle(1, 0), Priority: 1, Protocol: unix.ETH_P_IP},
			ClassId:     netlink.MakeHandle(1, 2),
			// The last bit of the IP header's identification.
			Sel: &netlink.TcU32Sel{Nkeys: 1, Flags: netlink.TC_U32_TERMINAL, Keys: []netlink.TcU32Key{{Mask: 0x10000, Val: 0x10000, Off: 4}}},
		})
	})
	box, other := f.add("box", 2), f.add("other", 3)
	r := f.load(box, 0, "tcp-recv", "--listen", ":9000")
	f.send(f.wire, 1, writes, "tcp-send", "10.66.0.2:9000")
	f.gotBytes(r, stream)
	if counter(t, box, "netstat", "TcpExt:", "TCPOFOQueue") == 0 {
		t.Error("no packet was out of order: nothing was tested")
	}
	f.expect(func(d delta) {
		a := d.of(box)
		d.streamed(a.Receive[TCP], a.Send[TCP], stream)
		if a.Receive[UDP] != (Work{}) || a.Send[UDP] != (Work{}) {
			d.t.Errorf("for UDP it is charged %+v, %+v", a.Receive[UDP], a.Send[UDP])
		}
		d.nothing(other)
	})
}
