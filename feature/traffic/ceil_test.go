package traffic_test

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/feature/traffic"
	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/kernel/netdev"
	"github.com/fairlead-project/fairlead/kernel/qdisc"
	"github.com/fairlead-project/fairlead/lab/load"
	"github.com/fairlead-project/fairlead/lab/sandbox"
	"github.com/fairlead-project/fairlead/policy"
)

// way leads from a container with a ceil to a receiver.
type way struct {
	box *sandbox.Box
	c   container.Container
	to  string
	at  *sandbox.Box
}

// way makes the host of a mode, and a way to the wire or to a neighbour.
func (h *host) way(mode string, neighbour bool) way {
	h.t.Helper()
	x, y, to := h.two(mode)
	w := way{box: x.box, c: x.c, to: to, at: h.wire}
	if neighbour {
		w.to = map[string]string{"bridge": "10.66.0.3", "overlay": "10.69.0.3", "routed": "10.67.0.3"}[mode]
		w.at = y.box
	}
	return w
}

// However busy the machine is, heldPackets datagrams take at least heldFor to pass a ceil of slow.
// A tenth of that time is left for the ceil's bucket.
const (
	slow        = 10 * mbit
	heldPackets = 250
	heldSize    = 1400 // with room for a tunnel's headers
	heldFor     = heldPackets * (heldSize + 8 + 20 + 14) * 8 * time.Second / slow * 9 / 10
)

// held sends them, and returns how long it took until all arrived.
func (h *host) held(from *sandbox.Box, to string, got *load.Board) time.Duration {
	h.t.Helper()
	start, was := time.Now(), got.Read()
	h.sendSized(from, to, heldPackets, heldSize)
	if n := h.through(got, was, heldPackets); n != heldPackets {
		h.t.Errorf("of %d packets to %s %d got through", heldPackets, to, n)
	}
	return time.Since(start)
}

// All that a container with a ceil sends is limited, at the uplink and in the queue behind its
// veth; no packet is lost, and nothing stays behind.
func testCeil(t *testing.T, mode string, neighbour bool) {
	h := newHost(t, gbit)
	w := h.way(mode, neighbour)
	h.start()
	before := h.state()
	got, to := h.take(w.at), w.to+":9000"
	h.resolve(w.box, w.at, to)
	mostly(t, h.apply(w.c, policy.Net{Ceil: slow})) // without a veth at the uplinks alone
	if got := h.classesOf(h.ns, "nic0")[h.minor(w.c)].ceil; got != slow {
		t.Errorf("the ceil at the uplink is %d, want %d", got, slow)
	}
	veth := h.leads() && mode != "macvlan" && mode != "host"
	var held uint64
	if veth {
		index := h.Index(h.ns, "hone")
		if got := h.classesOf(h.ns, netdev.IFBName(index))[qdisc.MinorDefault].ceil; got != slow {
			t.Errorf("the ceil behind the veth is %d, want %d", got, slow)
		}
		held = h.passed(h.ns, index)
	}
	own := h.stats(&w.c)
	took := h.held(w.box, to, got)
	if took < heldFor {
		t.Errorf("all came within %v, sooner than the ceil lets them", took)
	}
	if n := h.stats(&w.c).Packets - own.Packets; !neighbour && n < heldPackets || n > heldPackets/4 && neighbour {
		t.Errorf("%d packets were sent, %d are in the class at the uplink", heldPackets, n)
	}
	if n := h.stats(&w.c).Drops; n != 0 {
		t.Errorf("the class at the uplink has dropped %d packets", n)
	}
	if veth {
		st := h.passedAt(h.ns, netdev.IFBName(h.Index(h.ns, "hone")))
		if n := st.Packets - held; n < heldPackets || n > heldPackets+heldPackets/4 || st.Drops != 0 {
			t.Errorf("%d packets were sent, %d met the ceil behind the veth, which has dropped %d", heldPackets, n, st.Drops)
		}
	}
	h.removes(before, w.c.ID)
}

func TestCeilAtUplink(t *testing.T) {
	testkit.InFull(t)
	for _, mode := range []string{"bridge", "routed", "overlay", "macvlan", "host"} {
		t.Run(mode, func(t *testing.T) { testCeil(t, mode, false) })
	}
}

// Packets that stay on the host pass no uplink, and are limited all the same.
func TestCeilOnHost(t *testing.T) {
	testkit.OnKernels(t)
	needSharing(t)
	for _, mode := range testkit.Cases(t, 1, "bridge", "routed", "overlay") {
		t.Run(mode, func(t *testing.T) { testCeil(t, mode, true) })
	}
}

