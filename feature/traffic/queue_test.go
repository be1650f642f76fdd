package traffic_test

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

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

// However busy the machine is, heldPackets datagrams need at least heldFor to pass a ceil of slow. A
// tenth of that time allows for the ceil's bucket.
const (
	slow        = 10 * mbit
	heldPackets = 250
	heldSize    = 1400 // with room for a tunnel's headers
	heldFor     = heldPackets * (heldSize + 8 + 20 + 14) * 8 * time.Second / slow * 9 / 10
)

// held sends them, and returns the time until all have arrived.
func (h *host) held(from *sandbox.Box, to string, got *load.Board) time.Duration {
	h.t.Helper()
	start, was := time.Now(), got.Read()
	h.sendSized(from, to, heldPackets, heldSize)
	if n := h.through(got, was, heldPackets); n != heldPackets {
		h.t.Errorf("of %d packets to %s %d got through", heldPackets, to, n)
	}
	return time.Since(start)
}

// Everything that a container with a ceil sends is limited, in the queue behind its veth, or at the
// uplink without a veth. No packet is lost, and nothing stays behind.
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

// Packets that stay on the host pass no uplink, but are limited too.
func TestCeilOnHost(t *testing.T) {
	testkit.InFull(t)
	needSharing(t)
	for _, mode := range testkit.Cases(t, 1, "bridge", "routed", "overlay") {
		t.Run(mode, func(t *testing.T) { testCeil(t, mode, true) })
	}
}

