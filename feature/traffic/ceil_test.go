package traffic_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/cilium/ebpf"

	"github.com/fairlead-project/fairlead/container"
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

// All that a container with a ceil sends is limited, in the queue behind its veth, or at the uplink
// if it has none; no packet is lost, and nothing stays behind.
func testCeil(t *testing.T, mode string, neighbour bool) {
	h := newHost(t, gbit)
	w := h.way(mode, neighbour)
	h.start()
	before := h.state()
	got, to := h.take(w.at), w.to+":9000"
	h.resolve(w.box, w.at, to)
	mostly(t, h.apply(w.c, policy.Net{Ceil: slow})) // without a veth at the uplinks alone
	veth := h.leads() && mode != "macvlan" && mode != "host"
	var held uint64
	var own qdisc.Stats
	if veth {
		testkit.Same(t, "a ceil at the veth changes the uplink", before, h.state())
		index := h.Index(h.ns, "hone")
		if got := h.classesOf(h.ns, netdev.IFBName(index, false))[qdisc.MinorDefault].ceil; got != slow {
			t.Errorf("the ceil behind the veth is %d, want %d", got, slow)
		}
		held = h.passed(h.ns, index)
	} else {
		testkit.Same(t, "the ceil at the uplink", uint64(slow), h.classesOf(h.ns, "nic0")[h.minor(w.c)].ceil)
		own = h.stats(&w.c)
	}
	took := h.held(w.box, to, got)
	if took < heldFor {
		t.Errorf("all came within %v, sooner than the ceil lets them", took)
	}
	if veth {
		st := h.passedAt(h.ns, netdev.IFBName(h.Index(h.ns, "hone"), false))
		if n := st.Packets - held; n < heldPackets || n > heldPackets+heldPackets/4 || st.Drops != 0 {
			t.Errorf("%d packets were sent, %d met the ceil behind the veth, which has dropped %d", heldPackets, n, st.Drops)
		}
	} else if st := h.stats(&w.c); st.Packets-own.Packets < heldPackets || st.Drops != 0 {
		t.Errorf("%d packets were sent, %d are in the class at the uplink, which has dropped %d", heldPackets, st.Packets-own.Packets, st.Drops)
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

// A ceil at a veth leaves the uplink as it is. The classes come with the first policy that needs them
// and go with the last, in whatever order policies come and go, also while no agent runs.
func TestCeilLeavesUplink(t *testing.T) {
	testkit.InFull(t)
	h := newHost(t, gbit)
	h.bridge()
	_, one := h.add("one", "10.66.0.2/24", h.ns)
	_, two := h.add("two", "10.66.0.3/24", h.ns)
	h.start()
	before := h.state()
	ceil, rate := policy.Net{Ceil: slow}, policy.Net{Rate: mbit}
	type state [2]policy.Net // of one and two
	states := []state{{}, {ceil}, {{}, rate}, {ceil, ceil}, {ceil, rate}}
	bring := func(s state, first int, when string) {
		t.Helper()
		var alive []container.ID
		for _, i := range []int{first, 1 - first} {
			c := []container.Container{one, two}[i]
			mostly(t, h.apply(c, s[i])) // without a veth at the uplinks alone
			if s[i] != (policy.Net{}) {
				alive = append(alive, c.ID)
			}
		}
		h.sweep(alive...)
		must(t, h.traffic.Prune(t.Context(), func(container.ID) bool { return true }))
		tree := s[1] == rate || !h.leads() && s != state{}
		classes, ceils := 2, 0
		for i, veth := range []string{"hone", "htwo"} {
			want := 0
			if tree && s[i] != (policy.Net{}) { // its packets are identified
				want, classes = want+1, classes+1
			}
			if s[i] == ceil { // and led to an IFB
				want, ceils = want+1, ceils+1
			}
			if h.leads() && len(h.programs(veth, ebpf.AttachTCXIngress)) != want {
				t.Errorf("%s: %d programs at %s, want %d", when, len(h.programs(veth, ebpf.AttachTCXIngress)), veth, want)
			}
		}
		if n := h.ifbs(); h.leads() && n != ceils {
			t.Errorf("%s: %d IFBs, want %d", when, n, ceils)
		}
		if said := fmt.Sprint(h.traffic.Evidence(one.ID)); strings.Contains(said, "net.ceil: only the container's own devices") != (s[0] == ceil && h.leads()) {
			t.Errorf("%s: explained by %s", when, said)
		}
		if now := h.state(); (now != before) != tree {
			t.Errorf("%s: the uplink's state is\n%swas\n%s", when, now, before)
		} else if n := len(h.classes()); tree && n != classes {
			t.Errorf("%s: %d classes, want %d", when, n, classes)
		}
	}
	for i, from := range states {
		for j, to := range states {
			for first := range 2 {
				bring(from, 0, fmt.Sprintf("%d before %d", i, j))
				bring(to, first, fmt.Sprintf("%d after %d, by %d", j, i, first))
			}
			if j != (i+2)%len(states) {
				continue
			}
			during := h.state()
			must(t, h.traffic.Close()) // killed, once before each
			must(t, h.journal.Close())
			testkit.Same(t, "after a kill", during, h.state())
			h.start()
			bring(from, 0, fmt.Sprintf("%d after %d and a kill", i, j))
		}
	}
	bring(states[0], 0, "in the end")
	h.undone(before)
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

// passed returns the packets of a container that passed its egress queue, by the index of its
// veth's end in a box; 0 without a queue.
func (h *host) passed(at *sandbox.Box, veth int) uint64 {
	h.t.Helper()
	return h.passedAt(at, netdev.IFBName(veth, false)).Packets
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
	must(t, at.Delete(netdev.IFBName(veth, false)))
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