// limited makes a container with a ceil and a neighbour that listens, and reports whether packets
// arrive now.
func (h *host) limited() (box *sandbox.Box, c container.Container, got *load.Board) {
	h.t.Helper()
	h.bridge()
	box, c = h.add("one", "10.66.0.2/24", h.ns)
	near, _ := h.add("two", "10.66.0.3/24", h.ns)
	return box, c, h.take(near)
}

// gets reports whether all packets of a container reach its neighbour.
func (h *host) gets(box *sandbox.Box, got *load.Board) bool {
	h.t.Helper()
	was := got.Read()
	sent := h.send(box, "10.66.0.3:9000")
	return h.through(got, was, sent) >= sent
}

// passed returns the packets of a container that passed its egress queue, by the index of its
// veth's end in a box; 0 without a queue.
func (h *host) passed(at *sandbox.Box, veth int) uint64 {
	h.t.Helper()
	return h.passedAt(at, netdev.IFBName(veth)).Packets
}

// passedAt returns the counters of the class of a device that limits a container to a ceil; zero if
// the device is missing.
func (h *host) passedAt(at *sandbox.Box, dev string) qdisc.Stats {
	h.t.Helper()
	ns := h.Open(at)
	links, err := ns.Links(netdev.MostLinks)
	must(h.t, err)
	i := slices.IndexFunc(links, func(l netdev.Link) bool { return l.Name == dev })
	if i < 0 {
		return qdisc.Stats{}
	}
	d, err := qdisc.Open(ns, links[i].Index)
	must(h.t, err)
	defer d.Close()
	all, err := d.Stats(qdisc.KindHTB)
	must(h.t, err)
	return all[qdisc.MinorDefault]
}

// A change of the ceil is made in place; the ceil goes with the policy and with the container, and
// that of a killed agent is adopted.
func TestCeilOnHostLife(t *testing.T) {
	testkit.InFull(t)
	needSharing(t)
	h := newHost(t, gbit)
	box, c, got := h.limited()
	veth := h.Index(h.ns, "hone")
	h.start()
	before := h.state()
	none := func(when string) {
		t.Helper()
		if h.state() != before || h.ifbs() != 0 || len(h.journal.Entries()) != 0 {
			t.Errorf("%s: %d IFBs\n%swas\n%s%+v", when, h.ifbs(), h.state(), before, h.journal.Entries())
		}
		if !h.gets(box, got) {
			t.Errorf("%s: packets are lost", when)
		}
	}
	must(t, h.apply(c, policy.Net{Ceil: 50 * mbit}))
	if !h.gets(box, got) || h.passed(h.ns, veth) < 50 {
		t.Errorf("with a ceil: %d packets were held", h.passed(h.ns, veth))
	}
	rows := h.traffic.Read().Rows
	if i := rowOf(rows, "hone"); i < 0 || rows[i].Direction != "egress" || rows[i].Ceil != 50*mbit || rows[i].Packets < 50 {
		t.Errorf("rows %+v", rows)
	}
	must(t, h.apply(c, policy.Net{Ceil: 60 * mbit}))
	if n := h.passed(h.ns, veth); n < 50 {
		t.Errorf("after a change: %d packets were held: it was not made in place", n)
	}
	must(t, h.apply(c, policy.Net{Weight: 1}))
	if h.ifbs() != 0 {
		t.Error("without a ceil there is an IFB")
	}
	must(t, h.traffic.Remove(t.Context(), c.ID))
	none("after Remove")

	// Killed, and adopted: with the ceil, and without.
	must(t, h.apply(c, policy.Net{Ceil: 50 * mbit}))
	entries := len(h.journal.Entries())
	again := func() {
		t.Helper()
		must(t, h.traffic.Close())
		must(t, h.journal.Close())
		if !h.gets(box, got) || h.ifbs() != 1 {
			t.Errorf("after a kill: %d IFBs, or packets are lost", h.ifbs())
		}
		h.start()
	}
	again()
	must(t, h.apply(c, policy.Net{Ceil: 50 * mbit}))
	must(t, h.traffic.Prune(t.Context(), func(container.ID) bool { return true }))
	was := h.passed(h.ns, veth)
	if n := len(h.journal.Entries()); n != entries || !h.gets(box, got) || h.passed(h.ns, veth) < was+50 {
		t.Errorf("adopted: %d entries, had %d; %d packets were held, had been %d", n, entries, h.passed(h.ns, veth), was)
	}
	again()
	must(t, h.apply(c, policy.Net{Weight: 1})) // its ceil has gone meanwhile
	if h.ifbs() != 0 {
		t.Error("the IFB of a killed agent stays")
	}
	must(t, h.traffic.Remove(t.Context(), c.ID))
	none("in the end")
}

func rowOf(rows []traffic.Row, device string) int {
	return slices.IndexFunc(rows, func(r traffic.Row) bool { return r.Uplink == device })
}

