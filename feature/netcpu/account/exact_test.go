package account

import (
	"strings"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/fairlead-project/fairlead/sandbox"
)

// A queue in the way: what was sent goes out in NET_TX, in anybody's time, and
// is charged to who sent it.
func TestQdisc(t *testing.T) {
	f := newFabric(t)
	for _, args := range []string{
		"qdisc add dev nic0 root handle 1: htb default 1",
		"class add dev nic0 parent 1: classid 1:1 htb rate 40mbit ceil 40mbit burst 3k cburst 3k",
	} {
		f.run(f.host, "tc", strings.Fields(args)...)
	}
	a, b := f.add("a", 2, f.host), f.add("b", 3, f.host)
	f.victim()
	f.load(a, 0, "udp-send", "--to", "10.66.0.1:9000", "--rate", "3000")
	f.load(b, 1, "udp-send", "--to", "10.66.0.1:9000", "--rate", "1000")
	f.measure(while, func(d delta) {
		d.addsUp()
		mostly(d.t, "both senders", d.of(a).Send[UDP].CPU+d.of(b).Send[UDP].CPU, d.here(), 0.9)
		if d.of(a).Send[UDP].CPU < d.of(b).Send[UDP].CPU {
			d.t.Errorf("who sent three times as much pays less")
		}
		if d.of(a).CPU() == d.of(a).Own {
			d.t.Error("nothing of it in others' time")
		}
	})
}

// ARP, and packets for the host, are the system's and nobody else's.
func TestSystem(t *testing.T) {
	f := newFabric(t)
	box := f.add("box", 2, f.host)
	f.load(f.wire, 1, "udp-send", "--to", "10.66.0.254:9000", "--rate", "10000")
	stop := make(chan struct{})
	done := make(chan error, 1)
	index := f.device(f.wire, "wire", false).Ifindex
	go func() {
		done <- f.ns(f.wire).Do(func() error { return askForNobody(index, stop) })
	}()
	f.measure(while, func(d delta) {
		d.addsUp()
		mostly(d.t, "the system", d.system(), d.here(), 0.75)
		// A broadcast reaches it, too: nothing else is its own.
		if a := d.of(box); a.CPU()-a.Receive[Other].CPU > d.here()/50 {
			d.t.Errorf("the container is charged %+v", a)
		}
		if d.accounts[System].Receive[Other].Packets < 100 {
			d.t.Errorf("system %+v", d.accounts[System])
		}
	})
	close(stop)
	must(t, <-done)
}

// askForNobody broadcasts ARP requests until stop is closed.
func askForNobody(index int, stop <-chan struct{}) error {
	const arp = 0x0608 // ETH_P_ARP in network order
	fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_DGRAM, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	to := &unix.SockaddrLinklayer{Protocol: arp, Ifindex: index, Halen: 6}
	copy(to.Addr[:], "\xff\xff\xff\xff\xff\xff")
	request := []byte{0, 1, 8, 0, 6, 4, 0, 1, 2, 0, 0, 0, 0, 9, 10, 66, 0, 1, 0, 0, 0, 0, 0, 0, 10, 66, 0, 99}
	for {
		select {
		case <-stop:
			return nil
		case <-time.After(time.Millisecond):
		}
		if err := unix.Sendto(fd, request, 0, to); err != nil {
			return err
		}
	}
}

// A host on which nothing happens charges nobody.
func TestIdle(t *testing.T) {
	f := newFabric(t)
	box := f.add("box", 2, f.host)
	time.Sleep(500 * time.Millisecond) // addresses settle
	f.measure(while, func(d delta) {
		if cpu := d.of(box).CPU(); cpu > while/100 {
			d.t.Errorf("%v for a container that does nothing", cpu)
		}
	})
}

// A table of thefts that is full is counted, and the accounts stay right: what
// one has taken and another has lost, too.
func TestLost(t *testing.T) {
	l := newLab(t)
	wire, box, victim := l.bare("wire"), l.box("box"), l.box("victim")
	l.watch(victim)
	l.load(victim, 0, "burn")
	l.wire(sandbox.End{Box: wire, Name: "h0", Addr: prefix("10.66.0.1/24")},
		sandbox.End{Box: box, Name: "eth0", Addr: prefix("10.66.0.2/24")}, "1")
	one := make([]uint64, ebpf.MustPossibleCPU())
	for i := range l.m.maps.FlThefts.MaxEntries() {
		key := accountTheft{Victim: 0xffff, Kind: uint16(i), Culprit: uint16(i >> 4)}
		if err := l.m.maps.FlThefts.Put(key, one); err != nil {
			break // full
		}
	}
	// Only now: what has met before has its place.
	l.watch(box, l.device(wire, "h0", true), l.device(box, "eth0", false))
	l.load(box, 0, "udp-recv", "--listen", ":9000")
	l.load(wire, 1, "udp-send", "--to", "10.66.0.2:9000", "--rate", "20000")
	l.measure(while, func(d delta) {
		if d.readingLost == 0 {
			d.t.Error("nothing was counted as lost")
		}
		d.readingLost, d.thefts = 0, nil
		d.only(box, 0.95)
		mostly(d.t, "what it took", d.of(box).Took, d.of(box).CPU()-d.of(box).Own, 0.9)
		mostly(d.t, "what the victim lost", d.of(victim).Robbed, d.of(box).Took, 0.5)
	})
}