// A ceil at a veth leaves the uplink unchanged. The classes come with the first policy that needs them
// and go with the last, in whatever order policies change, and even if they change while no agent runs.
func TestCeilLeavesUplink(t *testing.T) {
	testkit.InFull(t)
	h, _, one := newBridged(t)
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
			if h.leads() && len(h.Programs(h.ns, veth, ebpf.AttachTCXIngress)) != want {
				t.Errorf("%s: %d programs at %s, want %d", when, len(h.Programs(h.ns, veth, ebpf.AttachTCXIngress)), veth, want)
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

// passed returns the packets of a container that passed its egress queue, by the index of its
// veth's end in a box; 0 without a queue.
func (h *host) passed(at *sandbox.Box, veth int) uint64 {
	h.t.Helper()
	return h.passedAt(at, netdev.IFBName(veth, false)).Packets
}

// passedAt returns the counters of the class that limits a container to a ceil at a device; zero if the
// device is missing.
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
	st, sparse := all[qdisc.MinorDefault], all[qdisc.MinorSparse]
	st.Packets, st.Bytes, st.Drops = st.Packets+sparse.Packets, st.Bytes+sparse.Bytes, st.Drops+sparse.Drops
	return st
}

// Bridge and veths may be in a separate namespace, as in Docker's overlays: the IFB is made, watched
// and removed there.
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

// cniBandwidth has the CNI plugin bandwidth limit a container at the veth "hone", as a container
// runtime would, in both directions. It returns its IFB.
func (h *host) cniBandwidth(box *sandbox.Box, rate int) netdev.Link {
	h.t.Helper()
	const plugin = "/usr/lib/cni/bandwidth"
	if _, err := os.Stat(plugin); err != nil {
		testkit.Skip(h.t, "no CNI plugin bandwidth")
	}
	config := fmt.Sprintf(`{"cniVersion": "0.4.0", "name": "fairlead-test", "type": "bandwidth",
		"ingressRate": %[1]d, "ingressBurst": %[1]d, "egressRate": %[1]d, "egressBurst": %[1]d,
		"prevResult": {"cniVersion": "0.4.0", "ips": [], "dns": {}, "interfaces": [{"name": "hone"}, {"name": "eth0", "sandbox": %[2]q}]}}`, rate, box.NetNS())
	cmd := exec.Command(plugin)
	cmd.Env = append(os.Environ(), "CNI_COMMAND=ADD", "CNI_CONTAINERID="+box.Name, "CNI_NETNS="+box.NetNS(), "CNI_IFNAME=eth0", "CNI_PATH=/usr/lib/cni")
	var out bytes.Buffer
	cmd.Stdin, cmd.Stdout, cmd.Stderr = strings.NewReader(config), &out, &out
	p, err := h.ns.Start(cmd)
	must(h.t, err)
	if err := p.Wait(); err != nil {
		h.t.Fatalf("%v: %s", err, &out)
	}
	links, err := h.Open(h.ns).Links(netdev.MostLinks)
	must(h.t, err)
	i := slices.IndexFunc(links, func(l netdev.Link) bool { return l.Kind == "ifb" })
	if i < 0 {
		h.t.Fatalf("the plugin made no IFB: %+v", links)
	}
	return links[i]
}

// Beside the CNI plugin bandwidth the stricter limit holds, in both directions, and explain names the
// plugin's limit where that holds.
func TestBesideCNIBandwidth(t *testing.T) {
	needSharing(t)
	h, box, c := newBridged(t)
	theirs := h.cniBandwidth(box, 10*mbit)
	h.start()
	before := h.state()
	is := func(due uint64, ifbs int, words ...string) {
		t.Helper()
		ceil := policy.Net{Ceil: due}
		must(t, h.due(c, ceil, ceil))
		testkit.Same(t, fmt.Sprintf("ceil %d: IFBs", due), ifbs, h.ifbs())
		var said []string
		for _, e := range h.traffic.Evidence(c.ID) {
			said = append(said, e.Text)
		}
		slices.Sort(said)
		if len(said) != len(words) {
			t.Fatalf("ceil %d: %q, want %q", due, said, words)
		}
		for i, w := range words {
			if !strings.Contains(said[i], w) {
				t.Errorf("ceil %d: %q, want %q", due, said[i], w)
			}
		}
	}
	changed := []string{"net.ceil: only the container's own devices", "net.ingress.ceil: only the container's own devices"}
	stays := []string{"net.ceil = 50mbit is held by somebody else's tbf of 10mbit at " + theirs.Name, "net.ingress.ceil = 50mbit is held by somebody else's tbf of 10mbit at hone"}
	is(50*mbit, 1, stays[0], changed[0], stays[1], changed[1])
	h.resolve(box, h.wire, "10.66.0.1:9000")
	passed := func() (n uint64) {
		h.Netlink(h.ns, func(k *netlink.Handle) error {
			l, err := k.LinkByIndex(theirs.Index)
			if err == nil {
				n = l.Attrs().Statistics.TxPackets
			}
			return err
		})
		return n
	}
	was := passed()
	h.send(box, "10.66.0.1:9000")
	if n := counted(passed, was, datagrams); n < datagrams {
		t.Errorf("of %d packets %d passed the plugin's queue", datagrams, n)
	}
	is(5*mbit, 2, changed...)
	must(t, h.traffic.Remove(t.Context(), c.ID))
	testkit.Same(t, "in the end", before, h.state())
}

// A network plugin's program at the ingress of a host end decides about each packet, as Calico's and
// Cilium's do. It sees all packets while the container has a ceil, and the status says that it may keep
// packets from the ceil's queue.
func TestBesidePolicyPrograms(t *testing.T) {
	needSharing(t)
	for name, says := range map[string]string{"filter": "which packets would not meet", "tcx": "runs before", "tcx, later": "runs before"} {
		t.Run(name, func(t *testing.T) {
			h, box, c := newBridged(t)
			seen, err := ebpf.NewMap(&ebpf.MapSpec{Type: ebpf.Array, KeySize: 4, ValueSize: 8, MaxEntries: 1})
			must(t, err)
			defer seen.Close()
			p, err := ebpf.NewProgram(&ebpf.ProgramSpec{Name: "cil_from_cont", Type: ebpf.SchedCLS, License: "Dual BSD/GPL", Instructions: asm.Instructions{
				asm.LoadMapValue(asm.R1, seen.FD(), 0), asm.Mov.Imm(asm.R2, 1), asm.StoreXAdd(asm.R1, asm.R2, asm.DWord),
				asm.Mov.Imm(asm.R0, 0), asm.Return(), // TC_ACT_OK, TCX_PASS: no later program runs
			}})
			must(t, err)
			defer p.Close()
			index, ceil := h.Index(h.ns, "hone"), policy.Net{Ceil: 5 * mbit}
			h.start()
			before := h.state()
			if name == "tcx, later" {
				must(t, h.apply(c, ceil))
			}
			must(t, h.ns.Do(func() error {
				if name != "filter" {
					l, err := link.AttachTCX(link.TCXOptions{Interface: index, Program: p, Attach: ebpf.AttachTCXIngress})
					if err == nil {
						t.Cleanup(func() { l.Close() })
					}
					return err
				}
				at := netlink.QdiscAttrs{LinkIndex: index, Handle: netlink.MakeHandle(0xffff, 0), Parent: netlink.HANDLE_CLSACT}
				return errors.Join(netlink.QdiscAdd(&netlink.Clsact{QdiscAttrs: at}), netlink.FilterAdd(&netlink.BpfFilter{
					FilterAttrs: netlink.FilterAttrs{LinkIndex: index, Parent: netlink.HANDLE_MIN_INGRESS, Priority: 1, Handle: 1, Protocol: unix.ETH_P_ALL},
					Fd:          p.FD(), Name: "calico", DirectAction: true,
				}))
			}))
			count := func() (n uint64) {
				must(t, seen.Lookup(uint32(0), &n))
				return n
			}
			err = h.apply(c, ceil)
			testkit.Fails(t, "a ceil beside it", err, says)
			h.resolve(box, h.wire, "10.66.0.1:9000")
			was := count()
			h.send(box, "10.66.0.1:9000")
			if n := counted(count, was, datagrams); n < datagrams {
				t.Errorf("of %d packets it saw %d", datagrams, n)
			}
			h.removes(before, c.ID)
		})
	}
}
