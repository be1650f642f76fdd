package account

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/fairlead-project/fairlead/bench/load"
	"github.com/fairlead-project/fairlead/sandbox"
)

// tc runs lines of tc in a box.
func (l *lab) tc(b *sandbox.Box, lines ...string) {
	l.t.Helper()
	for _, args := range lines {
		l.run(b, "tc", strings.Fields(args)...)
	}
}

// A queue in the way: what was sent goes out in NET_TX and by timers, in anybody's
// time, and is charged to who sent it.
func TestQdisc(t *testing.T) {
	f := newFabric(t)
	f.tc(f.host, "qdisc add dev nic0 root handle 1: htb default 1",
		"class add dev nic0 parent 1: classid 1:1 htb rate 40mbit ceil 40mbit burst 3k cburst 3k")
	a, b := f.add("a", 2, f.host), f.add("b", 3, f.host)
	f.victim()
	f.load(f.wire, 1, "udp-recv", "--listen", ":9000")
	f.load(a, 1, "udp-send", "--to", "10.66.0.1:9000", "--rate", "3000")
	f.load(b, 1, "udp-send", "--to", "10.66.0.1:9000", "--rate", "1000")
	f.measure(3*while, func(d delta) {
		d.addsUp()
		sa, sb := d.of(a).Send[UDP].CPU, d.of(b).Send[UDP].CPU
		mostly(d.t, "both senders", sa+sb, d.here(), 0.9)
		pa, pb := float64(d.of(a).Send[UDP].Packets), float64(d.of(b).Send[UDP].Packets)
		if pa < 2*pb || pb < 100 {
			d.t.Errorf("%v and %v packets were sent: not the load that was asked for", pa, pb)
		}
		near(d.t, "who sent most packets", sa, time.Duration(float64(sa+sb)*pa/(pa+pb)), 0.2)
		near(d.t, "who sent fewer", sb, time.Duration(float64(sa+sb)*pb/(pa+pb)), 0.2)
		if d.of(a).CPU() == d.of(a).Own {
			d.t.Error("nothing of it in others' time")
		}
	})
}

// An IFB works in a tasklet: what the uplink receives goes through it before it
// comes to the bridge. Whose a packet is shows behind it, and what was before, the
// uplink's part, is that container's, too.
func TestIFB(t *testing.T) {
	for _, c := range []struct {
		name   string
		queue  string
		theirs float64 // of all: who has waited in the IFB's queue has left the uplink's part to the system
	}{
		{"at once", "", 0.95},
		{"shaped", "qdisc add dev ifb0 root handle 1: htb default 1\n" +
			"class add dev ifb0 parent 1: classid 1:1 htb rate 8mbit ceil 8mbit burst 3k cburst 3k\n", 0.85},
	} {
		t.Run(c.name, func(t *testing.T) { testIFB(t, c.queue, c.theirs) })
	}
}