// The IFB, or the veth, is deleted.
func TestCeilOnHostVanishes(t *testing.T) {
	testkit.InFull(t)
	needSharing(t)
	h := newHost(t, gbit)
	box, c, got := h.limited()
	veth := h.Index(h.ns, "hone")
	h.start()
	before := h.state()
	must(t, h.apply(c, policy.Net{Ceil: 50 * mbit}))
	passes := func(when string) {
		t.Helper()
		h.passesFrom(box, "10.66.0.3:9000", got, when+": packets")
	}
	h.Change(h.ns, netdev.IFBName(veth), (*netlink.Handle).LinkSetDown)
	passes("the IFB was set down")
	must(t, h.apply(c, policy.Net{Ceil: 50 * mbit}))
	must(t, h.ns.Delete(netdev.IFBName(veth)))
	passes("the IFB has gone")
	must(t, h.apply(c, policy.Net{Ceil: 50 * mbit}))
	passes("with another IFB")
	if n := h.passed(h.ns, veth); n < 50 {
		t.Errorf("with another IFB: %d packets were held", n)
	}
	// The veth goes with the container, before any notice.
	must(t, h.ns.Delete("hone"))
	h.removes(before, c.ID)
}

// Bridge and veths may be in a namespace of their own, as Docker's overlays have them: the IFB is
// made, watched and removed there.
func TestCeilOnHostApart(t *testing.T) {
	testkit.InFull(t)
	needSharing(t)
	h := newHost(t, gbit)
	box, c := h.overlay(true)
	at := h.apart
	near, _ := h.add("two", "10.69.0.3/24", at)
	veth := h.Index(at, "hone")
	got := h.take(near)
	h.start()
	gets := func() (sent, through uint64) {
		was := got.Read()
		sent = h.send(box, "10.69.0.3:9000")
		return sent, h.through(got, was, sent)
	}
	must(t, h.apply(c, policy.Net{Ceil: 50 * mbit}))
	if sent, through := gets(); through < sent || h.passed(at, veth) < sent || h.ifbs() != 0 {
		t.Errorf("%d packets were sent, %d got through, %d passed the queue; %d IFBs in the host's namespace", sent, through, h.passed(at, veth), h.ifbs())
	}
	must(t, at.Delete(netdev.IFBName(veth)))
	h.passesFrom(box, "10.69.0.3:9000", got, "the IFB has gone: packets")
	must(t, h.apply(c, policy.Net{Ceil: 50 * mbit}))
	if sent, _ := gets(); h.passed(at, veth) < sent {
		t.Errorf("with another IFB: %d packets were sent, %d passed the queue", sent, h.passed(at, veth))
	}
	must(t, h.traffic.Remove(t.Context(), c.ID))
	if n := h.passed(at, veth); n != 0 || len(h.journal.Entries()) != 0 {
		t.Errorf("in the end there is an IFB, or a note: %+v", h.journal.Entries())
	}
}

// BenchmarkCeil measures the cost of a ceil that is never reached: bulk TCP and pings from a
// container to the wire and to a neighbour, without a ceil and with one, in turns.
func BenchmarkCeil(b *testing.B) {
	for _, neighbour := range []bool{false, true} {
		b.Run(fmt.Sprintf("to a neighbour %v", neighbour), func(b *testing.B) {
			h := newHost(b, 100*gbit)
			w := h.way("bridge", neighbour)
			h.start()
			got := h.run(w.at, "tcp-recv", "--listen", ":9002")
			bulk := h.run(w.box, "tcp-send", "--conns", "1", "--to", w.to+":9002")
			var rates, pings [2][]float64
			for b.Loop() {
				for round := range 6 {
					on := (round + round/2) % 2 // forwards, then backwards
					must(b, h.apply(w.c, []policy.Net{{Weight: 1}, {Weight: 1, Ceil: 90 * gbit}}[on]))
					bulk.SetRate(load.Flood)
					time.Sleep(500 * time.Millisecond)
					was := got.Read()
					time.Sleep(1500 * time.Millisecond)
					rates[on] = append(rates[on], got.Read().Since(was).BitRate()/gbit)
					bulk.SetRate(0)
					time.Sleep(300 * time.Millisecond)
					took, err := ping(w.box, w.to, 500)
					must(b, err)
					pings[on] = append(pings[on], float64(took[len(took)/2].Nanoseconds())/1e3)
				}
			}
			for on, name := range []string{"without", "with"} {
				slices.Sort(rates[on])
				slices.Sort(pings[on])
				b.ReportMetric(rates[on][len(rates[on])/2], name+"-Gbit/s")
				b.ReportMetric(pings[on][len(pings[on])/2], name+"-ping-us")
			}
		})
	}
}