func testIFB(t *testing.T, queue string, theirs float64) {
	w := newStopwatch(t, false)
	w.start()
	f := newFabric(t)
	f.rps(f.host, "nic0", "0")
	f.ip(f.host, "link", "add", "ifb0", "type", "ifb")
	f.ip(f.host, "link", "set", "ifb0", "up")
	f.tc(f.host, "qdisc add dev nic0 handle ffff: ingress",
		"filter add dev nic0 parent ffff: protocol all u32 match u32 0 0 action mirred egress redirect dev ifb0")
	a, b := f.add("a", 2, f.host), f.add("b", 3, f.host)
	for _, box := range []*sandbox.Box{a, b} {
		f.load(box, 0, "udp-recv", "--listen", ":9000")
	}
	// So that what is done in the tasklet counts: from there on it is the backlog's.
	var filters strings.Builder
	filters.WriteString(queue)
	for _, end := range []string{"h2", "h3"} {
		fmt.Fprintf(&filters, "qdisc add dev %s clsact\n", end)
		for i := range 500 {
			fmt.Fprintf(&filters, "filter add dev %s egress pref 1 protocol ip u32 match u32 %d 0xffffffff at 12\n", end, i)
		}
	}
	batch := filepath.Join(t.TempDir(), "filters")
	must(t, os.WriteFile(batch, []byte(filters.String()), 0o600))
	f.tc(f.host, "-batch "+batch)
	// From behind a router, as a NIC's packets have no socket, by which they would be
	// the sender's.
	far := f.box("far")
	f.lab.wire(sandbox.End{Box: far, Name: "eth0", Addr: prefix("10.68.0.1/24")},
		sandbox.End{Box: f.wire, Name: "far", Addr: prefix("10.68.0.254/24")}, "")
	f.ip(far, "route", "add", "default", "via", "10.68.0.254")
	must(t, f.wire.Sysctl("ipv4/ip_forward", "1"))
	for _, box := range []*sandbox.Box{a, b} {
		f.ip(box, "route", "add", "default", "via", "10.66.0.1") // and no answer is needed
	}
	f.load(far, 1, "udp-send", "--rate", "1000",
		"--to", "10.66.0.2:9000,10.66.0.2:9000,10.66.0.2:9000,10.66.0.3:9000")
	var all, tasklets time.Duration
	f.several(func() delta {
		d, was, now := beside(f.lab, while, w.read)
		all, tasklets = now.since(was, netRx, netTx, tasklet), now.since(was, tasklet)
		t.Logf("by the stopwatch %v, %v of it in tasklets", all, tasklets)
		return d
	}, func(d delta) {
		d.addsUp()
		if queue == "" { // else the meter has timers' interrupts, too
			near(d.t, "the meter against the stopwatch", d.softirq, all, 0.03) // all tasklets are in it
		}
		ca, cb := d.of(a).CPU(), d.of(b).CPU()
		if tasklets < all/4 {
			d.t.Errorf("tasklets took %v of %v: nothing was tested", tasklets, all)
		}
		mostly(d.t, "both containers", ca+cb, d.here(), theirs)
		near(d.t, "three packets of four", ca, (ca+cb)*3/4, 0.25) // one that comes alone costs more
	})
}

// In a flood the kernel works in its own thread, beside one that computes: what
// is taken from that is what the scheduler has given it, and the interrupts that
// come meanwhile, which are not the thread's time.
func TestKsoftirqd(t *testing.T) {
	f := newFabric(t)
	box := f.add("box", 2, f.host)
	f.victim()
	f.load(box, 0, "udp-recv", "--listen", ":9000")
	f.load(f.wire, 1, "udp-send", "--to", "10.66.0.2:9000", "--rate", "flood", "--size", "64")
	threads := ksoftirqds(t)
	var given time.Duration
	f.several(func() delta {
		d, was, now := beside(f.lab, while, func() (sum time.Duration) {
			for _, pid := range threads {
				sum += ran(t, pid)
			}
			return sum
		})
		given = now - was
		return d
	}, func(d delta) {
		d.addsUp()
		var all time.Duration
		for theft, ns := range d.thefts {
			if theft.Victim.Kind == Ksoftirqd {
				all += ns
			}
		}
		by := d.thefts[Theft{Victim: Party{Kind: Ksoftirqd}, Culprit: f.ids[box]}]
		d.t.Logf("%v of %v that ksoftirqd ran, %v of it by the container", all, given, by)
		if given < d.total()/10 {
			d.t.Errorf("ksoftirqd ran for %v: nothing was tested", given)
		}
		mostly(d.t, "the container's part", by, all, 0.75)
		mostly(d.t, "what was taken from ksoftirqd", all, given, 0.8)
		if all > 2*given {
			d.t.Errorf("more than twice of what ksoftirqd ran for was taken from it")
		}
	})
}

func ksoftirqds(t *testing.T) (pids []int) {
	t.Helper()
	comms, err := filepath.Glob("/proc/[0-9]*/comm")
	must(t, err)
	for _, path := range comms {
		if comm, err := os.ReadFile(path); err == nil && strings.HasPrefix(string(comm), "ksoftirqd/") {
			pid, err := strconv.Atoi(filepath.Base(filepath.Dir(path)))
			must(t, err)
			pids = append(pids, pid)
		}
	}
	if len(pids) == 0 {
		t.Fatal("no ksoftirqd")
	}
	return pids
}

// Packets that overtake one another, their acknowledgements, and those that stand
// for what is missing, are the connection's.
func TestReordered(t *testing.T) {
	f := newFabric(t)
	// No netem: every second packet takes the slower way.
	f.run(f.wire, "ethtool", "-K", "wire", "tso", "off", "gso", "off")
	f.tc(f.wire, "qdisc add dev wire root handle 1: htb default 1",
		"class add dev wire parent 1: classid 1:1 htb rate 10gbit",
		"class add dev wire parent 1: classid 1:2 htb rate 100mbit ceil 100mbit",
		"filter add dev wire parent 1: protocol ip u32 match u16 1 1 at 4 flowid 1:2")
	box := f.add("box", 2, f.host)
	f.victim()
	f.load(box, 0, "tcp-recv", "--listen", ":9000")
	f.load(f.wire, 1, "tcp-send", "--to", "10.66.0.2:9000")
	late := func() uint64 { return counter(t, box, "netstat", "TcpExt:", "TCPOFOQueue") }
	before := late()
	f.measure(while, func(d delta) {
		d.only(box, 0.9)
		mostly(d.t, "its protocol", d.of(box).Receive[TCP].CPU+d.of(box).Send[TCP].CPU, d.of(box).CPU(), 0.6)
		if d.of(box).Send[TCP].Packets == 0 {
			d.t.Error("no acknowledgement")
		}
	})
	if n := late() - before; n < 100 {
		t.Errorf("only %d packets were out of order", n)
	}
}

// Two containers behind one tunnel: each pays for its packets, and for its part of
// what they came in.
func TestOverlayShares(t *testing.T) {
	f := newFabric(t)
	overlay := f.overlay()
	var boxes [2]*sandbox.Box
	var boards [2]*load.Board
	for i := range boxes {
		boxes[i] = f.addTo(overlay, fmt.Sprint("box", i), 2+i)
		boards[i] = f.load(boxes[i], 0, "udp-recv", "--listen", ":9000")
	}
	f.load(f.wire, 1, "udp-send", "--rate", "4000", "--size", "1300",
		"--to", "10.67.0.2:9000,10.67.0.2:9000,10.67.0.2:9000,10.67.0.3:9000")
	var got [2]float64
	f.several(func() delta {
		d, was, now := beside(f.lab, while, func() [2]load.Reading { return [2]load.Reading{boards[0].Read(), boards[1].Read()} })
		for i := range got {
			got[i] = float64(now[i].Since(was[i]).Ops)
		}
		return d
	}, func(d delta) {
		d.addsUp()
		if got[1] < 500 || got[0] < 2.5*got[1] || got[0] > 3.5*got[1] {
			d.t.Errorf("got %v packets: not the load that was asked for", got)
		}
		part := func(what string, of func(Account) time.Duration) {
			all := of(d.of(boxes[0])) + of(d.of(boxes[1]))
			if all < d.here()/20 {
				d.t.Errorf("%s: only %v of %v", what, all, d.here())
			}
			for i := range boxes {
				near(d.t, fmt.Sprintf("%s of %.0f packets", what, got[i]), of(d.of(boxes[i])), time.Duration(got[i]/(got[0]+got[1])*float64(all)), 0.15)
			}
		}
		part("all", Account.CPU)
		part("the tunnel's work", func(a Account) time.Duration { return a.Receive[Encapsulated].CPU })
		mostly(d.t, "both containers", d.of(boxes[0]).CPU()+d.of(boxes[1]).CPU(), d.here(), 0.85)
	})
}
